"""The rows and the learning rate of each step.

Neither depends on the devices. The order of the rows depends on the seed and the epoch only, so that a run can be
resumed after any step, on any number of devices.
"""

import math

import torch
from torch import Tensor


def num_steps(rows: int, batch_size: int) -> int:
    """Return the number of steps of an epoch: the fewest in which no step has more than `batch_size` rows.

    It is up to a sixteenth larger, if then all steps have one size: a compiler makes code for each size.

    Example:
        >>> num_steps(60_000, 256), 60_000 / num_steps(60_000, 256)
        (240, 250.0)
        >>> num_steps(1437, 128)  # 1437 = 3 * 479, so no size near 128 divides it
        12
    """
    fewest = -(-rows // batch_size)
    candidates = range(fewest, fewest + fewest // 16 + 1)
    return next((number for number in candidates if rows % number == 0), fewest)


def epoch_batches(
    rows: int, batch_size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """Return the row numbers of each step of an epoch on `device`: shuffled, each row once.

    Sizes are equal or differ by one row. There is no small last batch: the learning rate is chosen for the full batch,
    and a few rows would leave replicas with a single one, which batch norm cannot train on.

    Example:
        >>> [len(batch) for batch in epoch_batches(1437, 128, seed=0, epoch=0)]
        [120, 120, 120, 120, 120, 120, 120, 120, 120, 119, 119, 119]
    """
    order = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(rows, generator=order).to(device).tensor_split(num_steps(rows, batch_size))


def learning_rate(step: int, *, peak: float, steps_per_epoch: int, epochs: int) -> float:
    """Return the learning rate of a step, counted from 0.

    It rises linearly to `peak` over the first epoch, and then falls along half a cosine to 0 at the end of the run
    (Loshchilov and Hutter, "SGDR", 2016, without restarts).
    """
    if step < steps_per_epoch:
        return peak * (step + 1) / steps_per_epoch
    progress = (step - steps_per_epoch) / (steps_per_epoch * (epochs - 1))
    return peak * (1 + math.cos(math.pi * progress)) / 2
