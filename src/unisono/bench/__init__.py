"""The benchmark behind `unisono bench`: `DataParallel` and the alternatives, measured in turn."""
