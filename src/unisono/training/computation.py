"""What a run computes: the loss of training pictures, the update of the weights, the answers to test pictures.

With `--compile`:

    one replica         each of the three is compiled as a whole, the loss and the update included. On a GPU torch
                        captures them in CUDA graphs: for the host a step is three launches (forward, backward, update)
                        and the few that loop.py needs around them, instead of hundreds.
    several replicas    the module of each replica is compiled; the rest runs as written.

torch compiles for one input size at a time (`dynamic=False`: code for a known size is the fastest). An epoch's steps
have at most two sizes, usually one (schedule.py), and so have the replicas' shards; each size is compiled once, at its
first step.

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
from torch.optim.sgd import sgd

from unisono.console.errors import OptionError
from unisono.data_parallel import DataParallel
from unisono.runtime import devices
from unisono.runtime.torch_private import compiler

MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4

# The mode that captures what is compiled in CUDA graphs. "max-autotune" also tries many Triton kernels for each product
# and convolution. That takes minutes, and cuDNN, which tries algorithms of its own (float32_products), is hard to beat
# with convolutions in channels_last. `make gpu-check` measures both, to see whether this default is right.
GRAPHS_MODE = "reduce-overhead"


class Computation:
    """What the steps of a run compute.

    Args:
        model: the module on every device.
        live: the module that is trained.
        autocast: whether products are computed in bfloat16.
        whole: whether everything is compiled; for a single replica only.

    `momenta` has one for each parameter, by its name in `live`.
    """

    def __init__(self, model: DataParallel, live: nn.Module, *, autocast: bool, whole: bool) -> None:
        self._device = model.devices[0]
        self._model: nn.Module = live if whole else model
        self._autocast, self._whole = autocast, whole
        self._captured = whole and devices.is_cuda(self._device)
        self._fused = devices.has_fused_optimizers(self._device)
        self._parameters: list[Tensor] = list(live.parameters())
        # From zeros, the first step gives the momenta that torch.optim.SGD begins with.
        self.momenta = {name: torch.zeros_like(parameter) for name, parameter in live.named_parameters()}
        self._rate = torch.zeros((), device=self._device)
        self._memory: dict[torch.Size, Tensor] = {}  # of pictures and of labels, which differ in shape
        functions: list[Callable[..., Any]] = [_training_loss, _test_totals, _update]
        if whole:
            compiler.mark_static([*self._parameters, *self.momenta.values(), *live.buffers(), self._rate])
            mode = GRAPHS_MODE if self._captured else None
            functions = [torch.compile(each, dynamic=False, fullgraph=True, mode=mode) for each in functions]
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
        """Return the sum of the losses of some rows, and the number of correct answers."""
        here = (self._rows_of(tensor, rows) for tensor in (images, labels))
        totals: Tensor = self._test_totals(self._model, *here, self._autocast)
        return totals.clone()

    def update(self, rate: float) -> None:
        """Update the weights by the gradients of this step, which are then dropped."""
        gradients = [parameter.grad for parameter in self._parameters]
        # Each number would be compiled anew; a tensor is not.
        rate_here = self._rate.fill_(rate) if self._whole else rate
        momenta = [*self.momenta.values()]
        self._update(self._parameters, gradients, momenta, rate_here, self._fused and not self._whole)
        self._model.zero_grad()

    def _rows_of(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Return rows of pictures or labels on the first device; for CUDA graphs always in the same memory."""
        if not self._whole:
            return rows_on(self._device, tensor, rows)
        shape = torch.Size([len(rows), *tensor.shape[1:]])
        if shape not in self._memory:
            self._memory[shape] = torch.empty(shape, dtype=tensor.dtype, device=self._device)
            compiler.mark_static([self._memory[shape]])
        return rows_on(self._device, tensor, rows, into=self._memory[shape])


def rows_on(device: torch.device, tensor: Tensor, rows: Tensor, into: Tensor | None = None) -> Tensor:
    """Return `tensor[rows]` on `device`, in the memory of `into` if that is given.

    A copy from the host is queued there and not waited for. That needs pinned memory: from pageable memory, the calling
    thread would wait for the copy. torch keeps the pinned memory until the copy has ended, and then reuses it for the
    next rows.
    """
    if into is not None and tensor.device == into.device:
        return torch.index_select(tensor, 0, rows, out=into)
    if not devices.is_cpu(tensor.device) or not devices.has_streams(device):
        there = tensor[rows]
        return there.to(device) if into is None else into.copy_(there)
    pinned = torch.empty(len(rows), *tensor.shape[1:], dtype=tensor.dtype, device="cpu", pin_memory=True)
    torch.index_select(tensor, 0, rows, out=pinned)
    return pinned.to(device, non_blocking=True) if into is None else into.copy_(pinned, non_blocking=True)


def _logits(model: nn.Module, images: Tensor, autocast: bool) -> Tensor:
    with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
        logits: Tensor = model(images)
    return logits.float()


def _training_loss(model: nn.Module, images: Tensor, labels: Tensor, num_rows: int, autocast: bool) -> Tensor:
    return F.cross_entropy(_logits(model, images, autocast), labels, reduction="sum") / num_rows


def _test_totals(model: nn.Module, images: Tensor, labels: Tensor, autocast: bool) -> Tensor:
    logits = _logits(model, images, autocast)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([loss, (logits.argmax(dim=1) == labels).sum().float()])


@torch.no_grad()
def _update(
    parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor | None], rate: float | Tensor, fused: bool
) -> None:
    """Take a step of SGD: torch.optim.SGD without the object around it, which torch does not compile as a whole."""
    sgd(
        parameters,
        gradients,
        momenta,
        foreach=not fused,
        fused=fused,
        lr=rate,  # type: ignore[arg-type]  # torch takes tensors, too
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def expect_compiler(device: torch.device) -> None:
    """Compile a small function for a device; raise OptionError, which says why, if the compiler does not work."""
    try:
        torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:  # whatever torch's compiler and the programs that it calls raise
        raise cannot_compile(device, error) from error


def cannot_compile(device: torch.device, error: Exception) -> OptionError:
    """Return an error of the compiler as one line for the user."""
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return OptionError(
        f"--compile: torch.compile does not work for {device} here ({reason}): repair it, or pass --no-compile"
    )
