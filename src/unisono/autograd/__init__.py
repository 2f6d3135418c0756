"""One autograd node between the caller's graph and the replicas' graphs, and gradients summed behind it."""
