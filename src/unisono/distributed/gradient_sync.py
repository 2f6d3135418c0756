"""Gradients summed over processes: what one model's gradients count for, and when they are summed.

    rank r:   backward of its own batch ──► gradient of its own loss
                                              │ times weight r / all weights
                                              ▼
              all-reduced over the ranks ──► gradient of the one loss over all rows

The weight of a rank is its number of rows (or what the caller sets), so that nothing is averaged per process. The
ranks all-gather their weights, and what they are about to reduce (consistency.py), when backward starts; those of a
small model come with its gradients. A rank whose weight is 0 contributes zeros: its own gradients, which may be NaN,
are never read. bucketed_all_reduce.py all-reduces while backward still runs.

A backward that leads to no parameter, such as `torch.autograd.grad` for inputs, reduces nothing and waits for no rank.

In no_sync() a rank's own gradients go into `grad`, multiplied by the number of ranks. The next backward outside of it
takes the mean over the ranks of what is in `grad` then. What was in `grad` before no_sync() is equal on all
ranks, so the mean leaves it unchanged; what the user zeroes or scales in between is zeroed or scaled.

Sources: buckets and their order, S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020.
"""

import abc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import methodcaller
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from unisono.distributed.bucketed_all_reduce import DOING, BucketedAllReduce, CommHook, Structure, plan_for_ranks
from unisono.distributed.consistency import (
    RankStep,
    RankSteps,
    WrittenValue,
    check_same_model,
    check_same_step,
    description_of,
)
from unisono.distributed.environment import start_default_group
from unisono.distributed.process_group import (
    Communicator,
    RankDevices,
    broadcast_plan,
    communicator_for,
    digest_of,
    distributed,
)
from unisono.leftovers.written_parameters import fingerprints
from unisono.primitives.checks import check_can_be_replicated
from unisono.primitives.scatter import Arguments
from unisono.runtime.buckets import Bucket, BucketPlan, Gradients
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import warn
from unisono.runtime.torch_private import engine

Wait: TypeAlias = Callable[[], Gradients]  # waits for the sum of each gradient

SENT_TWICE = (
    "DistributedDataParallel and DataParallel both sum the gradients of this model over the processes, so "
    "they are sent twice, and DistributedDataParallel ignores how many rows each process has. Use one of "
    "them: DataParallel(module) around the plain module, without DistributedDataParallel and without "
    "accelerate's prepare for the model; or DistributedDataParallel around DataParallel(module, "
    "process_group=False)."
)
_NONE_IS_IGNORED = (
    "the module tells DistributedDataParallel to leave out {names} (module._ddp_params_and_buffers_to_ignore). "
    "DataParallel leaves out none: it sums the gradients of all parameters over the processes, and gives all "
    "processes the same buffers. Write `del module._ddp_params_and_buffers_to_ignore`, and keep what each process "
    "has for itself outside of the module."
)
_OF_BUFFERS = "broadcasting one rank's buffers"
_LEFT = "a backward has raised an exception after the ranks had begun to sum its gradients"
_MOST_PLANS = 8  # models whose parts are frozen in turn have several


def checked_weight(weight: object) -> float:
    """Return the weight of a batch; raise TypeError or ValueError for what is none."""
    expected = "expected a number, 0 or more, such as the number of tokens in the batch"
    try:
        number = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # the last: a tensor of several
        raise TypeError(f"weight={weight!r}: {expected}") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"weight={weight!r}: {expected}")
    return number


class UnboundGradientSync(NamedTuple):
    """A `GradientSync` that was pickled: it is bound to the processes of the program that loads it when it is needed.

    Not earlier, so that one process alone can load a model and evaluate it.
    """

    device: torch.device  # as in `GradientSync`
    loss: str  # the same
    is_world: bool  # whether it was among all processes of its program, not only those of a group

    def bind(self, module: nn.Module) -> "GradientSync | None":
        """Bind to the processes of this program; return None if this process is alone. A collective.

        Raises:
            RuntimeError: it was among the processes of a group, which are unknown now.
        """
        if not self.is_world and start_default_group() and distributed.get_world_size() > 1:
            raise RuntimeError(
                "this DataParallel was pickled with its own process_group, which cannot be pickled. Wrap its "
                "module again: DataParallel(loaded.module, process_group=...)."
            )
        communicator = communicator_for()
        if communicator is None:
            return None
        gradient_sync = GradientSync(communicator, self.device, self.loss)
        gradient_sync.sync_module_states(module)
        return gradient_sync


