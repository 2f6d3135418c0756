"""Gradients summed over processes: what one model's gradients count for, and when they are summed.

    rank r:   backward of its own batch ──► gradient of its own loss
                                              │ times weight r / all weights
                                              ▼
              summed over the processes ──► gradient of the one loss over all rows

The weight of a rank is its number of rows (or what it says), so that nothing is averaged per process. The ranks
exchange their weights when backward begins, and with them what they are about to sum (consistency.py). A rank whose
weight is 0 gives zeros: its own gradients, which may be NaN, are never read. How the sum is made while backward still
runs is bucketed_all_reduce.py's.

Nothing is summed, and nobody waited for, in a backward that leads to no parameter, such as `torch.autograd.grad` for
inputs.

In no_sync() a process's own gradients go into `grad`, as much larger as there are processes; and the next backward
outside of it takes the mean over the processes of what is in `grad` then. What was there before is the same in all
processes, and so is its own mean; what the user has zeroed or scaled in between is zeroed or scaled.

Sources: buckets and their order, S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020.
"""

import abc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from manyhands.distributed.bucketed_all_reduce import DOING, BucketedAllReduce, BucketPlan
from manyhands.distributed.comm_hooks import CommHook
from manyhands.distributed.consistency import RankStep, check_same_model, check_same_step
from manyhands.distributed.environment import start_default_group
from manyhands.distributed.process_group import Communicator, communicator_for, distributed
from manyhands.primitives.inputs import Arguments
from manyhands.runtime import torch_private

_OF_A_GROUP = (
    "this DataParallel was pickled with a process_group of its own, and process groups cannot be: wrap its module "
    "anew, DataParallel(loaded.module, process_group=...)."
)
_MOST_PLANS = 8  # models whose parts are frozen in turn have several


class UnboundGradientSync(NamedTuple):
    """A reduction that has been pickled: it joins the processes of the program that has loaded it, when it is needed.

    Not earlier, so that one process alone can load a model and evaluate it.

    Attributes:
        device, loss: as in `GradientSync`.
        of_all: whether it was among all processes of its program, not those of a group only.
    """

    device: torch.device
    loss: str
    of_all: bool

    def bind(self, module: nn.Module) -> "GradientSync | None":
        """Join; return None where this process is alone. To be called by all processes at once.

        Raises:
            RuntimeError: it was among the processes of a group, and nobody has said which these are now.
        """
        if not self.of_all and start_default_group() and distributed.get_world_size() > 1:
            raise RuntimeError(_OF_A_GROUP)
        communicator = communicator_for()
        if communicator is None:
            return None
        gradient_sync = GradientSync(communicator, self.device, self.loss)
        gradient_sync.sync_module_states(module)
        return gradient_sync


