"""Draws for the whole batch: with `randomness="one_device"`, a replica's part of what one device would draw.

Every replica draws from the same random state. It draws the tensor that one device would draw for the whole batch, and
takes the part of its own rows:

    replica i:   shapes of the draw ──► (1) all-gather ──► which axis has the rows ──► (2) whole draw ──► own part

(1) Which axis has the rows? Shapes of one replica cannot tell: a constant axis may be as long as its rows. But replicas
with different numbers of rows can, and `DataParallel` sees to it that there are two of them. So the replicas compare:

    the same shapes everywhere                      no axis has rows: every replica draws the same numbers
    one axis differs, and is k times the rows       it has the rows; replica i's part begins at k times its first row
    anything else                                   an error, which names the operation

With k > 1, as where an attention layer puts rows and heads into one axis, the k entries of a row are taken to follow
each other. (If k blocks of all rows follow each other instead, shapes cannot tell, and the numbers are not those of one
device.)

(2) The whole tensor has the memory layout that it has on one device, because kernels fill memory in its order. How much
an operation draws may depend on values, as in `torch.poisson`: then the replicas all-gather their values too.

Guarantees
    - All replicas have drawn the same, so their random states are the same again, and those of one device.

Assumes that the replicas run at the same time and exchange values (exchange.py).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from unisono.runtime import torch_private
from unisono.runtime.exchange import Purpose, Request, current_exchange, taking_part
from unisono.runtime.rng import (
    NOTHING_IS_CAUGHT,
    WHAT_IS_NOT_CAUGHT,
    DrawingFrom,
    Stream,
    bytes_of,
    catch_draws,
    current_stream,
    digest_of_states,
    last_move,
    move_to,
    state_of,
)
from unisono.runtime.thread_pool import PassContext, ReplicaContext

_OPTION = 'random numbers of one device (randomness="one_device")'
_CANNOT = (
    _OPTION + ": {operation} cannot be drawn for the whole batch, {why}. Draw tensors in which one axis has the rows, "
    "or k entries of each row after the other, or none has; or draw outside of the model and pass the result to it as "
    'an input; or make the wrapper with randomness="per_replica".'
)
_NOT_CAUGHT_HERE = (
    _OPTION
    + ": torch's random generator was drawn from while the replicas of {name} ran, by {what}. Draw with torch's "
    "functions on plain tensors, or draw outside of the model and pass the result to it as an input; or make the "
    'wrapper with randomness="per_replica".'
)
_DREW_DIFFERENTLY = (
    _OPTION + ": the replicas of {name} have ended at different random states. Let forward seed the generator "
    "(torch.manual_seed, torch.set_rng_state) in all replicas alike, or make the wrapper with "
    'randomness="per_replica".'
)
_NOT_RUNNING_TOGETHER = (
    _OPTION + ": {operation} was called where the replicas do not run at the same time: in the backward of batched "
    "gradients (is_grads_batched=True, vectorize=True), under a dispatch or function mode around backward, or inside "
    "of another replica. Ask for gradients one by one and outside of such a mode, or make the wrapper with "
    'randomness="per_replica".'
)
_ROWS_INTERACT = "because the numbers for one row depend on the other rows: the replicas gave it the shapes {shapes}"
_SEEDS_OF_INDUCTOR = (-(2**63), 2**63 - 1)  # the bounds of the seeds that code compiled by Inductor draws


class WholeBatchDraw(Purpose):
    """A draw for the whole batch, of which each replica takes its rows."""

    went_different_ways = (
        _OPTION + " need every replica, and the replicas went different ways: {ways}. Let all replicas draw the same "
        'things in the same order, whatever their rows are. Or make the wrapper with randomness="per_replica".'
    )


class one_stream:  # noqa: N801 - a context manager
    """The context of one pass in which all replicas draw what one device would draw for the whole batch.

    It gives the context of replica i in its thread; inside of it is that of `exchange.exchanging`. The replicas may be
    in different processes: then each process enters it, from the same state of torch's generator.

    Attributes:
        first_state: that of torch's generator when this was made: all replicas begin with it.

    Args:
        name: what messages call the model.
        sizes: the rows of each replica, of which two differ.

    Raises:
        RuntimeError: at the end of the pass: the replicas have drawn differently, or something could not be caught.
            torch's random state is then what it was.
    """

    def __init__(self, name: str, sizes: Sequence[int]) -> None:
        self._name, self._sizes = name, tuple(sizes)
        self._last_move, self._state = last_move(), torch.default_generator.get_state()
        self.first_state = bytes_of(self._state)
        self._streams: list[Stream] = []  # of the replicas that have begun
        self._ends: set[bytes | None] = set()  # digests of the replicas' random states at the end

    def __enter__(self) -> ReplicaContext:
        caught = catch_draws()
        if caught is None:
            raise RuntimeError(_NOT_CAUGHT_HERE.format(name=self._name, what=NOTHING_IS_CAUGHT))
        self._caught = caught
        return self._context_of

    def _context_of(self, index: int) -> AbstractContextManager[None]:
        stream = Stream(partial(_with_state, self._state), partial(_draw_part, ReplicaRows(index, self._sizes)))
        self._streams.append(stream)
        return DrawingFrom(stream, self._caught)

    def ended(self, digests: Sequence[bytes | None]) -> None:
        """Take notice of how the replicas of other processes have ended: `digest_of_states` their random states."""
        self._ends.update(digests)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if last_move() is self._last_move and state_of(torch.default_generator) != self.first_state:
            move_to(self._state)
            raise RuntimeError(_NOT_CAUGHT_HERE.format(name=self._name, what=WHAT_IS_NOT_CAUGHT))
        generators = [stream.generator_made for stream in self._streams]
        states = [self._state if generator is None else generator.get_state() for generator in generators]
        self._ends.update(digest_of_states([self._state], [state]) for state in states)
        if len(self._ends) > 1:
            raise RuntimeError(_DREW_DIFFERENTLY.format(name=self._name))
        if self._ends != {None}:
            move_to(states[0])


@contextlib.contextmanager
def no_draws() -> Iterator[None]:
    """The context of a backward of replicas that draw as one device but do not run together: a draw is an error."""
    caught = catch_draws()
    if caught is None:
        yield
        return
    stream = Stream(partial(_with_state, torch.default_generator.get_state()), partial(_draw_part, ReplicaRows(0, ())))
    with taking_part(None, 0), DrawingFrom(stream, caught):
        yield


class SharedStream:
    """The same as `SeededStreams` for replicas that draw as one device: the caller's process enters `one_stream`.

    Attributes:
        seeds: one a replica: the state of torch's generator, for that of its process.
    """

    def __init__(self, name: str, sizes: Sequence[int]) -> None:
        self._of_pass = one_stream(name, sizes)
        self.seeds = [self._of_pass.first_state] * len(sizes)

    def __enter__(self) -> Sequence[PassContext]:
        return (lambda: self._of_pass,)

    def ended(self, digests: Sequence[bytes | None]) -> None:
        """See `SeededStreams`."""
        self._of_pass.ended(digests)

    def __exit__(self, *_: object) -> None:
        pass


def draws_for_whole_batch() -> bool:
    """Return whether the calling thread runs a replica that draws for the whole batch."""
    stream = current_stream()
    return stream is not None and stream.draw is not None


def _with_state(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator("cpu")
    generator.set_state(state)
    return generator


@dataclass(frozen=True)
class ReplicaRows:
    """A replica's part of the batch: its index, and the rows of every replica, in order."""

    index: int
    sizes: tuple[int, ...]

    @cached_property
    def start(self) -> int:
        return sum(self.sizes[: self.index])

    @cached_property
    def largest(self) -> int:
        """The index of the replica with the most rows."""
        return max(range(len(self.sizes)), key=self.sizes.__getitem__)


