"""Time a training step of the caller's model on one device of this machine."""

import time

import torch
from torch import nn

from unisono import keep_freed_memory
from unisono.bench.contenders import Task
from unisono.bench.turns import lower_quartile, timed
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
    try:
        for module in (task.model, task.criterion):
            if isinstance(module, nn.Module):
                module.to(device)
        task = task.shard(0, 1, device)
        with current_folder_first():  # it may import more while it runs
            compute_s, backward_s = _timed(task, device)
    except Exception as error:
        raise TargetError(f"{target} could not be measured: {one_line(error)}") from error
    sizes = [p.grad.numel() * p.grad.element_size() for p in task.model.parameters() if p.grad is not None]
    if not sizes:
        raise TargetError(f"{target}: backward gave no parameter a gradient, so there is nothing to reduce")
    return StepCost(compute_s, backward_s, float(sum(sizes)), bucket_bytes), device, task.rows


def _timed(task: Task, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a step, and those of its backward."""
    keep_freed_memory()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01, momentum=0.9)
    backwards: list[float] = []

    def step() -> None:
        loss = task.loss(task.model(*task.args, **task.kwargs))
        wait_for_work(device)
        began = time.perf_counter()
        torch.autograd.backward(loss)
        wait_for_work(device)
        backwards.append(time.perf_counter() - began)
        optimizer.step()
        wait_for_work(device)

    def forget_gradients() -> None:
        optimizer.zero_grad(set_to_none=True)

    def steps(number: int) -> list[float]:
        backwards.clear()
        return timed({"step": step}, number, num_untimed=0, before=forget_gradients)["step"]

    number = round(_SECONDS / min(steps(_WARM_UP_STEPS)))
    times = steps(max(_FEWEST_STEPS, min(number, _MOST_STEPS)))
    return lower_quartile(times), lower_quartile(backwards)
