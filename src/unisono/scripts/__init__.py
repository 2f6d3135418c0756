"""How does an unmodified script get unisono's replicas: torch's names replaced, the script run, its rows counted."""