class _Given(NamedTuple):
    """What an operation is given as one argument: a size, a tensor, or a number.

    Attributes:
        shape: of a tensor, or the size; () for a number.
        strides: of a tensor; else None.
        values: of a tensor on whose values the draw depends; else None.
        number: the number; else None.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    values: torch.Tensor | None = None
    number: float | None = None


class _RowsAxis(NamedTuple):
    """The axis that has the rows, counted from the last one, and how many entries each row has there."""

    axis: int
    per_row: int


def _draw_part(
    part: ReplicaRows,
    drawn_by: Any,
    num_before: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    generator: torch.Generator | None,
) -> Any:
    """Draw for the whole batch; return the replica's part. Arguments that the operation writes into get theirs.

    Args:
        drawn_by: the operation, in the overload that takes a generator.
        num_before: how many positional arguments come before the generator.
        args, kwargs: those of the call.
        generator: the replica's; None if the call names another one.

    Raises:
        RuntimeError: the replica's part cannot be told, or another replica draws something else. Names the operation.
    """
    operation = drawn_by._schema.name.removeprefix("aten::")
    exchange = current_exchange()
    if exchange is None:
        raise RuntimeError(_NOT_RUNNING_TOGETHER.format(operation=operation))
    names = [argument.name for argument in drawn_by._schema.arguments[:num_before]]
    arguments = dict(zip(names, args, strict=False))
    arguments.update((name, value) for name, value in kwargs.items() if name != "generator")
    if operation.startswith("rrelu") and not arguments.get("training"):  # it draws nothing
        return drawn_by(*args[:num_before], **{**kwargs, "generator": generator})
    _check(operation, arguments, generator)
    given = {name: _given(drawn_by, name, value) for name, value in arguments.items() if _is_given(name, value)}
    all_given = exchange.all_gather(
        part.index, Request(WholeBatchDraw, drawn_by.name().removeprefix("aten::"), given)
    ).values
    rows_axis = None
    of_arguments: dict[str, _RowsAxis] = {}
    if not exchange.failed:  # otherwise the result does not matter
        of_arguments = _rows_axes(operation, [all_given[i] for i in range(len(part.sizes))], part)
        rows_axis = next(iter(of_arguments.values()), None)
    if rows_axis is None:
        return drawn_by(*args[:num_before], **{**kwargs, "generator": generator})

    whole = dict(arguments)
    for name, value in arguments.items():
        if name in of_arguments:
            whole[name] = _whole(name, value, all_given, rows_axis, part)
        elif name == "out":
            whole[name] = torch.empty(0, dtype=value.dtype, device=value.device)
    result = drawn_by(
        *[whole[name] for name in names[: len(args)]], **_keywords(whole, names, args), generator=generator
    )
    for argument in drawn_by._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            own = _own_part(whole[argument.name], rows_axis, part)
            if arguments[argument.name].shape != own.shape:  # of an `out`
                arguments[argument.name].resize_(own.shape)
            arguments[argument.name].copy_(own)
    if "out" in arguments:
        return arguments["out"]
    if operation.endswith("_"):
        return arguments["self"]
    if isinstance(result, tuple):
        return tuple(_own_part(each, rows_axis, part).clone() for each in result)
    return _own_part(result, rows_axis, part).clone()


def _keywords(whole: Mapping[str, Any], names: Sequence[str], args: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments that were not given by position."""
    by_position = names[: len(args)]
    return {name: value for name, value in whole.items() if name not in by_position}


