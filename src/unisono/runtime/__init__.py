"""The machine and torch: devices, streams, threads, random numbers. Nothing here knows what a module is."""
