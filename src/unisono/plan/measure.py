"""Time a training step of the caller's model on one device of this machine."""

import time

import torch
from torch import nn

from unisono import keep_freed_memory
from unisono.bench.contenders import Task
from unisono.bench.turns import lower_quartile
from unisono.console.targets import TargetError, current_folder_first, one_line
from unisono.plan.prediction import StepCost
from unisono.runtime.devices import accelerators, wait_for_work

_WARM_UP_STEPS = 3
_FEWEST_STEPS, _MOST_STEPS = 5, 100
_SECONDS = 5.0


def measured_step(target: str, bucket_bytes: float) -> tuple[StepCost, torch.device, int]:
    """Take training steps (forward, loss, backward, SGD with momentum) for some seconds; return the lower quartiles.

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
    keep_freed_memory()
    try:
        for module in (task.model, task.criterion):
            if isinstance(module, nn.Module):
                module.to(device)
        task = task.shard(0, 1, device)
        with current_folder_first():  # it may import more while it runs
            compute_s, backward_s, gradient_bytes = _timed(task, device)
    except Exception as error:
        raise TargetError(f"{target} could not be measured: {one_line(error)}") from error
    if not gradient_bytes:
        raise TargetError(f"{target}: backward gave no parameter a gradient, so there is nothing to reduce")
    return StepCost(compute_s, backward_s, float(gradient_bytes), bucket_bytes), device, task.rows


def _timed(task: Task, device: torch.device) -> tuple[float, float, int]:
    """Return the seconds of a step, those of its backward, and the bytes of the gradients."""
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01, momentum=0.9)

    def now() -> float:
        wait_for_work(device)
        return time.perf_counter()

    def step() -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        began = now()
        loss = task.loss(task.model(*task.args, **task.kwargs))
        forward = now()
        torch.autograd.backward(loss)
        backward = now()
        optimizer.step()
        return now() - began, backward - forward

    estimate_s, _ = min(step() for _ in range(_WARM_UP_STEPS))
    number = max(_FEWEST_STEPS, min(round(_SECONDS / estimate_s), _MOST_STEPS))
    steps_s, backwards_s = zip(*[step() for _ in range(number)], strict=True)
    gradients = [p.grad for p in task.model.parameters() if p.grad is not None]
    return lower_quartile(steps_s), lower_quartile(backwards_s), sum(each.nbytes for each in gradients)