class GradientSync:
    """Sums the gradients of one module over processes.

    Args:
        communicator: the processes.
        device: on which the gradients are.
        loss: "mean" if each process's loss is a mean over its rows, "sum" if it is a sum.
    """

    def __init__(self, communicator: Communicator, device: torch.device, loss: str) -> None:
        self.communicator = communicator
        self.loss = loss
        self._device = device
        self.hook: tuple[Any, CommHook] | None = None
        self.synchronised = True  # False inside no_sync()
        self.next_weight: float | None = None  # what the next forward weighs, where its rows are not what counts
        self.sample: Arguments | None = None  # some rows, to run on where there are none
        self.own_grads = _Tensors()  # whose `grad` is this process's own, since a backward in no_sync()
        self._sparse = _Tensors()  # whose gradients have been sparse
        self._number = 0  # of the model among those that are wrapped
        self.num_forwards = 0
        self._plans: dict[Any, BucketPlan] = {}

    def __deepcopy__(self, memo: object) -> "GradientSync":
        copied = GradientSync(self.communicator, self._device, self.loss)  # a copied model has summed nothing yet
        copied.hook = self.hook
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return UnboundGradientSync, (self._device, self.loss, self.communicator.is_world)

    @property
    def group(self) -> Any:
        """The process group in which gradients travel; made when first needed, by all processes at once."""
        return self.communicator.group_for(self._device, "gradients")

    def sync_module_states(self, module: nn.Module) -> None:
        """Have `module` start alike in all processes: check that it is the same, and send the first one's values."""
        self.communicator.barrier(f"wrapping {type(module).__name__}")
        self._number = self.communicator.next_model_number()
        check_same_model(self.communicator, module)
        tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        doing = "sending the first process's parameters to all"
        self.communicator.broadcast(0, tensors, self.group, doing)()

    def sync_context(self, module: nn.Module, rows: int | None) -> "SyncContext":
        """Return what a forward of so many rows is to count for, if it succeeds."""
        given = self.next_weight
        weight = 0.0 if rows == 0 else given if given is not None else float(1 if rows is None else rows)
        number, training = self.num_forwards + module.training, module.training
        return SyncContext(self, weakref.ref(module), weight, given is not None, number, training, self.synchronised)

    def plan(self, tensors: Sequence[torch.Tensor]) -> BucketPlan:
        """Return how the gradients of `tensors` travel."""
        key = tuple((id(tensor), tensor.dtype, tensor.size(), tensor.stride()) for tensor in tensors)
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = BucketPlan.of(tensors, without=self._sparse.has)
        return self._plans[key]

    def step(self, sync_context: "SyncContext", plan: BucketPlan) -> RankStep:
        """Return what this process says about the sum that it begins."""
        if not self._number:  # of a copy, which all processes have begun to train
            self._number = self.communicator.next_model_number()
        return RankStep(
            weight=sync_context.weight,
            model=self._number,
            forward=sync_context.number,
            training=sync_context.training,
            digest=plan.digest,
            synchronised=sync_context.synchronised,
            weight_given=sync_context.weight_given,
            is_sum=self.loss == "sum",
            has_hook=self.hook is not None,
        )

    def have_sparse_gradients(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give tensors no place in a bucket from now on."""
        new = [tensor for tensor in tensors if not self._sparse.has(tensor)]
        for tensor in new:
            self._sparse.add(tensor)
        if new:
            self._plans.clear()

    def begin_to_send_buffers(self, source: int, module: nn.Module | None) -> Callable[[], None]:
        """Begin to give every process the buffers of the one of rank `source`."""
        if module is None:
            return lambda: None
        buffers = [buffer for buffer in module.buffers() if not buffer.is_sparse]
        return self.communicator.broadcast(source, buffers, self.group, "sending one process's buffers to all")


class _Tensors:
    """A set of tensors, which does not keep them."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._references)

    def add(self, tensor: torch.Tensor) -> None:
        self._references[id(tensor)] = weakref.ref(tensor)

    def has(self, tensor: torch.Tensor) -> bool:
        reference = self._references.get(id(tensor))
        return reference is not None and reference() is tensor

    def discard(self, tensor: torch.Tensor) -> None:
        self._references.pop(id(tensor), None)


@dataclass(frozen=True)
class SyncContext:
    """What one forward counts for when gradients are summed.

    Attributes:
        module: whose forward it is.
        weight: how much, compared with the other processes' weights.
        weight_given: whether the caller has said so; else it is the number of rows.
        number: how many forwards of a training step there were before it, and this one.
        training: whether the module was in training mode. By the time of backward it may be in another, in one process
            only: the one that evaluates.
        synchronised: whether its gradients go to the other processes at once.
    """

    gradient_sync: GradientSync
    module: "weakref.ref[nn.Module]"
    weight: float
    weight_given: bool
    number: int
    training: bool
    synchronised: bool

    @property
    def weight_of_loss(self) -> float:
        """What the loss of this process weighs in the one of all processes, compared with the others'."""
        return self.weight if self.gradient_sync.loss == "mean" else float(self.weight > 0)

    def scale(self, steps: Sequence[RankStep], tensors: Sequence[torch.Tensor]) -> float | None:
        """Return what the gradients of `tensors` are multiplied by; None if they are not to be read.

        Raises:
            RuntimeError: the processes have not begun the same sum.
        """
        check_same_step(self.gradient_sync.communicator, steps, tensors, self.module(), DOING)
        if self.weight == 0:
            return None
        return 1.0 if self.gradient_sync.loss == "sum" else self.weight / sum(step.weight for step in steps)

    def has_run(self) -> None:
        """Count the forward: one that fails, and is perhaps tried again with fewer rows, does not count."""
        self.gradient_sync.num_forwards = self.number
        self.gradient_sync.next_weight = None

    def of_callers_graph(
        self, module: nn.Module, method: str | None
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """Return what calls `module` with parameters whose gradients are summed, as part of the caller's own graph."""
        function = _MethodAsForward(module, method)
        parameters = {name: p for name, p in function.named_parameters() if p.requires_grad}
        summed = _AllReduceInBackward.apply(self, *parameters.values())  # type: ignore[no-untyped-call]
        return partial(functional_call, function, dict(zip(parameters, summed, strict=True)))

    def begin(self, tensors: Sequence[torch.Tensor], nodes: Sequence[Any]) -> "Reduction":
        """Begin to sum the gradients of `tensors`; `nodes` are where the running backward takes them."""
        return (AllReduce if self.synchronised else LocalAccumulation)(self, tensors, nodes)


class Reduction(abc.ABC):
    """What becomes of the parameters' gradients in one backward.

    `add` may be called from several threads. Whatever ends it half-way has to be told the others: `failed`.

    Attributes:
        early: the tensors whose gradients `add` is to be given during backward.
        derivative: that of the result by this process's part; known when it is finished.
    """

    derivative = 1.0

    def __init__(self, sync_context: "SyncContext", tensors: Sequence[torch.Tensor], nodes: Sequence[Any]) -> None:
        self._sync_context, self._tensors, self._nodes = sync_context, tensors, nodes
        self._gradient_sync = sync_context.gradient_sync
        self._communicator = self._gradient_sync.communicator
        self._plan = self._gradient_sync.plan(tensors)
        self._steps = self._communicator.all_gather(self._gradient_sync.step(sync_context, self._plan), DOING)

    @property
    @abc.abstractmethod
    def early(self) -> Set[int]: ...

    @abc.abstractmethod
    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Take a part of the gradient of tensor `number`. To be called with gradients off."""

    @abc.abstractmethod
    def finish(self, rest: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """Take what was not given yet, wait for the others, and return the gradient of each tensor.

        None for one that has none.
        """

    def differentiable(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the sums of gradients that have a history, as `finish` does.

        What is computed of the sums, every process computes alike, and its gradient reaches each through its own part:
        so a sum is its own derivative.
        """
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        return list(_DifferentiableReduction.apply(self, there, *(gradients[number] for number in there)))  # type: ignore[no-untyped-call]

    def failed(self, error: BaseException) -> None:
        """Tell the other processes that this one cannot go on."""
        self._communicator.abort(error)

    def _accumulated(self) -> list[int]:
        """Return the numbers of the tensors whose gradients this backward adds to `grad`."""
        nodes = enumerate(self._nodes)
        return [n for n, node in nodes if self._tensors[n].is_leaf and torch_private.backward_runs(node)]


class AllReduce(Reduction):
    """The sum over the processes; None for a tensor that no process used."""

    def __init__(self, sync_context: "SyncContext", tensors: Sequence[torch.Tensor], nodes: Sequence[Any]) -> None:
        super().__init__(sync_context, tensors, nodes)
        # What backwards in no_sync() have left in `grad` goes into this sum, whose result takes its place.
        own = self._gradient_sync.own_grads
        mine = [n for n in self._accumulated() if own.has(tensors[n])] if own else []
        for n in mine:
            own.discard(tensors[n])
        kept = {n: grad for n in mine if (grad := tensors[n].grad) is not None}
        self._kept = [tensors[n] for n in kept]
        # A method of this object would make a cycle of the two, and the buckets would outlive the gradients.
        scale_of = partial(sync_context.scale, tensors=tensors)
        group, hook = self._gradient_sync.group, self._gradient_sync.hook
        self._all_reduce = BucketedAllReduce(
            self._communicator, group, self._plan, tensors, hook, scale_of, self._steps, kept
        )

    @property
    def early(self) -> Set[int]:
        return self._all_reduce.early

    def add(self, number: int, gradient: torch.Tensor) -> None:
        self._all_reduce.add(number, gradient.detach())

    def finish(self, rest: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
        self._all_reduce.add_all(rest)
        found = self._all_reduce.finish(self._begin_to_send_buffers)
        self._gradient_sync.have_sparse_gradients([self._tensors[number] for number in self._all_reduce.sparse])
        self._wait_for_buffers()
        for tensor in self._kept:
            tensor.grad = None  # it is in what is returned, which autograd puts there
        return found

    def _begin_to_send_buffers(self) -> None:
        module = self._sync_context.module() if self._sync_context.training else None
        # As of all replicas it is the first whose buffers persist.
        first_with_rows = next((rank for rank, step in enumerate(self._steps.wait()) if RankStep(*step).weight), 0)
        self._wait_for_buffers = self._gradient_sync.begin_to_send_buffers(first_with_rows, module)


class LocalAccumulation(Reduction):
    """In no_sync(): this process's own gradients, as much larger as there are processes."""

    def __init__(self, sync_context: "SyncContext", tensors: Sequence[torch.Tensor], nodes: Sequence[Any]) -> None:
        super().__init__(sync_context, tensors, nodes)
        self._here: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    @property
    def early(self) -> Set[int]:
        return set()

    def add(self, number: int, gradient: torch.Tensor) -> None:
        with self._lock:
            before = self._here.get(number)
            self._here[number] = gradient.detach() if before is None else before + gradient.detach()

    def finish(self, rest: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
        with torch.no_grad():
            for number, gradient in rest.items():
                self.add(number, gradient)
        steps = [RankStep(*step) for step in self._steps.wait()]
        self.derivative = scale = (
            self._sync_context.scale(steps, self._tensors) or 0.0
        ) * self._communicator.world_size
        for n in self._accumulated():
            self._gradient_sync.own_grads.add(self._tensors[n])
        with torch.no_grad():
            return [self._here[n] * scale if scale and n in self._here else None for n in range(len(self._tensors))]


class _DifferentiableReduction(torch.autograd.Function):
    """The sum of gradients that have a history; see `Reduction.differentiable`."""

    @staticmethod
    def forward(
        ctx: Any, reduction: Reduction, there: Sequence[int], *gradients: Any
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.there = there
        ctx.set_materialize_grads(False)
        results = reduction.finish(dict(zip(there, gradients, strict=True)))
        ctx.scale = reduction.derivative
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        there = [grads[k] for k in ctx.there]
        return (None, None, *(None if grad is None else grad * ctx.scale for grad in there))


class _MethodAsForward(nn.Module):
    """A module whose forward is any method of another."""

    def __init__(self, module: nn.Module, method: str | None) -> None:
        super().__init__()
        self.module = module
        self._method = method

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        called = self.module if self._method is None else getattr(self.module, self._method)
        return called(*inputs, **kwargs)


class _AllReduceInBackward(torch.autograd.Function):
    """Parameters as they are; in backward their gradients are summed over the processes.

    For a forward that is part of the caller's own graph, where no gradient can be sent before backward has made all.
    """

    @staticmethod
    def forward(ctx: Any, sync_context: SyncContext, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sync_context, ctx.tensors = sync_context, tensors
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        sync_context: SyncContext = ctx.sync_context
        nodes = [node for node, _ in ctx.next_functions]
        if not any(map(torch_private.backward_reaches, nodes)):
            return (None, *grads)
        reduction = sync_context.begin(ctx.tensors, nodes)
        try:
            if torch.is_grad_enabled():
                return (None, *reduction.differentiable(grads))
            return (None, *reduction.finish({number: grad for number, grad in enumerate(grads) if grad is not None}))
        except BaseException as error:
            reduction.failed(error)
            raise
