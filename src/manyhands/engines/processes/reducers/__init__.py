"""How parameters reach worker processes and gradients come back: one file a transport."""
