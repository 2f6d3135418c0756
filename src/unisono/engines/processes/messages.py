"""Messages between the caller and a worker process. Every message gets one reply.

Before its reply a worker may send requests of the replicas' batch norms, any number of them (remote_exchange.py).

A tensor in a message is a spec in the sender's buffer. Leaves are named by numbers that both sides know: n from 0 for
the parameters that need a gradient, then for tensors from outside the module; `number_of_input(k)` for
the k-th tensor of a call that needs a gradient.
"""

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from unisono.engines.base import Parts
from unisono.engines.processes.module_sync import Update
from unisono.engines.processes.pickling import classes_by_value, dumps, loads
from unisono.engines.processes.reducers.collectives import CollectiveConfig, Rendezvous
from unisono.engines.processes.reducers.shared_memory import SharedMemoryConfig
from unisono.engines.processes.shared_memory import Segment, SendBuffer, TensorSpec, is_plain_strided
from unisono.runtime.thread_state import ProcessState, ThreadState
from unisono.runtime.timeline import Span
from unisono.runtime.tracebacks import FrameSummary, rebuilt, summaries

_LONGEST_CHAIN = 10  # of an exception, its cause, and so on


def number_of_input(k: int) -> int:
    """Return the number of the leaf of a call's k-th input: they count down from -1."""
    return ~k


class TensorRef(NamedTuple):
    """A tensor in a message: the index of its spec among the message's, or a pickled tensor that has no spec.

    Attributes:
        leaf: of an input: the number of its leaf; None where it needs no gradient.
        output: of an output: its number among its replica's outputs.
        requires_grad: of an input or an output, as at its sender.
        device: of an input: where the receiver puts it.
    """

    spec_index: int = -1
    inline: Any = None
    leaf: int | None = None
    output: int = -1
    requires_grad: bool = False
    device: torch.device | None = None

    @classmethod
    def put(cls, send_buffer: SendBuffer, tensor: torch.Tensor, **attributes: Any) -> "TensorRef":
        """Add a tensor to a send buffer; return its reference for the message, with the attributes given."""
        tensor = tensor.detach()
        if is_plain_strided(tensor):
            return cls(spec_index=send_buffer.add(tensor), **attributes)
        return cls(inline=dumps(tensor.cpu()), **attributes)

    def tensor(self, specs: Sequence[TensorSpec], segments: Mapping[int, Segment]) -> torch.Tensor:
        """Return the tensor, in memory that the sender's next message may overwrite.

        Args:
            specs: the message's.
            segments: the receiver's, by number.
        """
        if self.inline is not None:
            inline: torch.Tensor = loads(self.inline)
            return inline
        spec = specs[self.spec_index]
        return segments[spec.segment].view(spec)


@dataclass(slots=True, kw_only=True)
class Message:
    """What every message to a worker carries.

    What depends on what the worker already has, and `specs`, is filled in by `WorkerHandle.send`.

    Attributes:
        thread: the state of the caller's thread.
        process: that of its process; sent as None if it is unchanged.
        num_threads: intra-op threads.
        seed: for torch's generator.
        specs: of the tensors in the message.
        segments: (number, size in bytes) of the segments whose file descriptors come with the message.
        freed: numbers of segments that are no longer needed.
        released_graphs: graphs that are no longer needed.
        cores: those that the worker runs on; None if they are unchanged.
        is_recorded: whether the worker records what it does when.
    """

    thread: ThreadState
    process: ProcessState | None
    num_threads: int
    seed: int | bytes
    specs: list[TensorSpec] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    released_graphs: list[int] = field(default_factory=list)
    cores: tuple[int, ...] | None = None
    is_recorded: bool = False


@dataclass(slots=True, kw_only=True)
class Forward(Message):
    """Call the module, and keep its graph as `graph`.

    Attributes:
        shard: the replica's positional and keyword inputs, pickled; None: only take the update.
        replica, num_replicas: its index, and how many take part.
        device: the replica's.
        rendezvous: of the process group over which parameters are sent; None if none are.
        sync_batch_norm: whether batch norm is over all replicas.
        parts: how the replica runs its shard in parts; None: as a whole.
        rescue: whether a later message may have it run in parts.
        is_searched: whether its graph is searched for leaves that belong neither to the module nor to the inputs.
    """

    graph: int
    method: str | None
    shard: bytes | None
    replica: int
    num_replicas: int
    device: torch.device
    update: Update = field(default_factory=Update)
    rendezvous: Rendezvous | None = None
    sync_batch_norm: bool = False
    parts: Parts | None = None
    rescue: bool = False
    is_searched: bool = False


