"""Random streams: on the host, each replica draws from a generator of its own.

torch has one random generator for the CPU, and threads that share it draw in whatever order they happen to run in. So
while replicas run, every draw in a replica's thread (dropout inside an LSTM or an attention layer, `torch.rand`,
`x.normal_()`, what compiled code draws) goes to that replica's *stream*, a `torch.Generator`, and
`torch.get_rng_state`, `set_rng_state`, `manual_seed` and `fork_rng` act on that stream: while replicas run,
`torch.random.default_generator` is another `torch.Generator` (stand_ins.py). Activation checkpointing
saves and restores the random state with these, so what it computes again in backward has the masks of its own forward.

Guarantees
    - Equal seeds, equal runs: a stream's seed is computed from torch's random state at the start of the pass and the
      replica's index. There is no other state, so restoring torch's random state repeats what was drawn after it.
    - Streams of different replicas differ.
    - A model that draws nothing does not change torch's random state, as the plain module does not. One that draws
      advances it by one number a pass, for any number of replicas; a pass that fails leaves it as it was.
    - Other operations are not slower; a draw costs some ten microseconds more.
    - Draws from the shared generator are reported once: those of custom operators, tensor subclasses that know no
      generators (jagged tensors), threads that forward starts, and methods of `torch.default_generator`.

Where whole batches go to whichever replica is free (`DataParallel.map`), each batch has a stream: its seed is computed
from torch's random state at the start and the batch's number. So what is drawn does not depend on the replica.

No streams are used for: a single replica, and replicas that run one after the other (a wrapper inside a replica, or
under a mode that other threads cannot join), which draw from the generator of the calling thread; calls that name a
generator; and what is not torch's: `random`, `numpy.random`.

One operation that draws nothing is intercepted in the same way: `embedding_renorm_` (`nn.Embedding(max_norm=...)`)
writes into weights that replicas on the host share. A lock lets one replica write at a time: else two of them could
scale the same row.

Accelerators have generators of their own. Each gets a seed of its own. Replicas on one accelerator share its generator,
and run one after the other (`_Turns`), each with the generator in a state of its own: kernels draw from it wherever
they are launched, and an activation checkpoint restores the state that its replica had. This takes no time: they share
the accelerator's stream, too. Draws on the CPU by replicas on accelerators are reported: these replicas have no
streams, because their backward runs in torch's threads, which would restore one replica's random state into another's
stream.

Assumes that no other thread draws from torch's generator while replicas run. Calls from several threads at once are
safe, but what they draw depends on their order.
"""

import contextlib
import ctypes
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch

from unisono.runtime import devices as _devices
from unisono.runtime import draws_off
from unisono.runtime.buckets import is_plain
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import log_once
from unisono.runtime.forks import in_forked_child
from unisono.runtime.interrupts import acquire
from unisono.runtime.stand_ins import StandIn, while_replicas_run
from unisono.runtime.thread_pool import inside_replica
from unisono.runtime.torch_private import compiler, dispatcher

# By the address of an embedding's weights, how often replicas have shortened rows of it (`max_norm`).
shortened_rows: dict[int, int] = {}

# The operations that draw on the host; all others that draw call these. Each has an overload with a generator, except
# those that end in "_like" in older releases of torch.
DRAWS = (
    *("_sample_dirichlet", "_standard_gamma", "bernoulli", "bernoulli_", "binomial", "cauchy", "cauchy_"),
    *("exponential", "exponential_", "geometric", "geometric_", "log_normal", "log_normal_", "multinomial"),
    *("normal", "normal_", "normal_functional", "poisson", "rand", "rand_like", "randint", "randint_like"),
    *("randn", "randn_like", "random", "random_", "randperm", "rrelu_with_noise", "rrelu_with_noise_"),
    *("rrelu_with_noise_functional", "uniform", "uniform_"),
)

