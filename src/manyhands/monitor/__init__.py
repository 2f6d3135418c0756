"""What this machine has, and what runs on it now: `manyhands devices` and `manyhands watch`."""
