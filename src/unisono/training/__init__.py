"""Data, models and the loop behind `unisono train`."""
