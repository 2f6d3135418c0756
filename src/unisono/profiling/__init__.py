"""Where the time of a step goes: `model.profile()`, its table, its Chrome trace, its picture."""
