"""What a run computes: the loss of training pictures, the update of the weights, the answers to test pictures.

With `--compile`:

    one replica         each of the three is compiled as a whole, the loss and the update included. On a GPU torch
                        captures them in CUDA graphs: for the host a step is three launches (forward, backward, update)
                        and the few that loop.py needs around them, instead of hundreds.
    several replicas    the module of each replica is compiled; the rest runs as written.

A CUDA graph reads and writes the addresses that it was captured with. What follows from that holds wherever functions
are compiled as a whole, so that the CPU's tests see it too:

    - the pictures and labels of every step of a size are in the same memory (`_rows_of`);
    - the learning rate is a tensor on the device, and nothing is read on the host;
    - weights, momenta and buffers exist before the first step, keep their addresses, and are marked: torch captures no
      function that changes other inputs;
    - gradients and losses are in the graphs' own memory, which the next step uses again. Gradients are dropped after
      the update, losses are copied by the caller, and `begin_step` tells torch that a new step begins.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.data_parallel import DataParallel
from unisono.runtime import devices, torch_private
from unisono.training.compiling import compiled_whole
from unisono.training.weights import Weights

IGNORED = -100  # the label of a row that does not count


class Computation:
    """What the steps of a run compute: with `autocast` in bfloat16; `whole`, for a single replica only, compiled."""

    def __init__(self, model: DataParallel, weights: Weights, *, autocast: bool, whole: bool) -> None:
        self._device = model.devices[0]
        self._model: nn.Module = model.module if whole else model
        self._autocast, self._whole = autocast, whole
        self._captured = whole and devices.has_graphs(self._device)
        self._rate = torch.zeros((), device=self._device)
        self._memory: dict[torch.Size, Tensor] = {}  # of pictures and of labels, which differ in shape
        functions: list[Callable[..., Any]] = [_training_loss, _test_totals, weights.step]
        if whole:
            torch_private.mark_static([*weights.static(), self._rate])
            functions = [compiled_whole(function, self._device) for function in functions]
        self._training_loss, self._test_totals, self._update = functions

    def begin_step(self) -> None:
        """Let what the last step has returned be overwritten."""
        if self._captured:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def training_loss(self, images: Tensor, labels: Tensor, rows: Tensor, num_rows: int) -> Tensor:
        """Return the sum of the losses of some rows, divided by the `num_rows` of the whole batch, with its graph."""
        here = (self._rows_of(tensor, rows) for tensor in (images, labels))
        loss: Tensor = self._training_loss(self._model, *here, num_rows, self._autocast)
        return loss

    def test_totals(self, images: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """Return the sum of the losses of some rows, and the number of correct answers.

        So that every batch can have the same size, there is one more label than pictures, which is IGNORED: a row
        beyond the last picture counts for nothing.
        """
        here = (self._rows_of(tensor, rows.clamp(max=len(tensor) - 1)) for tensor in (images, labels))
        totals: Tensor = self._test_totals(self._model, *here, self._autocast)
        return totals.clone()

    def update(self, rate: float) -> None:
        """Update the weights by the gradients of this step, which are then dropped."""
        self._update(self._rate.fill_(rate) if self._whole else rate)
        self._model.zero_grad()

    def _rows_of(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Return rows of pictures or labels on the first device; for CUDA graphs always in the same memory."""
        if not self._whole:
            return devices.rows_on(self._device, tensor, rows)
        shape = torch.Size([len(rows), *tensor.shape[1:]])
        if shape not in self._memory:
            self._memory[shape] = torch.empty(shape, dtype=tensor.dtype, device=self._device)
            torch_private.mark_static([self._memory[shape]])
        return devices.rows_on(self._device, tensor, rows, into=self._memory[shape])


def _logits(model: nn.Module, images: Tensor, autocast: bool) -> Tensor:
    with devices.bfloat16(images.device, enabled=autocast):
        logits: Tensor = model(images)
    return logits.float()


def _training_loss(model: nn.Module, images: Tensor, labels: Tensor, num_rows: int, autocast: bool) -> Tensor:
    return F.cross_entropy(_logits(model, images, autocast), labels, reduction="sum") / num_rows


def _test_totals(model: nn.Module, images: Tensor, labels: Tensor, autocast: bool) -> Tensor:
    logits = _logits(model, images, autocast)
    loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
    return torch.stack([loss, (logits.argmax(dim=1) == labels).sum().float()])