def _check(operation: str, arguments: Mapping[str, Any], generator: torch.Generator | None) -> None:
    """Raise RuntimeError if the shapes of a call do not say what it draws."""
    why = ""
    if generator is None:
        why = "because it is given a generator of its own, which replicas share, or of which each has a copy"
    elif (arguments.get("low"), arguments.get("high")) == _SEEDS_OF_INDUCTOR:
        why = "because code that torch.compile has compiled draws by itself, from seeds"
    elif torch_private.is_forward_mode():
        why = "because it is inside forward-mode differentiation (torch.func.jvp), whose level all threads share"
    for value in arguments.values():
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout is not torch.strided or value.is_nested:
            why = "because it is given a sparse or nested tensor"
        elif type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            why = f"because it is given a {type(value).__name__}, a subclass of Tensor with operations of its own"
    if why:
        raise RuntimeError(_CANNOT.format(operation=operation, why=why))


def _is_given(name: str, value: Any) -> bool:
    """Return whether an argument decides what is drawn; dtypes, devices and their like do not matter here."""
    return name == "size" or isinstance(value, torch.Tensor | int | float)


def _given(drawn_by: Any, name: str, value: Any) -> _Given:
    if name == "n":  # of randperm
        return _Given((value,))
    if isinstance(value, int | float):
        return _Given((), number=value)
    if name == "size":
        return _Given(tuple(value))
    values = value.detach().clone() if _reads(drawn_by, name) else None
    return _Given(tuple(value.shape), tuple(value.stride()), values)


_READ_SELF = ("_sample_dirichlet", "_standard_gamma", "multinomial", "poisson", "rrelu_with_noise")


def _reads(drawn_by: Any, name: str) -> bool:
    """Return whether an operation reads the values of a tensor: all but those of which it takes the shape only."""
    if name in ("out", "noise"):
        return False
    packet, overload = drawn_by._schema.name.removeprefix("aten::"), drawn_by._overloadname
    return name != "self" or packet.startswith(_READ_SELF) or (packet == "bernoulli" and overload in ("default", "out"))