_SHARED = (
    "torch's random generator was drawn from while the replicas of {name} ran, by {what}. All replicas share "
    "that generator, so runs with equal seeds may differ. Use your own torch.Generator (generator=...), or "
    "draw outside the model and pass the result as an input."
)
_WHAT_IS_NOT_CAUGHT = (
    "an operation that cannot use the replicas' own streams of random numbers: a custom operator, a tensor "
    "subclass, a thread that forward starts, a method of torch.default_generator, or another thread of the "
    "program"
)
_NOTHING_IS_CAUGHT = "the model: this release of torch cannot give each replica its own stream of random numbers"
_ON_ACCELERATORS = (
    "an operation on the CPU: replicas on accelerators have their own streams of random numbers only there"
)
_ONE_DEVICE = (
    "several replicas of {name} are on {device}, share its random generator, and wait for each other in "
    "forward, so they cannot run one after the other: runs with equal seeds may differ, and activation "
    "checkpoints may draw other numbers. Give each replica its own device, or draw outside the model and "
    "pass the result as an input."
)
_AFTER_THE_PASS = 1 << 30  # in the place of a replica's number
_PATIENCE_S = 60.0  # how long a replica waits for its turn on an accelerator


def own_streams(
    name: str, devices: Sequence[torch.device]
) -> AbstractContextManager[Callable[[int], AbstractContextManager[None]]]:
    """Return the context of one pass over replicas on `devices`; it gives the context of replica i in its thread.

    Not for replicas that run one after the other under a mode: they have no threads. No streams while draws are off.

    Args:
        name: what messages call the model.
        devices: one a replica.
    """
    if len(devices) < 2 or inside_replica() or draws_off.are_off():
        return contextlib.nullcontext(lambda index: contextlib.nullcontext())
    return _OwnStreams(name, devices)


class _OwnStreams:
    """See `own_streams`."""

    def __init__(self, name: str, devices: Sequence[torch.device]) -> None:
        self._name, self._devices = name, devices

    def __enter__(self) -> Callable[[int], AbstractContextManager[None]]:
        self._on_host = _devices.all_on_host(self._devices)
        self._turns: dict[torch.device, _Turns] = {}
        if not self._on_host:
            _devices.seed_differently(self._devices)
            shared = _devices.shared_generators(self._devices)
            self._turns = {device: _Turns(of, self._devices.index(device)) for device, of in shared.items()}
        self._last_move, self._state = _process.last_move, torch.default_generator.get_state()
        self._streams: list[RandomStream] = []  # of the replicas that have begun
        self._caught = _process.catch_draws() if self._on_host else None
        return self._context_of

    def _context_of(self, index: int) -> AbstractContextManager[None]:
        if self._caught is None:
            turns = self._turns.get(self._devices[index])
            return contextlib.nullcontext() if turns is None else turns.of(index)
        state = self._state  # not `self` in the lambda, which would be a reference cycle
        stream = RandomStream(partial(_seeded, lambda: _seed(bytes_of(state), index)))
        self._streams.append(stream)
        return DrawingFrom(stream, self._caught)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for device, turns in self._turns.items():
            turns.end(failed=kind is not None)
            if turns.out_of_turn and kind is None:
                log_once(_ONE_DEVICE.format(name=self._name, device=device))
        if kind is not None:
            return
        # This takes a third of what torch.equal takes.
        has_moved = random_state_of(torch.default_generator) != bytes_of(self._state)
        if has_moved and _process.last_move is self._last_move:
            on_host = _WHAT_IS_NOT_CAUGHT if self._caught else _NOTHING_IS_CAUGHT
            log_once(_SHARED.format(name=self._name, what=on_host if self._on_host else _ON_ACCELERATORS))
        if [stream for stream in self._streams if stream.generator_made is not None and stream.has_moved()]:
            _process.move_on()


