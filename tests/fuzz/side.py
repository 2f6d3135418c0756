"""One of the two runs of a program: a module, an optimizer, and what could be observed so far."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

import unisono
from fuzz.blocks import WIDTH, Appends, Leaves, UsesOutside, WritesShared
from fuzz.model import INPUTS, OUTPUTS, Model, Outer, form_of, tensors_in
from fuzz.program import Program
from helpers.contract import KIND, ON_CPU

_LEARNING_RATE = 0.01


def _groups_of(parameters: list[Any]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "lr": 2 * _LEARNING_RATE}, {"params": parameters[2:]}]


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, _LEARNING_RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, _LEARNING_RATE, momentum=0.9, nesterov=True),
    "groups": lambda parameters: torch.optim.SGD(_groups_of(parameters), _LEARNING_RATE, weight_decay=0.01),
    # With its usual eps of 1e-8 it would make large steps of gradients that are zero but for rounding.
    "Adam": lambda parameters: torch.optim.Adam(parameters, _LEARNING_RATE, eps=1.0, foreach=True),
}


class Observed(NamedTuple):
    """Something that both sides have to agree on."""

    kind: str  # for example "output", "gradient of"
    value: Any  # a tensor, or what can be compared with ==
    name: str = ""  # which of its kind

    @property
    def what(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


class Rank(NamedTuple):
    """One of several processes that run a program together; else the only one."""

    number: int = 0
    world_size: int = 1

    def rows(self, num_rows: int, seed: int) -> slice:
        """Return which rows of a batch are this rank's."""
        if self.world_size == 1:
            return slice(0, num_rows)
        cuts = sorted(random.Random(seed).randint(0, num_rows) for _ in range(self.world_size - 1))
        edges = [0, *cuts, num_rows]
        return slice(edges[self.number], edges[self.number + 1])


ONE_PROCESS = Rank()


_NUM_STREAMS = 2  # of the first asynchronous device, beside the current one
_DELAY_US, _DELAY_PERCENT = 200, 20
_KIND = "queued" if ON_CPU else KIND  # of the asynchronous devices: those of tests/async_device, or accelerators


def make_asynchronous_devices() -> None:
    """Make the devices of tests/async_device, which stay. Freed memory becomes NaN when it is used again."""
    if _KIND == "queued":
        import async_device

        async_device.C.set_poison(2)


def devices_of(program: Program, rank: Rank, num_replicas: int) -> list[str]:
    """Return the devices of a wrapper's replicas; no other rank has them, if there are enough."""
    if "asynchronous" not in program.traits:
        return ["cpu"] * num_replicas
    first = rank.number * program.num_replicas
    return [f"{_KIND}:{(first + i) % torch.accelerator.device_count()}" for i in range(num_replicas)]


def seed_torch(seed: int) -> None:
    """Seed the CPU's generator; `torch.manual_seed` also looks for other devices, which takes half a millisecond."""
    torch.default_generator.manual_seed(seed)


