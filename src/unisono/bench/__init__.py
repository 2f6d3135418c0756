"""The benchmark behind `unisono bench`: our engines and the alternatives, measured in turn."""