class _Turns:
    """Replicas of one accelerator, which run one after the other, each with the generator in a state of its own.

    The first one goes on from the state of before the pass, and leaves its own behind. A replica that waits for the
    others in an exchange gives up its turn (`waiting_for_others`); one that waits in any other way keeps it, and after
    `_PATIENCE_S` the others run too: their numbers are then not their own.

    Attributes:
        out_of_turn: whether a replica has drawn without its turn.
    """

    def __init__(self, generator: torch.Generator, first: int) -> None:
        self._generator, self._first = generator, first
        self._before = generator.get_state()
        self._states: dict[int, torch.Tensor] = {}  # of the replicas that have had a turn
        self._moved = False
        self._lock = threading.Lock()
        self.out_of_turn = False

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """The context of replica `index`: its turn."""
        turn = _Turn(self, index)
        outer = getattr(_thread, "turn", None)
        turn.take()
        _thread.turn = turn
        try:
            yield
        finally:
            _thread.turn = outer
            turn.give_up()

    def take(self, index: int) -> bool:
        """Wait for the turn; return False if it did not come."""
        if not acquire(self._lock, _PATIENCE_S):
            return False
        if index not in self._states:
            self._states[index] = self._first_state(index)
        self._generator.set_state(self._states[index])
        return True

    def give_up(self, index: int) -> None:
        state = self._generator.get_state()
        self._moved = self._moved or not torch.equal(state, self._states[index])
        self._states[index] = state
        self._lock.release()

    def run_out_of_turn(self) -> Callable[[], None]:
        """Return what notes, at the end, whether the generator has moved."""
        before = self._generator.get_state()

        def end() -> None:
            self.out_of_turn = self.out_of_turn or not torch.equal(before, self._generator.get_state())

        return end

    def _first_state(self, index: int) -> torch.Tensor:
        if index == self._first:
            return self._before
        # Seeded by the state, so that equal states draw equal numbers; the offset into the numbers begins at 0.
        self._generator.set_state(self._before)
        self._generator.manual_seed(self._seed_for(index))
        return self._generator.get_state()

    def _seed_for(self, number: int) -> int:
        return _seed(bytes_of(self._before), number)

    def end(self, *, failed: bool) -> None:
        """Leave the generator as the first replica did, or, after a failure, as it was."""
        last = self._states.get(self._first, self._before)
        self._generator.set_state(self._before if failed else last)
        if self._moved and not failed and torch.equal(last, self._before):  # only other replicas have drawn
            self._generator.manual_seed(self._seed_for(_AFTER_THE_PASS))


class _Turn:
    """One replica's turn, in its thread."""

    def __init__(self, turns: _Turns, index: int) -> None:
        self._turns, self._index = turns, index
        self._end: Callable[[], None] | None = None

    def take(self) -> None:
        has_turn = self._turns.take(self._index)
        self._end = partial(self._turns.give_up, self._index) if has_turn else self._turns.run_out_of_turn()

    def give_up(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


@contextmanager
def waiting_for_others() -> Iterator[None]:
    """Around a wait for other replicas: those on the calling replica's accelerator may run meanwhile."""
    turn: _Turn | None = getattr(_thread, "turn", None)
    if turn is None:
        yield
        return
    turn.give_up()
    try:
        yield
    finally:
        turn.take()


class RandomStream:
    """The random numbers of one replica in one pass, or of one batch; the generator is made when first asked for.

    Args:
        new_generator: makes it. It calls no operation of torch, because it may be called under any mode or transform.
    """

    def __init__(self, new_generator: Callable[[], torch.Generator]) -> None:
        self._new_generator = new_generator
        self._first_state = b""
        self.generator_made: torch.Generator | None = None

    @property
    def generator(self) -> torch.Generator:
        if self.generator_made is None:
            self.generator_made = self._new_generator()
            self._first_state = random_state_of(self.generator_made)
        return self.generator_made

    def has_moved(self) -> bool:
        """Return whether the random state has advanced; False if it was restored after draws, as checkpointing does."""
        return self.generator_made is not None and random_state_of(self.generator_made) != self._first_state


def _seeded(seed: Callable[[], int]) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed())


class BatchStreams:
    """The seeds of the streams of batches: of each its own, from torch's random state now and the batch's number."""

    def __init__(self) -> None:
        self._of_state = zlib.crc32(random_state_of(torch.default_generator))
        self._has_moved_on = False

    def seed(self, batch: int) -> int:
        """Return the seed of a batch's stream; it is none of those that replicas get from the same random state."""
        return zlib.crc32(b"batch" + batch.to_bytes(8), self._of_state)

    def move_on(self) -> None:
        """Advance torch's random state by one number, once: some batch has drawn."""
        if not self._has_moved_on:
            self._has_moved_on = True
            _process.move_on()


