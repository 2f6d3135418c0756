"""Whole batches on every device, without gradients: `DataParallel.map` and `DataParallel.evaluate`."""
