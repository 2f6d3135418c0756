"""Several processes under a launcher: environment, collectives, failures, and the all-reduce of gradients."""
