"""What the caller and a worker process say to each other. Each message is answered once.

Before its answer a worker may come to the meetings of the replicas' batch norms, any number of times
(remote_exchange.py).

Tensors in messages are places in the sender's outbox. Leaves are named by numbers that both sides know: the module's
tensor n is n, the k-th tensor of a call that needs a gradient is ~k.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from manyhands.engines.processes.module_sync import Update
from manyhands.engines.processes.pickling import dumps, loads
from manyhands.engines.processes.reducers.collectives import CollectiveConfig, Rendezvous
from manyhands.engines.processes.reducers.shared_memory import SharedMemoryConfig
from manyhands.engines.processes.shared_memory import SendBuffer, TensorSpec, can_lie_in_memory
from manyhands.runtime.thread_state import ProcessState, ThreadState


class TensorRef(NamedTuple):
    """A tensor in a message: the number of its place, or a tensor that cannot lie in memory, pickled.

    Attributes:
        leaf: of an input: the number of the leaf that stands before it. None where it needs no gradient.
        output: of an output: its number among its replica's outputs.
        requires_grad: of an input or an output, as it is with its sender.
        device: of an input: where the receiver is to put it.
    """

    place: int = -1
    inline: Any = None
    leaf: int | None = None
    output: int = -1
    requires_grad: bool = False
    device: torch.device | None = None

    @classmethod
    def by(cls, send_buffer: SendBuffer, tensor: torch.Tensor) -> "TensorRef":
        """Put a tensor into an outbox; return what stands for it in the message."""
        tensor = tensor.detach()
        if can_lie_in_memory(tensor):
            return cls(place=send_buffer.add(tensor))
        return cls(inline=dumps(tensor.cpu(), lambda tensor: None))


@dataclass(slots=True, kw_only=True)
class Message:
    """What every message to a worker carries.

    What has a default depends on what the worker was told before, and is filled in where a message leaves
    (worker_group.py).

    Attributes:
        places: of the tensors in it.
        thread: the state of the caller's thread.
        num_threads: intra-op threads.
        seed: for torch's generator.
        segments: (number, size in bytes) of the segments whose file descriptors come with it.
        gone: numbers of segments that nobody needs any more.
        forgotten: graphs that nobody can ask for any more.
        process: the state of the caller's process; None if it is what it was.
    """

    places: list[TensorSpec]
    thread: ThreadState
    num_threads: int
    seed: int
    segments: list[tuple[int, int]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    process: ProcessState | None = None


@dataclass(slots=True, kw_only=True)
class Forward(Message):
    """Call the module, and keep the graph as `graph`.

    Attributes:
        shard: the replica's positional and keyword inputs, pickled.
        seat: where batch norm is over all replicas: which of them this is, and of how many.
        device: the replica's.
        rendezvous: where it finds the others, for parameters that are sent; None if none are.
        replicas: who takes part.
    """

    graph: int
    update: Update
    method: str | None
    shard: bytes
    where: str
    seat: tuple[int, int] | None
    device: torch.device
    rendezvous: Rendezvous | None
    replicas: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Backward(Message):
    """Walk a graph from outputs; with `derive`, keep the graph of the gradients as that.

    Attributes:
        grads: (number of the output, its gradient, the leaf before that gradient if it needs a gradient itself).
        gradients: a place for the gradient of each of the module's tensors that has a small one; None if it is what it
            was.
        reducer_config: what the worker's reducer is made of; None if no gradient is to be reduced.
    """

    graph: int
    keep: bool
    grads: list[tuple[int, TensorRef]]
    derive: int | None
    gradients: dict[int, TensorSpec] | None
    reducer_config: SharedMemoryConfig | CollectiveConfig | None


@dataclass(slots=True)
class Reply:
    """What a worker answers.

    Attributes:
        value: of a forward: the output, pickled. Of a backward: None.
        gradients: (leaf, its gradient); `None` for one that lies at its own place.
        seconds: how long it took.
        error: how it failed; None if it did not.
        places, segments: as in `Message`.
        drew: whether random numbers were drawn.
        warnings: (text, class, file, line) of those that were given.
        said: what is to be said once, in the log.
        out_of_step: whether it has failed before it has done its part in what all replicas do together, so that the
            others would wait for it for ever.
    """

    value: bytes | None = None
    gradients: list[tuple[int, TensorRef | None]] = field(default_factory=list)
    seconds: float = 0.0
    error: "RemoteError | None" = None
    places: list[TensorSpec] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    drew: bool = False
    warnings: list[tuple[str, type[Warning], str, int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    out_of_step: bool = False


@dataclass(slots=True)
class RemoteError:
    """An exception of a worker's.

    Attributes:
        pickled: it, or its (class, arguments, attributes); None if it cannot be pickled.
        text: its class and message.
        traceback: where it was raised.
        notes: those it had.
        stops: whether it is to reach the caller at once: no `Exception`.
    """

    pickled: bytes | None
    text: str
    traceback: str
    notes: list[str]
    stops: bool

    def exception(self) -> BaseException:
        """Return an exception equal to the one that the worker raised."""
        error: BaseException | None = None
        if self.pickled is not None:
            with contextlib.suppress(Exception):
                loaded = loads(self.pickled, lambda reference: reference)
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
        error.add_note(f"in the worker process:\n{self.traceback}")
        return error
