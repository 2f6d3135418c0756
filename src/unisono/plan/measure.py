"""Time a training step of the caller's model on one device of this machine."""

import statistics
import time

import torch
from torch import Tensor, nn

from unisono import keep_freed_memory
from unisono.bench.contenders import Task
from unisono.console.targets import TargetError, current_folder_first, one_line
from unisono.plan.prediction import StepCost
from unisono.runtime.devices import accelerators

_WARM_UP_STEPS = 3
_FEWEST_STEPS, _MOST_STEPS = 5, 100
_SECONDS = 5.0


def measured_step(target: str, bucket_bytes: float) -> tuple[StepCost, torch.device, int]:
    """Take training steps (forward, loss, backward, SGD with momentum) for some seconds; return the medians.

    Args:
        target: `package.module:build`, as for `unisono bench`.
        bucket_bytes: of the returned step.

    Returns:
        The step, the device (the first accelerator, or the CPU with all cores), and the rows of the batch.

    Raises:
        TargetError: it cannot be built, fails, or has no gradients.
    """
    task = Task.of_target(target)
    device = next(iter(accelerators()), torch.device("cpu"))
    try:
        for module in (task.model, task.criterion):
            if isinstance(module, nn.Module):
                module.to(device)
        task = task.shard(0, 1, device)
        with current_folder_first():  # it may import more while it runs
            totals, backwards = _timed(task, device)
    except Exception as error:
        raise TargetError(f"{target} could not be measured: {one_line(error)}") from error
    sizes = [p.grad.numel() * p.grad.element_size() for p in task.model.parameters() if p.grad is not None]
    if not sizes:
        raise TargetError(f"{target}: backward gave no parameter a gradient, so there is nothing to reduce")
    step = StepCost(statistics.median(totals), statistics.median(backwards), float(sum(sizes)), bucket_bytes)
    return step, device, task.rows


def _timed(task: Task, device: torch.device) -> tuple[list[float], list[float]]:
    """Return the seconds of each step, and those of its backward."""
    keep_freed_memory()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01, momentum=0.9)
    totals: list[float] = []
    backwards: list[float] = []
    stop_at = float("inf")
    for number in range(_WARM_UP_STEPS + _MOST_STEPS):
        if number == _WARM_UP_STEPS:
            stop_at = time.perf_counter() + _SECONDS
        if number >= _WARM_UP_STEPS + _FEWEST_STEPS and time.perf_counter() > stop_at:
            break
        optimizer.zero_grad(set_to_none=True)
        began = _now(device)
        loss: Tensor = task.loss(task.model(*task.args, **task.kwargs))
        forward = _now(device)
        torch.autograd.backward(loss)
        backward = _now(device)
        optimizer.step()
        ended = _now(device)
        if number >= _WARM_UP_STEPS:
            totals.append(ended - began)
            backwards.append(backward - forward)
    return totals, backwards


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # its work is queued: wait for it
    return time.perf_counter()
