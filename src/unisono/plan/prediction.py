"""The time of a training step on n devices: its computing, and the communication that does not overlap with backward.

Gradients are reduced in buckets while backward still runs (Li et al., "PyTorch Distributed: experiences on accelerating
data parallel training", VLDB 13, 2020, section 3.2.3). The assumptions:

- gradients become ready at a constant rate from the beginning of backward to its end, and a bucket is sent when it is
  full;
- buckets are reduced one after the other, in that order, on one channel;
- the optimizer waits for the last one;
- communication does not slow down computing, and all devices are equally fast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from unisono.plan.allreduce import ALGORITHMS, AllReduceTime
from unisono.plan.links import Cluster

MOST_DEVICES = 1024
MOST_BUCKETS = 10_000
BEST = "best"


@dataclass(frozen=True)
class StepCost:
    """A training step on one device."""

    compute_s: float  # all of it: forward, backward, optimizer
    backward_s: float  # the part of it during which gradients become ready
    gradient_bytes: float  # of all parameters together
    bucket_bytes: float  # how many are reduced at once; the last bucket has the rest

    def buckets(self) -> list[float]:
        """Return the bytes of each bucket, in the order in which backward fills them.

        >>> StepCost(3.0, 2.0, 60.0, 25.0).buckets()
        [25.0, 25.0, 10.0]
        """
        full = math.ceil(self.gradient_bytes / self.bucket_bytes) - 1
        return [self.bucket_bytes] * full + [self.gradient_bytes - full * self.bucket_bytes]

    def ready_s(self) -> list[float]:
        """Return when each bucket is full, in seconds from the beginning of backward."""
        return [self.backward_s * filled / self.gradient_bytes for filled in accumulate(self.buckets())]


@dataclass(frozen=True)
class Prediction:
    """The predicted step on so many devices."""

    num_devices: int
    algorithm: str  # of the all-reduce
    compute_s: float  # of each device
    communication_s: float  # of all buckets together
    exposed_s: float  # the part of it after the end of backward

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next."""
        return self.compute_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """Speed by device, relative to one device by itself."""
        return self.compute_s / self.step_s

    @property
    def efficiency_without_overlap(self) -> float:
        """The same, if reducing began only after backward."""
        return self.compute_s / (self.compute_s + self.communication_s)


def counts_up_to(most: int) -> list[int]:
    """Return the numbers of devices that are predicted: 1, 2, 4 and so on, and last the largest.

    >>> counts_up_to(8), counts_up_to(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    return [2**power for power in range((most - 1).bit_length())] + [most]


def exposed_s(ready_s: Sequence[float], reduce_s: Sequence[float], backward_s: float) -> float:
    """Return how long buckets are still being reduced after the end of backward, which is when the last one is full.

    Reducing ends at max over k of (ready_k + reduce_k + reduce_(k+1) + ...), where bucket k is the last one that the
    channel waited for; after that it was never idle.

    >>> exposed_s(ready_s=[1.0, 2.0], reduce_s=[0.25, 0.5], backward_s=2.0)
    0.5
    """
    end_s, remaining_s = 0.0, 0.0
    for ready, seconds in zip(reversed(ready_s), reversed(reduce_s), strict=True):
        remaining_s += seconds
        end_s = max(end_s, ready + remaining_s)
    return max(0.0, end_s - backward_s)


def predict(
    step: StepCost, cluster: Cluster, num_devices: int, algorithm: str = BEST, *, strong: bool = False
) -> Prediction:
    """Predict a step, given on one device, on so many; BEST is the algorithm with which it is fastest.

    With `strong` the devices share the batch of one, and computing time is proportional to rows; else each has as many
    rows as one had.
    """
    if strong:
        step = replace(step, compute_s=step.compute_s / num_devices, backward_s=step.backward_s / num_devices)
    names = list(ALGORITHMS) if algorithm == BEST else [algorithm]
    tried = [_predict(step, cluster, num_devices, name, ALGORITHMS[name]) for name in names]
    return min(tried, key=lambda one: (one.step_s, one.communication_s))


def _predict(step: StepCost, cluster: Cluster, num_devices: int, name: str, all_reduce: AllReduceTime) -> Prediction:
    sizes = step.buckets()
    seconds = {size: all_reduce(cluster, num_devices, size) for size in set(sizes)}
    reduce_s = [seconds[size] for size in sizes]
    exposed = exposed_s(step.ready_s(), reduce_s, step.backward_s)
    return Prediction(num_devices, name, step.compute_s, math.fsum(reduce_s), exposed)
