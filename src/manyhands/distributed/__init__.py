"""Several processes under a launcher: who they are, what they exchange, and gradients summed over them."""
