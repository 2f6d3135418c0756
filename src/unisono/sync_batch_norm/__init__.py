"""Batch norm over the rows of all replicas, and of all processes."""
