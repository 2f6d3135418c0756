"""What is measured: the training step of a target, `package.module:build` as for `unisono verify`.

A step is gradients set to None, forward, loss, backward, SGD with momentum.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.console.targets import TargetError, current_folder_first
from unisono.data_parallel import DataParallel
from unisono.primitives.scatter import Arguments, scatter, scattered
from unisono.primitives.split_sizes import split_rows
from unisono.runtime.devices import wait_for_work
from unisono.verification.compare import tensors_in
from unisono.verification.targets import build_arguments

_CPU = torch.device("cpu")
_SEED = 0
_LEARNING_RATE = 0.01
_MOMENTUM = 0.9
_OF_VERIFY = ("device_ids", "output_device", "rtol", "atol")


class Step(NamedTuple):
    """One training step: its loss, and seconds."""

    loss: Tensor
    forward_s: float  # with the loss
    backward_s: float
    whole_s: float


@dataclass
class Task:
    """The training task of one process: a module, its shard of the batch, and how the loss is computed."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    criterion: Callable[..., Any] | None
    options: dict[str, Any] = field(default_factory=dict)  # those of `DataParallel` that the target returned
    rows: int = 0  # of the shard
    device: torch.device = _CPU

    @classmethod
    def of_target(cls, target: str) -> "Task":
        """Call `package.module:build`. With equal seeds, every process builds the same."""
        torch.manual_seed(_SEED)
        with current_folder_first():
            built = build_arguments(target)
        model, inputs, labels, criterion = (
            built.pop(name, None) for name in ("model", "inputs", "target", "criterion")
        )
        model = model.module if isinstance(model, DataParallel) else model
        if not isinstance(model, nn.Module):
            raise TargetError(
                f"{target} returned an object of type {type(model).__name__} as the model: expected a torch.nn.Module"
            )
        args = () if isinstance(inputs, dict) else inputs if type(inputs) is tuple else (inputs,)
        kwargs = inputs if isinstance(inputs, dict) else {}
        options = {name: value for name, value in built.items() if name not in _OF_VERIFY}
        task = cls(model, args, kwargs, labels, criterion, options)
        task.rows = task._arguments().rows or 0
        return task

    def normalises_shards(self) -> bool:
        """Return whether the model has batch norm over a replica's rows only, unlike the plain module."""
        batch_norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        return bool(batch_norms) and not self.options.get("sync_batch_norm", False)

    def sizes(self, replicas: int) -> Sequence[int]:
        """Return the rows of each replica.

        Raises:
            ValueError: there are too few rows for so many.
        """
        sizes = split_rows(self.rows, replicas)
        if not all(sizes):
            used = sum(map(bool, sizes))
            raise ValueError(
                f"a batch of {self.rows} rows (samples) is enough for {used} replicas only, not for {replicas}"
            )
        return sizes

    def shard(self, rank: int, replicas: int, device: torch.device = _CPU) -> "Task":
        """Return the task of one replica, with its rows on this device."""
        sizes = self.sizes(replicas)
        devices = [device] * replicas
        args, kwargs = scattered(self._arguments(), devices, sizes)[rank]
        target = scatter(self.target, devices, self.options.get("dim", 0))[rank]
        return Task(self.model, args, kwargs, target, self.criterion, self.options, sizes[rank], device)

    def _arguments(self) -> Arguments:
        dim, in_dims = self.options.get("dim", 0), self.options.get("in_dims", ...)
        return Arguments(self.args, self.kwargs, dim).find_rows(in_dims, self.model.forward)

    def loss(self, output: Any) -> Tensor:
        """Return the loss; without a criterion, the mean squares of all floating outputs."""
        if self.criterion is not None:
            given = () if self.target is None else (self.target,)
            return self.criterion(output, *given)  # type: ignore[no-any-return]
        outputs = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point()]
        if not outputs:
            raise ValueError("the model has no floating-point output for a loss: give a criterion")
        return torch.stack([tensor.float().square().mean() for tensor in outputs]).sum()

    def stepper(self) -> Callable[[], Step]:
        """Return a function that takes one training step of the model as it is now."""
        model, device = self.model, self.device
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM, foreach=True)

        def now() -> float:
            wait_for_work(device)
            return time.perf_counter()

        def step() -> Step:
            began = now()
            optimizer.zero_grad(set_to_none=True)
            loss = self.loss(model(*self.args, **self.kwargs))
            forward_ended = now()
            torch.autograd.backward(loss)
            backward_ended = now()
            optimizer.step()
            return Step(loss.detach(), forward_ended - began, backward_ended - forward_ended, now() - began)

        return step