class Side:
    """The plain or the wrapped run of a program.

    Attributes:
        model: what the program calls.
        core: the `Model` in it.
        has_part: whether the core is a part of a model that takes rows and a table.
        is_plain: whether nothing is wrapped. The plain side has the rows of all ranks.
        observed: what this step has shown so far.
        error: what this step has raised.
        said: the messages of warnings so far.
        dtype, device: of the batches.
        is_compared: whether anything of this step is.
        garbage: the tensors, and the objects of the library, that only the garbage collector frees after a step.
    """

    def __init__(self, program: Program, rank: Rank, wrap: Callable[[nn.Module, bool], nn.Module] | None) -> None:
        """Make the model.

        Args:
            wrap: returns a module, wrapped. It is told whether it is the outermost wrapper.
        """
        seed_torch(program.seed)
        self.program, self._rank, self.is_plain = program, rank, wrap is None
        self.device = torch.device(devices_of(program, rank, 1)[0])
        self.model: nn.Module = Model(
            program.blocks, program.inputs, program.outputs, program.residual, program.writes_input
        ).to(self.device)
        self.model.out_of_memory = "" if self.is_plain else program.out_of_memory
        self.has_part = program.wraps in ("part", "two", "both")
        if wrap is not None and program.wraps != "model":
            self.model = wrap(self.model, program.wraps in ("part", "two"))
        if self.has_part:
            self.model = outer = Outer(self.model, program.inputs).to(self.device)
        if wrap is not None and program.wraps == "two":
            outer.before = wrap(outer.before, True)
        elif wrap is not None and program.wraps != "part":
            self.model = wrap(self.model, True)
        self.observed: list[Observed] = []
        self.error: BaseException | None = None
        self.said: list[str] = []
        self._inputs: list[tuple[Tensor, slice]] = []
        self.dtype, self.is_compared = torch.float64, True
        self.garbage: list[str] = []
        self.table = torch.randn(3, WIDTH).to(self.device).requires_grad_(program.input_gradients)
        self._streams = [torch.Stream(self.device) for _ in range(_NUM_STREAMS)] if self.has("asynchronous") else []
        self.use(self.model)

    # ---- the model -------------------------------------------------------------------------------

    def use(self, model: nn.Module) -> None:
        """Go on with another model, a copy of the last one."""
        self.model = model
        (self.core,) = [module for module in model.modules() if isinstance(module, Model)]
        self.make_optimizer()

    def make_optimizer(self, name: str | None = None) -> None:
        parameters = list(self.model.parameters())
        self.optimizer = OPTIMIZERS[name or ("SGD" if self.has("sparse") else self.program.optimizer)](parameters)

    def has(self, trait: str) -> bool:
        return trait in self.program.traits

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the core's parameters by name."""
        return sorted(self.core.named_parameters())

    def trained(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.parameters() if parameter.requires_grad]

    def buffers(self) -> list[tuple[str, Tensor]]:
        return sorted(self.core.named_buffers())

    def wrappers(self) -> Iterator[unisono.DataParallel]:
        """Yield the wrappers, the outermost first; of the plain side none."""
        return (module for module in self.model.modules() if isinstance(module, unisono.DataParallel))

    def values(self) -> list[Tensor]:
        """Return copies of all parameters and buffers."""
        return [tensor.detach().clone() for tensor in self._state()]

    def restore(self, values: list[Tensor]) -> None:
        """Write such copies back."""
        with torch.no_grad():
            for tensor, value in zip(self._state(), values, strict=True):
                tensor.copy_(value)

    def _state(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    # ---- steps -----------------------------------------------------------------------------------

    def begin_step(self, seed: int) -> None:
        seed_torch(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self._draw = random.Random(seed)
        if self._streams and _KIND == "queued":
            import async_device

            async_device.C.set_blocking(self.is_plain)
            async_device.C.set_seed(seed)
            async_device.C.set_delay(_DELAY_US, _DELAY_PERCENT)
        self.observed, self._inputs, self.error = [], [], None

    def batch(self, rows: int, seed: int, requires_grad: bool | None = None) -> Tensor:
        """Return this side's rows of a batch; they follow from the seed."""
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)
        own = self._rank.rows(rows, seed)
        if not self.is_plain:
            x = x[own].clone()
        x.requires_grad_(self.program.input_gradients if requires_grad is None else requires_grad)
        self._inputs.append((x, own))
        return x

    def forward(self, rows: int, seed: int, requires_grad: bool | None = None, model: Any = None) -> Any:
        """Run the model on a batch; observe and return its output."""
        output = self.run(self.batch(rows, seed, requires_grad), model)
        self.observe_output(output, self._rank.rows(rows, seed))
        return output

    def run(self, x: Tensor, model: Any = None) -> Any:
        """Return the output of a model, usually this side's, for some rows."""
        model = model or self.model
        args, kwargs = self.inputs(x)
        with self.on_a_stream():
            return model(*args, **kwargs)

    def inputs(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the model is called with for some rows."""
        if self.program.writes_input:
            x = x * 1.0  # a leaf cannot be written into
        table = self.table if self.table.dtype == self.dtype else self.table.detach().to(self.dtype)
        if self.program.from_host and not self.is_plain:
            x, table = x.cpu(), table.cpu()
        return ((x, table), {}) if self.has_part else INPUTS[self.program.inputs].pack(x, table)

    @contextlib.contextmanager
    def on_a_stream(self) -> Iterator[None]:
        """Make a stream current, where there are several: all wait for the caller's before, and for this one after."""
        if not self._streams:
            yield
            return
        here = torch.accelerator.current_stream(self.device)
        stream = self._draw.choice([here, *self._streams])
        for each in self._streams:
            each.wait_stream(here)
        with torch.get_device_module(self.device).stream(stream):
            yield
        for each in (here, *self._streams):
            if each != stream:
                each.wait_stream(stream)

    def loss(self, output: Any) -> Tensor:
        """Return a loss that is a sum, or a mean, over the rows of an output, or of a part of one."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        terms = [(t.double().square() * 0.1 + t.double()).sum() / self._divisor(t) for t in tensors]
        return torch.as_tensor(sum((number * 0.1 + 0.1) * term for number, term in enumerate(terms)))

    def loss_of(self, rows: int, seed: int) -> Tensor:
        """Run the model on a batch; return the loss of its output."""
        return self.loss(self.forward(rows, seed))

    def _divisor(self, tensor: Tensor) -> int:
        if self.program.loss == "sum" or tensor.dim() == 0:
            return 1
        on_axis_1 = self.has("outputs: on axis 1") and tensor.dim() == 3
        return max(1, tensor.shape[1 if on_axis_1 else 0])

    def backward(self, loss: Tensor, **options: Any) -> None:
        if loss.requires_grad:
            with self.on_a_stream():
                loss.backward(**options)

    def step(self) -> None:
        """Take a step of the optimizer."""
        with self.on_a_stream():
            self.optimizer.step()

    def train(self, rows: int, seed: int, model: Any = None) -> None:
        """Take one usual step of training."""
        self.optimizer.zero_grad()
        self.backward(self.loss(self.forward(rows, seed, model=model)))
        self.step()

    # ---- what is observed ------------------------------------------------------------------------

    def observe(self, kind: str, value: Any, name: object = "") -> None:
        """Keep what both sides have to agree on; of a tensor a copy of its values, on the CPU."""
        if not self.is_compared:
            return
        if isinstance(value, Tensor):
            value = value.detach().cpu().to_dense().clone()
        self.observed.append(Observed(kind, copy.deepcopy(value), str(name)))

    def observe_all(self, kind: str, tensors: Any) -> None:
        for number, tensor in enumerate(tensors):
            self.observe(kind, tensor, number)

    def observe_output(self, output: Any, own: slice) -> None:
        if own.start == own.stop and self._rank.world_size > 1:
            return  # a rank without rows computes others, whose outputs are cut to nothing
        tensors = list(tensors_in(output))
        self.observe("form of the output", form_of(output))
        for number, tensor in enumerate(tensors):
            axis = OUTPUTS[self.program.outputs].axis if number == len(tensors) - 1 else 0
            if self.is_plain and self._rank.world_size > 1:
                tensor = tensor.narrow(axis, own.start, own.stop - own.start)
            self.observe("output", tensor, number)

    def forget_inputs(self) -> None:
        """Let the batches of a step go."""
        self._inputs = []

    def end_step(self) -> None:
        """Observe what a step has left."""
        for number, (x, own) in enumerate(self._inputs):
            grad, num_own = x.grad, own.stop - own.start
            if self._rank.world_size > 1 and num_own == 0:
                continue
            if self._rank.world_size > 1 and self.is_plain and grad is not None:
                grad = grad[own] * (len(x) / num_own if self.program.loss == "mean" else 1)
            self.observe("gradient of input", grad, number)
        if self._rank.world_size == 1:
            self.observe("gradient of the table", self.table.grad)
        self.table.grad = None
        for name, parameter in self.parameters():
            grad = parameter.grad
            self.observe("form of the gradient of", None if grad is None else (grad.dtype, grad.layout), name)
            self.observe("gradient of", grad, name)
        for name, parameter in self.parameters():
            self.observe("parameter", parameter, name)
        for name, buffer in self.buffers():
            self.observe("buffer", buffer, name)
        for path, module in self.core.named_modules():
            leaves = isinstance(module, Leaves | Appends | WritesShared | UsesOutside)
            for number, left in enumerate(module.left() if leaves else ()):
                self.observe("what forward leaves in", left, f"{path}, {number}")
