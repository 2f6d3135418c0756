"""The nodes between the caller's graph and the replicas' graphs, and the sums of gradients behind them."""