class SeededDraws:
    """The context in which the calling thread draws from streams of its own, on the host and on its accelerator.

    An accelerator's generator is seeded in it, and has its old state afterwards.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, _thread, "stream", current_random_stream())
            stack.callback(while_replicas_run.leave, while_replicas_run.enter())
            caught = _process.catch_draws()
            if caught is not None:
                stack.enter_context(caught())
            else:
                stack.callback(self._report_draws, random_state_of(torch.default_generator))
            self._is_caught, self._generator = caught is not None, _devices.generator_of(self._device)
            if self._generator is not None:
                stack.enter_context(_process.lock_of(self._device))  # replicas on one accelerator share its generator
                stack.callback(self._generator.set_state, self._generator.get_state())
            self._entered = stack.pop_all()
        return self

    def begin(self, seed: int) -> None:
        """Begin another stream."""
        self._stream = RandomStream(partial(_seeded, lambda: seed))
        if self._is_caught:
            _thread.stream = self._stream
        if self._generator is not None:
            self._generator.manual_seed(seed)
            self._first_state = self._generator.get_state()

    def drew(self) -> bool:
        """Return whether numbers of this stream were drawn."""
        if self._generator is not None and not torch.equal(self._generator.get_state(), self._first_state):
            return True
        return self._stream.has_moved()

    def _report_draws(self, before: bytes) -> None:
        if random_state_of(torch.default_generator) != before:
            log_once(_SHARED.format(name=self._name, what=_NOTHING_IS_CAUGHT))

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _seed(state: bytes, index: int) -> int:
    """Return the seed of a replica's stream: 32 bits, as many as the generator uses, and another for each index."""
    return zlib.crc32(index.to_bytes(4), zlib.crc32(state))


def random_state_of(generator: torch.Generator) -> bytes:
    """Return the state of a generator."""
    return bytes_of(generator.get_state())


def bytes_of(state: torch.Tensor) -> bytes:
    """Return the bytes of a generator's state."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


class DrawingFrom:
    """The context in which the calling thread draws from a stream."""

    def __init__(self, stream: RandomStream, caught: Callable[[], AbstractContextManager[None]]) -> None:
        self._stream, self._catching = stream, caught()

    def __enter__(self) -> None:
        self._before = current_random_stream()
        _thread.stream = self._stream
        try:
            self._catching.__enter__()
        except BaseException:
            _thread.stream = self._before
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._catching.__exit__(*error)
        finally:
            _thread.stream = self._before


def current_random_stream() -> RandomStream | None:
    """Return the stream from which the calling thread draws; None: it draws from torch's generator."""
    return _thread.stream


def _stand_ins() -> Iterator[StandIn]:
    """Yield that of the generator whose state `torch.get_rng_state` and its like read and set."""
    if hasattr(torch.random, "default_generator"):
        yield torch.random, "default_generator", _generator_of_thread


def _generator_of_thread(default: torch.Generator) -> torch.Generator:
    def look_up() -> torch.Generator:
        stream = current_random_stream()
        return default if stream is None else stream.generator

    return dispatcher.GeneratorOfThread(look_up)


