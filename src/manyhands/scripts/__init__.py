"""How does an unmodified script get manyhands' replicas: torch's names replaced, the script run, its rows counted."""
