"""macOS and Windows as unisono and its tests see them, on Linux: see simulated.py."""