class _Process:
    """What the passes of a process share: torch's generator, and the handlers that intercept draws from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.weights_lock = threading.Lock()
        self._caught: list[Callable[[], AbstractContextManager[None]] | None] = []
        self.last_move = object()  # a new object whenever a pass of ours advances torch's random state
        self._locks: dict[torch.device, threading.Lock] = {}

    def lock_of(self, device: torch.device) -> threading.Lock:
        """Return the lock of an accelerator's generator."""
        with self._lock:
            return self._locks.setdefault(device, threading.Lock())

    def catch_draws(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Install the handlers, once; return the context for a replica's thread, None where torch does not allow it."""
        if self._caught:
            return self._caught[0]
        with self._lock:
            if not self._caught:
                handlers: dict[Any, Callable[..., Any]] = {
                    torch.ops.aten.native_dropout.default: _native_dropout,
                    torch.ops.aten.embedding_renorm_.default: _renormalise,
                }
                for operation, drawn_by in operations_that_draw():
                    num_before = [argument.name for argument in drawn_by._schema.arguments].index("generator")
                    handlers[operation] = partial(_draw, operation, drawn_by, num_before)
                self._caught.append(dispatcher.catch_operations(handlers))
            return self._caught[0]

    def move_on(self) -> None:
        """Advance torch's random state by one number; `last_move` tells passes that are running that we did it."""
        self.last_move = object()
        torch.rand((), device="cpu", generator=torch.default_generator)
        self.last_move = object()

    def after_fork(self) -> None:
        """In the child of a fork: another thread of the parent may have held a lock, and no replica runs here."""
        self._lock = threading.Lock()
        self.weights_lock = threading.Lock()
        self._locks = {}
        _thread.stream = None


def operations_that_draw() -> Iterator[tuple[Any, Any]]:
    """Yield each overload of `DRAWS` with the one that takes a generator: itself, or the one that differs only so.

    Overloads without such a twin in this release of torch are left out. The operations that they call (`uniform_` and
    the like) are caught instead, except where a dispatch mode or a tensor subclass runs them.
    """
    for name in DRAWS:
        packet = getattr(torch.ops.aten, name)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        with_generator = {_signature(overload): overload for overload in overloads if _takes_generator(overload)}
        for overload in overloads:
            drawn_by = overload if _takes_generator(overload) else with_generator.get(_signature(overload))
            if drawn_by is not None:
                yield overload, drawn_by


def _takes_generator(operation: Any) -> bool:
    return any(argument.name == "generator" for argument in operation._schema.arguments)


def _signature(operation: Any) -> tuple[tuple[str, str], ...]:
    """Return names and types of an operation's arguments, without the generator."""
    arguments = [(argument.name, str(argument.type)) for argument in operation._schema.arguments]
    return tuple(argument for argument in arguments if argument[0] != "generator")


def _draw(operation: Any, drawn_by: Any, num_before: int, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `operation`: draw from the thread's stream, unless the call names a generator.

    Args:
        drawn_by: the overload that takes a generator.
        num_before: how many arguments come before the generator.
        keys: see `dispatcher.catch_operations`.
    """
    named = args[num_before] if len(args) > num_before else kwargs.get("generator")
    generator = _own_generator(named, args, kwargs)
    if generator is not None:
        # A tensor subclass may implement the operation without a generator only. Then it draws from the shared one.
        with contextlib.suppress(NotImplementedError):
            return drawn_by.redispatch(keys, *args[:num_before], **{**kwargs, "generator": generator})
    return operation.redispatch(keys, *args, **kwargs)


def _native_dropout(keys: Any, tensor: torch.Tensor, p: float, train: bool | None) -> Any:
    """Replace `native_dropout`, which draws and takes no generator, by the same formula.

    The draw inside `native_dropout` would be intercepted too, but not where a dispatch mode or a subclass runs it.
    """
    generator = _own_generator(None, (tensor,), {})
    if generator is not None and train is not False and not tensor.is_nested:
        kept = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
        return tensor * kept * (1 / (1 - p) if p < 1 else 0.0), kept
    return torch.ops.aten.native_dropout.default.redispatch(keys, tensor, p, train)


def _renormalise(keys: Any, *args: Any) -> torch.Tensor:
    """Replace `embedding_renorm_`: one replica at a time, so each row is scaled once; count the call."""
    with _process.weights_lock:
        weights: torch.Tensor = torch.ops.aten.embedding_renorm_.default.redispatch(keys, *args)
        if is_plain(weights):
            shortened_rows[weights.data_ptr()] = shortened_rows.get(weights.data_ptr(), 0) + 1
        return weights


def _own_generator(
    named: torch.Generator | None, args: Sequence[Any], kwargs: dict[str, Any]
) -> torch.Generator | None:
    """Return the generator of the thread's stream if a call with these arguments is to draw from it, else None."""
    stream = current_random_stream()
    if stream is None or (named is not None and not dispatcher.is_default_generator(named)):
        return None
    device = kwargs.get("device")
    if device is None:
        device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    if (device is None or _devices.computes_on_host(device)) and not compiler.is_tracing():
        return stream.generator
    return None


class _ThreadLocal(threading.local):
    stream: RandomStream | None = None  # from which the thread draws; None: from torch's generator


_thread = _ThreadLocal()
_process = _Process()
in_forked_child(_process.after_fork)
while_replicas_run.add(_stand_ins)
