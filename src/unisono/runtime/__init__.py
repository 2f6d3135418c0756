"""The machine and torch: devices, streams, threads, random numbers. Nothing here replicates or runs a module."""