def _rows_axes(operation: str, of_replicas: Sequence[Mapping[str, _Given]], part: ReplicaRows) -> dict[str, _RowsAxis]:
    """Return the axis of the rows of each argument that has one; it is the same in all of them.

    Raises:
        RuntimeError: it cannot be told, or the numbers of one row depend on the other rows.
    """
    found: dict[str, _RowsAxis] = {}
    for name in of_replicas[0]:
        numbers = [given[name].number for given in of_replicas]
        if numbers.count(numbers[0]) < len(numbers):
            why = f"because the replicas give it different numbers: {name}={', '.join(map(str, numbers))}"
            raise RuntimeError(_CANNOT.format(operation=operation, why=why))
        shapes = [given[name].shape for given in of_replicas]
        axes = _axes_that_differ(shapes)
        if not axes:
            continue
        per_row = shapes[0][axes[0]] // part.sizes[0] if len(axes) == 1 else 0
        if not per_row or any(shape[axes[0]] != per_row * n for shape, n in zip(shapes, part.sizes, strict=True)):
            if name == "out":
                continue  # the operation gives it another shape
            why = f"because no axis of {name} has the rows: {_in_words(shapes, part)}"
            raise RuntimeError(_CANNOT.format(operation=operation, why=why))
        found[name] = _RowsAxis(axes[0] - len(shapes[0]), per_row)
        is_last = found[name].axis == -1
        if len(set(found.values())) > 1 or (is_last and operation in ("randperm", "multinomial", "_sample_dirichlet")):
            why = _ROWS_INTERACT.format(shapes=_in_words(shapes, part))
            raise RuntimeError(_CANNOT.format(operation=operation, why=why))
    return found


def _axes_that_differ(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the axes on which shapes differ; all of them if they have different numbers of axes."""
    if len({len(shape) for shape in shapes}) > 1:
        return [*range(max(map(len, shapes)))] * 2
    return [axis for axis, lengths in enumerate(zip(*shapes, strict=True)) if len(set(lengths)) > 1]


def _in_words(shapes: Sequence[tuple[int, ...]], part: ReplicaRows) -> str:
    return ", ".join(f"{shape} for {rows} rows" for shape, rows in zip(shapes, part.sizes, strict=True))


def _whole(
    name: str, value: Any, all_given: Mapping[int, Mapping[str, _Given]], rows_axis: _RowsAxis, part: ReplicaRows
) -> Any:
    """Return what one device would give as an argument."""
    axis, per_row = rows_axis
    like = all_given[part.largest][name]
    shape = list(like.shape)
    shape[axis] = per_row * sum(part.sizes)
    if like.strides is None:
        return shape
    # An expanded axis has one entry in memory for all that it shows.
    expanded = [i for i, length in enumerate(like.shape) if length > 1 and like.strides[i] == 0]
    kept = [1 if i in expanded else length for i, length in enumerate(shape)]
    whole = torch.empty_strided(kept, _strides_like(like, kept), dtype=value.dtype, device=value.device)
    values = [v for index, _ in enumerate(part.sizes) if (v := all_given[index][name].values) is not None]
    if values:
        values[part.index] = value  # with its history
        rows_are_expanded = axis + len(shape) in expanded  # then they are all the same
        filled = value if rows_are_expanded else torch.cat(values, axis)
        for i in expanded:
            filled = filled.narrow(i, 0, 1)
        whole.copy_(filled)
    return whole.expand(shape)


def _strides_like(given: _Given, shape: Sequence[int]) -> list[int]:
    """Return strides for `shape` with the order of axes in memory that a given tensor has, and with gaps if it has.

    Kernels compare strides, of axes of length 1 too, and of equal ones the lengths; so the order follows both. An axis
    of the rows of a single replica may have length 1, so the given tensor is one with more than one row.
    """
    assert given.strides is not None
    strides_and_lengths = list(zip(given.strides, given.shape, strict=True))
    axes = sorted(range(len(shape)), key=strides_and_lengths.__getitem__)  # innermost first
    length = 1
    is_dense = True
    for axis in axes:
        if given.shape[axis] > 1 and given.strides[axis] > 0:
            is_dense = is_dense and given.strides[axis] == length
            length *= given.shape[axis]
    strides = [0] * len(shape)
    stride = 1 if is_dense else 2
    for axis in axes:
        strides[axis] = stride
        stride *= max(1, shape[axis])
    return strides


def _own_part(whole: torch.Tensor, rows_axis: _RowsAxis, part: ReplicaRows) -> torch.Tensor:
    axis, per_row = rows_axis
    return whole.narrow(axis, per_row * part.start, per_row * part.sizes[part.index])