@dataclass(slots=True, kw_only=True)
class Backward(Message):
    """Run a graph's backward.

    Attributes:
        grads: (number of the output, its gradient, the leaf of that gradient if it needs a gradient itself).
        create_graph_as: the number under which to keep the gradients' own graph; None: they have none.
        placed: the places of small gradients of parameters, by leaf; None if unchanged.
        reducer_config: what the worker's reducer is made of; None if no gradient is reduced.
        needed: the leaves whose gradients are needed; None: all.
    """

    graph: int
    keep: bool
    grads: list[tuple[int, TensorRef]]
    create_graph_as: int | None
    placed: dict[int, TensorSpec] | None
    reducer_config: SharedMemoryConfig | CollectiveConfig | None
    needed: frozenset[int | None] | None


@dataclass(slots=True)
class Reply:
    """A worker's reply.

    Attributes:
        value: of a forward: the output, pickled. Of a backward: None.
        gradients: (leaf, its gradient), of those that are not at their places.
        all_placed: whether all parameters that have a place have their gradients there.
        found_leaves: of a forward: whether the search of its graph has found leaves.
        seconds: how long it took.
        error: what the worker raised, if it did.
        specs, segments: as in `Message`.
        random_digest: of the generators' states; None if no random numbers were drawn.
        warnings: (text, class, file, line) of each.
        log_messages: to be logged once.
        spans: what it did when, if that was to be recorded.
        out_of_step: whether the worker cannot go on: it failed before it had all of a message, or before its part in a
            collective, for which the others would wait for ever.
        missed_update: whether it failed before it had the module as it is.
    """

    value: bytes | None = None
    gradients: list[tuple[int, TensorRef]] = field(default_factory=list)
    all_placed: bool = False
    found_leaves: bool = False
    seconds: float = 0.0
    error: "RemoteError | None" = None
    specs: list[TensorSpec] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    random_digest: bytes | None = None
    warnings: list[tuple[str, type[Warning], str, int]] = field(default_factory=list)
    log_messages: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    out_of_step: bool = False
    missed_update: bool = False

    def output(
        self, segments: Mapping[int, Segment], received: Callable[[TensorRef, torch.Tensor], torch.Tensor]
    ) -> Any:
        """Return the output of a forward.

        Args:
            segments: the caller's, by number.
            received: returns what becomes of a tensor, which is in memory that the next reply overwrites.
        """
        assert self.value is not None
        return loads(self.value, lambda sent: received(sent, sent.tensor(self.specs, segments)))


@dataclass(slots=True)
class RemoteError:
    """An exception raised in a worker.

    Attributes:
        pickled: the exception, or its (class, arguments, attributes); None if it cannot be pickled.
        text: its class and message.
        frames: where it was raised.
        notes: its notes.
        is_urgent: whether it is raised at once, before the other workers have replied: it is no `Exception`.
        cause, context: the exceptions of the same name, as far as Python shows them.
    """

    pickled: bytes | None
    text: str
    frames: list[FrameSummary]
    notes: list[str]
    is_urgent: bool
    cause: "RemoteError | None" = None
    context: "RemoteError | None" = None

    @classmethod
    def of(cls, error: BaseException, above: Sequence[BaseException] = ()) -> "RemoteError":
        """Return what the caller needs to raise an equal exception.

        Args:
            above: the exceptions of which it is the cause or the context.
        """
        text = "".join(traceback.format_exception_only(error)).strip()
        frames, notes = summaries(error.__traceback__), [str(note) for note in getattr(error, "__notes__", ())]
        remote = cls(_pickled_error(error), text, frames, notes, not isinstance(error, Exception))
        above = (*above, error)
        if len(above) < _LONGEST_CHAIN:
            if error.__cause__ is not None:
                remote.cause = cls.of(error.__cause__, above)
            elif error.__context__ is not None and not error.__suppress_context__:
                remote.context = cls.of(error.__context__, above)
        return remote

    def exception(self) -> BaseException:
        """Return an exception equal to the one that the worker raised."""
        error: BaseException | None = None
        if self.pickled is not None:
            with contextlib.suppress(Exception):
                loaded = loads(self.pickled)
                if isinstance(loaded, tuple):
                    cls, args, attributes = loaded
                    loaded = cls.__new__(cls, *args)
                    loaded.args = args
                    loaded.__dict__.update(attributes)
                error = loaded
        if error is None:
            error = RuntimeError(self.text)
        for note in self.notes:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        for name, other in (("__cause__", self.cause), ("__context__", self.context)):
            if other is not None:
                BaseException.__setattr__(error, name, other.exception())  # its class may forbid it
        return error.with_traceback(rebuilt(self.frames))


def _pickled_error(error: BaseException) -> bytes | None:
    known = set(classes_by_value())
    for attempt in (error, (type(error), error.args, dict(error.__dict__)), (type(error), error.args, {})):
        try:
            pickled = dumps(attempt, known=known)
            again = loads(pickled)
            if attempt is not error or (type(again) is type(error) and again.args == error.args):
                return pickled
        except Exception:  # noqa: BLE001 - whatever its class raises: try the next form
            continue
    return None
