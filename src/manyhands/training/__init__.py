"""Data, models and the loop behind `manyhands train`."""
