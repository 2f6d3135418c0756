"""Time a training step of the caller's model on one device of this machine."""

import torch
from torch import nn

from unisono import keep_freed_memory
from unisono.bench.tasks import Task
from unisono.bench.turns import lower_quartile
from unisono.console.targets import TargetError, current_folder_first, one_line
from unisono.plan.prediction import StepCost
from unisono.runtime.devices import accelerators

_WARM_UP_STEPS = 3
_FEWEST_STEPS, _MOST_STEPS = 5, 100
_SECONDS = 5.0


def measured_step(target: str, bucket_bytes: float) -> tuple[StepCost, torch.device, int]:
    """Take training steps for some seconds; return the cost of one, the device, and the rows of the batch.

    The device is the first accelerator, or the CPU with all cores; times are lower quartiles.
    """
    task = Task.of_target(target)
    device = next(iter(accelerators()), torch.device("cpu"))
    keep_freed_memory()
    try:
        for module in (task.model, task.criterion):
            if isinstance(module, nn.Module):
                module.to(device)
        step = task.shard(0, 1, device).stepper()
        with current_folder_first():  # it may import more while it runs
            estimate_s = min(step().whole_s for _ in range(_WARM_UP_STEPS))
            number = max(_FEWEST_STEPS, min(round(_SECONDS / estimate_s), _MOST_STEPS))
            steps = [step() for _ in range(number)]
    except Exception as error:
        raise TargetError(f"{target} could not be measured: {one_line(error)}") from error
    gradient_bytes = sum(p.grad.nbytes for p in task.model.parameters() if p.grad is not None)
    if not gradient_bytes:
        raise TargetError(f"{target}: backward gave no parameter a gradient, so there is nothing to reduce")
    whole_s, backward_s = (lower_quartile([getattr(s, part) for s in steps]) for part in ("whole_s", "backward_s"))
    return StepCost(whole_s, backward_s, float(gradient_bytes), bucket_bytes), device, task.rows
