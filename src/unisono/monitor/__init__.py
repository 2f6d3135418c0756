"""What this machine has, and what runs on it now: `unisono devices` and `unisono watch`."""