class GradientSync:
    """Sums the gradients of one module over processes.

    Attributes:
        devices: of all ranks, after `sync_module_states`.

    Args:
        communicator: the processes.
        device: on which the gradients are.
        loss: "mean" if each process's loss is a mean over its rows, "sum" if it is a sum.
    """

    devices: RankDevices

    def __init__(self, communicator: Communicator, device: torch.device, loss: str) -> None:
        self.communicator = communicator
        self.loss = loss
        self._device = device
        self.hook: tuple[Any, CommHook] | None = None
        self.synchronised = True  # False inside no_sync()
        self.next_weight: float | None = None  # of the next forward, if the caller has set it
        self.sample: Arguments | None = None  # some rows, to run on for a batch without rows
        # Weak references: a tensor has only one, so that it can be looked up in a set.
        self.own_grads: set[Any] = set()  # to tensors whose `grad` is this rank's own, since a backward in no_sync()
        self.accumulates = False  # whether there has been a backward in no_sync(), on all ranks
        self._sparse: set[Any] = set()  # to tensors that have had sparse gradients
        self._written: dict[int, torch.Tensor] = {}  # by id, parameters that forwards have written into
        self._number = 0  # of the model, in the order of wrapping
        self.num_forwards = 0
        self._plans: dict[Any, tuple[BucketPlan, int]] = {}
        self._latest: Structure | None = None
        self.buffers = ModuleBuffers()  # while the parameters are those of the latest structure

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients to this process meanwhile."""
        before, self.synchronised = self.synchronised, False
        try:
            yield
        finally:
            self.synchronised = before

    def __deepcopy__(self, memo: object) -> "GradientSync":
        copied = GradientSync(self.communicator, self._device, self.loss)  # without the original's state
        copied.hook, copied.devices = self.hook, self.devices
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return UnboundGradientSync, (self._device, self.loss, self.communicator.is_world)

    @cached_property
    def group(self) -> Any:
        """The process group of the gradients. Its first use is a collective."""
        return self.communicator.group_for(self.devices, "gradients")

    def sync_module_states(self, module: nn.Module) -> None:
        """Check that `module` is on the device and the same on all ranks; give all rank 0's parameters and buffers."""
        tensors = [*module.parameters(), *module.buffers()]
        check_can_be_replicated(module, tensors, self._device)
        # Set by torch's `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`.
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers()) if name in ignored]
        if names:
            raise ValueError(_NONE_IS_IGNORED.format(names=", ".join(names[:8]) + (", ..." if len(names) > 8 else "")))
        if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in module.modules()):
            warn(SENT_TWICE)
        self.communicator.barrier(f"wrapping {type(module).__name__}")
        self.communicator.num_models += 1
        self._number = self.communicator.num_models
        check_same_model(self.communicator, module)
        self.devices = self.communicator.agree_on_devices(self._device)
        tensors = [tensor for tensor in tensors if not tensor.is_meta]
        self.communicator.broadcast(0, tensors, self.group, "broadcasting rank 0's parameters")()

    def share_buffers(self, module: nn.Module, weights: Sequence[float]) -> None:
        """Give ranks without rows the buffers of the first rank with rows, after a forward that no backward follows.

        Args:
            weights: of all ranks' batches; none if they do not know them, because they have exchanged nothing.
        """
        if any(weights) and not all(weights):
            source = next(rank for rank, weight in enumerate(weights) if weight)
            buffers = [buffer for buffer in module.buffers() if not buffer.is_sparse]
            self.communicator.broadcast(source, buffers, self.group, _OF_BUFFERS)()

    def sync_context(self, module: nn.Module, rows: int | None) -> "SyncContext":
        """Return the context of a forward of so many rows."""
        is_step = torch.is_grad_enabled()
        given = self.next_weight if is_step else None
        weight = 0.0 if rows == 0 else given if given is not None else float(1 if rows is None else rows)
        number, training = self.num_forwards + (module.training and is_step), module.training
        return SyncContext(self, weakref.ref(module), weight, given is not None, number, training, self.synchronised)

    def structure(self, tensors: Sequence[torch.Tensor]) -> Structure:
        """Return what is known about these parameters. The same list, and not only an equal one, has not changed."""
        latest = self._latest
        if (
            latest is None
            or latest.tensors is not tensors
            or latest.hook is not self.hook
            or latest.accumulates is not self.accumulates
        ):
            dtypes = [tensor.dtype for tensor in tensors]
            # By `map`, without Python code for each tensor.
            key = *map(id, tensors), *dtypes, *map(torch.Tensor.size, tensors), *map(torch.Tensor.stride, tensors)
            if key not in self._plans:
                if len(self._plans) >= _MOST_PLANS:
                    self._plans.clear()
                is_sparse = self._sparse.__contains__
                plan = plan_for_ranks(tensors, lambda tensor: is_sparse(weakref.ref(tensor)))
                placed = [place >= 0 for place in plan.places]
                digest = digest_of(repr([*zip(map(description_of, tensors), placed, strict=True)]))
                self._plans[key] = plan, digest
            communicator, group = self.communicator, self.group
            on_host, ranks = communicator.waits_on_host(group), (communicator.rank, communicator.world_size)
            of_sync = group, on_host, self.hook, self.accumulates
            self._latest = latest = Structure(tensors, *self._plans[key], *of_sync, *ranks)
            self.buffers = ModuleBuffers()
        return latest

    def note_written(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take note of parameters that a forward has written into: the next reduction compares their values.

        Each rank writes for its own rows. It may write the same on all ranks, as a momentum encoder does.
        """
        self._written.update((id(parameter), parameter) for parameter in parameters)

    def take_written(self, module_of: Callable[[], nn.Module | None]) -> list[WrittenValue]:
        """Return what forwards have written into parameters of a module since the last reduction."""
        if not self._written:
            return []
        module, written, self._written = module_of(), self._written, {}
        named = [] if module is None else [(name, p) for name, p in module.named_parameters() if id(p) in written]
        return [*zip([name for name, _ in named], fingerprints([p for _, p in named]), strict=True)]

    def rank_step(
        self, sync_context: "SyncContext", structure: Structure, written: Sequence[WrittenValue], of_buffers: int
    ) -> RankStep:
        """Return this rank's description of the reduction that it starts; `written` is from `take_written`."""
        if not self._number:  # a copy, which all ranks start to train now
            self.communicator.num_models += 1
            self._number = self.communicator.num_models
        return RankStep(
            weight=sync_context.weight,
            forward=sync_context.number,
            model=self._number,
            training=sync_context.training,
            digest=structure.digest,
            written=digest_of(repr(written)) if written else 0,
            buffers=of_buffers,
            in_no_sync=not sync_context.synchronised,
            weight_given=sync_context.weight_given,
            is_sum=self.loss == "sum",
            has_hook=self.hook is not None,
        )

    def mark_sparse(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give `tensors`, which have sparse gradients, no place in a bucket from now on."""
        new = set(map(weakref.ref, tensors)) - self._sparse
        if new:
            self._sparse |= new
            self._plans.clear()
            self._latest = None


class ModuleBuffers:
    """The buffers of a module that keeps its parts."""

    def __init__(self) -> None:
        self._registries: list[Any] | None = None  # the `_buffers` of the modules
        self._forms: Any = None
        self._buckets: Sequence[Bucket] = ()
        self._digest = 0

    def of(self, module: nn.Module) -> tuple[list[torch.Tensor], Sequence[Bucket], int]:
        """Return the module's buffers, new ones in the place of others too, the buckets to broadcast them in, and a
        digest that is equal on ranks whose buffers have equal forms.
        """
        if self._registries is None:
            self._registries = [each._buffers for each in module.modules()]
        if not any(self._registries):
            return [], (), 0
        values = chain.from_iterable(map(methodcaller("values"), self._registries))
        buffers = [b for b in values if b is not None and not b.is_sparse]
        forms = [(b.dtype, b.device) for b in buffers], [*map(torch.Tensor.size, buffers)]
        if forms != self._forms:
            self._forms, self._buckets = forms, broadcast_plan(buffers)
            self._digest = digest_of(repr([(str(b.dtype), tuple(b.shape)) for b in buffers]))
        return buffers, self._buckets, self._digest


@dataclass(slots=True, eq=False)  # not frozen: it would take three times as long to make
class SyncContext:
    """How the gradients of one forward are summed."""

    gradient_sync: GradientSync
    module: "weakref.ref[nn.Module]"  # the module that ran
    weight: float  # of the gradients, relative to the other ranks' weights
    weight_given: bool  # whether the caller has set it; else it is the number of rows
    number: int  # of the forward among those in training mode, from 1
    # Whether the module was in training mode. By the time of backward it may be in another, on one rank only: the one
    # that evaluates.
    training: bool
    synchronised: bool  # whether the gradients are all-reduced in the next backward: not in no_sync()
    has_exchanges: bool = False  # whether replicas exchange values with other processes in backward, as batch norm does

    @property
    def weight_of_loss(self) -> float:
        """The weight of this rank's loss in the loss over all rows, relative to the other ranks'; 0 without rows."""
        return self.weight if self.gradient_sync.loss == "mean" else float(self.weight > 0)

    def has_run(self) -> None:
        """Count the forward. One that fails, and may be tried again with fewer rows, does not count."""
        self.gradient_sync.num_forwards = self.number
        self.gradient_sync.next_weight = None

    def plan(self, tensors: Sequence[torch.Tensor]) -> BucketPlan:
        """Return the buckets of the module's parameters, as they are now.

        The list of an earlier call, itself, says that the module has not changed since then; so it does in `begin`.
        """
        return self.gradient_sync.structure(tensors).plan

    def begin(self, tensors: Sequence[torch.Tensor], node: Any, plan: BucketPlan | None = None) -> "RankReduction":
        """Start the reduction of the gradients of `tensors`, in the running backward of `node`, which has them.

        Args:
            plan: that of the buckets in which the gradients come; None: they come all at once.
        """
        return OverAllRanks(self, tensors, node, plan) if self.synchronised else LocalAccumulation(self, tensors, node)

    def sum(self, tensors: Sequence[torch.Tensor], node: Any, gradients: Gradients) -> Gradients:
        """Return the sums over the ranks of the gradients of `tensors`, in the running backward of `node`."""
        return self.begin(tensors, node).sum(gradients)


class RankReduction(abc.ABC):
    """The reduction of the parameters' gradients in one backward.

    If an error ends the backward before `sum`, `failed` has to be called, or `left` where it is not known.

    Attributes:
        derivative: of the result with respect to this rank's gradients; known when it is finished.
        takes_buckets: whether `add` should get the buckets that are complete, during backward.
        add: adds gradients of a bucket; see `BucketedAllReduce.add`.
    """

    derivative = 1.0
    takes_buckets = False
    add: Callable[[int, Sequence[torch.Tensor | None] | torch.Tensor], None]

    def __init__(self, sync_context: "SyncContext", tensors: Sequence[torch.Tensor], node: Any) -> None:
        self._sync_context, self._tensors, self._node = sync_context, tensors, node
        self._gradient_sync = gradient_sync = sync_context.gradient_sync
        self._communicator = communicator = gradient_sync.communicator
        self._structure = structure = gradient_sync.structure(tensors)
        # A reduction inside a backward that has begun another one, as in a checkpoint around a wrapped model. When the
        # other one's buckets are sent depends on time, unless they all are that are complete.
        running = None if communicator.reduction is None else communicator.reduction()
        if running is not None:
            running.settle()
        communicator.reduction = weakref.ref(self)
        self._buffers, of_buffers = gradient_sync.buffers, 0
        # The module whose buffers one rank broadcasts; None if none does.
        self._module = sync_context.module() if sync_context.training and sync_context.synchronised else None
        if self._module is not None:
            buffers, _, of_buffers = self._buffers.of(self._module)
            self._module = self._module if buffers else None
        written = gradient_sync.take_written(sync_context.module)
        self._steps = RankSteps(
            communicator,
            gradient_sync.rank_step(sync_context, structure, written, of_buffers),
            sync_context.weight_of_loss,
            partial(check_same_step, communicator, tensors, sync_context.module, written, DOING),
            DOING,
            in_one_message=sync_context.synchronised and structure.in_one_message,
        )

    def settle(self) -> None:
        """Send the buckets that are complete."""
        return

    def sum(self, rest: Gradients, when_sent: Callable[[], object] | None = None) -> Gradients:
        """Add the rest of the gradients; return the sum of each over the ranks, or None.

        Args:
            when_sent: is called before the other ranks are waited for.
        """
        try:
            if torch.is_grad_enabled():
                return self.differentiable(rest)
            wait = self.send(rest)
            if when_sent is not None:
                when_sent()
            return wait()
        except BaseException as error:
            self.failed(error)
            raise

    @abc.abstractmethod
    def send(self, rest: Sequence[torch.Tensor | None]) -> Wait:
        """Add the rest of the gradients; return what waits for the other ranks and returns each gradient, or None."""

    def differentiable(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Send gradients that have a history; return the sums, which have gradients that have a history.

        Every rank computes the same from the sums, and its gradient reaches each rank through that rank's own part: so
        a sum is its own derivative.
        """
        return list(_DifferentiableReduction.apply(self, *gradients))  # type: ignore[no-untyped-call]

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on."""
        self._communicator.failures.abort(error)

    def left(self) -> None:
        """Take note that an exception has ended the backward, after `add` or before."""
        self._communicator.failures.leave(_LEFT)

    def _accumulated(self) -> list[int]:
        """Return the numbers of the tensors to whose `grad` this backward adds."""
        nodes = zip(self._tensors, self._node.next_functions, strict=True)
        return [n for n, (t, (node, _)) in enumerate(nodes) if t.is_leaf and engine.backward_runs(node)]


class OverAllRanks(RankReduction):
    """The sum over the ranks; None for a tensor that no rank used."""

    def __init__(
        self, sync_context: "SyncContext", tensors: Sequence[torch.Tensor], node: Any, plan: BucketPlan | None
    ) -> None:
        super().__init__(sync_context, tensors, node)
        structure = self._structure
        # The collectives of an accelerator have to start in one order on all ranks. When a bucket is full depends on
        # which gradients a rank has, and on time; so there all buckets come after the exchanges.
        # The plan may have changed since forward: by sparse gradients.
        self.takes_buckets = plan is structure.plan and (structure.on_host or not sync_context.has_exchanges)
        local_grads = self._of_no_sync() if self._gradient_sync.own_grads else {}
        self._replaced = [*map(tensors.__getitem__, local_grads)]
        self._all_reduce = BucketedAllReduce(self._communicator, structure, self._steps, local_grads)
        self.add = self._all_reduce.add

    def _of_no_sync(self) -> dict[int, torch.Tensor]:
        """Return what backwards in no_sync() have left in `grad`, by number: this sum includes it, and replaces it."""
        own, tensors = self._gradient_sync.own_grads, self._tensors
        numbers = [n for n in self._accumulated() if weakref.ref(tensors[n]) in own]
        own.difference_update(weakref.ref(tensors[n]) for n in numbers)
        return {n: grad for n in numbers if (grad := tensors[n].grad) is not None}

    def settle(self) -> None:
        self._all_reduce.settle()

    def send(self, rest: Sequence[torch.Tensor | None]) -> Wait:
        self._all_reduce.send(rest)
        return self._wait

    def _wait(self) -> list[torch.Tensor | None]:
        found = self._all_reduce.wait(None if self._module is None else partial(self._broadcast_of, self._module))
        if self._all_reduce.sparse:
            self._gradient_sync.mark_sparse([self._tensors[number] for number in self._all_reduce.sparse])
        for tensor in self._replaced:
            tensor.grad = None  # the result, which autograd puts there, includes it
        return found

    def _broadcast_of(self, module: nn.Module) -> Callable[[], None]:
        # The buffers of the first rank with rows persist, as those of the first replica do.
        source = next((rank for rank, weight in enumerate(self._steps.weights) if weight), 0)
        buffers, plan, _ = self._buffers.of(module)
        return self._communicator.broadcast(source, buffers, self._gradient_sync.group, _OF_BUFFERS, plan)


class LocalAccumulation(RankReduction):
    """In no_sync(): this rank's own gradients, multiplied by the number of ranks. All come at once.

    No other rank waits for them: a failure is this one's.
    """

    def failed(self, error: BaseException) -> None:
        pass

    def left(self) -> None:
        pass

    def send(self, rest: Sequence[torch.Tensor | None]) -> Wait:
        return partial(self._scaled, rest)

    def _scaled(self, rest: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        self._gradient_sync.accumulates = True
        self.derivative = scale = self._steps.scale() * self._communicator.world_size
        self._gradient_sync.own_grads.update(weakref.ref(self._tensors[n]) for n in self._accumulated())
        with torch.no_grad():
            return [grad * scale if scale and grad is not None else None for grad in rest]


class _DifferentiableReduction(torch.autograd.Function):
    """The sum of gradients that have a history; see `RankReduction.differentiable`."""

    @staticmethod
    def forward(ctx: Any, reduction: RankReduction, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        ctx.given = [gradient is not None for gradient in gradients]
        ctx.set_materialize_grads(False)
        results = reduction.send(gradients)()
        ctx.scale = reduction.derivative
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        pairs = zip(grads, ctx.given, strict=True)
        return (None, *(grad * ctx.scale if given and grad is not None else None for grad, given in pairs))
