"""How far a training step will scale: a model of all-reduce and overlap."""
