"""How does an unmodified script get unisono' replicas: torch's names replaced, the script run, its rows counted."""
