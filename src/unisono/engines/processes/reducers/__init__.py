"""Transports: how parameters reach worker processes and gradients come back; one a file."""
