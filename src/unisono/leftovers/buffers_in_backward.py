"""Buffers in backward: what an activation checkpoint, which runs a part of forward again, reads there."""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from unisono.leftovers.buffers import buffer_registries, commit_buffers, versions_of
from unisono.primitives.change_tracking import DictSnapshot, fill
from unisono.runtime import devices as _devices
from unisono.runtime.streams import on_streams
from unisono.runtime.torch_private import engine, foreach

T = TypeVar("T")

_CHANGED = (
    "the buffer {name} has changed between forward and backward, which runs forward again in parts (parts=, or "
    "rescue=). Change buffers after backward; or do not run the module in parts."
)


_OUT_OF_ORDER = (
    "in this backward an activation checkpoint of {module} would read the buffer {name} after that of an earlier "
    "forward has changed it, where one device runs the checkpoints of the last forward first. {cause} Or change the "
    "buffer outside of the checkpoint."
)
_OF_GRADIENTS = (
    "The loss uses gradients of the earlier forward (create_graph=True), which replicas compute as a whole: let the "
    "forward whose gradients the loss uses be the last one before backward."
)
_OF_OUTPUT = (
    "The output of the one went into another forward, and on accelerators the earlier forward does not wait for that: "
    "call backward for each of their losses, that of the last forward first."
)


_OF_THREADS = (
    "this backward goes through forwards that several threads have called, and the activation checkpoint of one would "
    "read the buffer {name} of {module}, which that of another one changes. Which one device runs first depends on how "
    "many operations each thread has recorded. Call backward for the forwards of each thread by itself. Or change the "
    "buffer outside of the checkpoint."
)


class BuffersInBackward:
    """Lets activation checkpoints in the backward of one step's replicas read the buffers as on one device.

    That is as they are then, not as they were in this step's forward: later forwards, other backwards or the program
    may have changed them, where no version counts it, too. So in each backward the first replica has the live ones, and
    the others have new copies. Tensors that the graphs have saved stay as they are.

    Args:
        modules: of each replica; live_modules: those of which they are replicas, with their `names`.
        devices: one a replica; live_device: the live modules'.

    Attributes:
        streams: of forward, on which torch runs its checkpoints again, whichever streams backward is called on.
    """

    streams: Sequence[torch.Stream] = ()

    def __init__(
        self,
        modules: Sequence[Sequence[nn.Module]],
        live_modules: Sequence[nn.Module],
        names: Sequence[str],
        devices: Sequence[torch.device],
        live_device: torch.device,
    ) -> None:
        self._live_device = live_device
        self._names, self._in_parts = names, False
        self._modules, self._live_modules, self._devices = modules[0], live_modules, devices
        self._registries = [buffer_registries(each).dicts for each in modules]
        self._live = buffer_registries(live_modules).dicts
        self._live_ids = {*map(id, self._live)}
        # The one that has called the forward; a forward that is run again in backward has no `forward_has_run`.
        self._thread = threading.current_thread()
        self._reassigns = False
        self._backward = -1  # the number of the last one
        self._before: Any = None  # what it has begun with: `_state`
        self._cause = _OF_GRADIENTS  # why the backward of a later forward may come later
        self._forward = 0  # the number of the forward, in this process
        self._buffers: list[torch.Tensor] = []  # after the forward
        self._versions: list[int | None] = []

    def forward_has_run(self, *, reassigns: bool, in_parts: bool) -> None:
        """Take note of the live buffers after the forward.

        Args:
            reassigns: whether it has reassigned some.
            in_parts: whether the checkpoints are those of parts, which the plain module does not have. Then a backward
                raises RuntimeError if a buffer has changed.
        """
        self._reassigns, self._in_parts, self._forward = reassigns, in_parts, next(_forwards)
        self._thread = threading.current_thread()
        if in_parts:
            self._buffers = self._now()
            self._versions = versions_of(self._buffers)
        else:
            _waiting[id(self)] = self

    def renew(self) -> None:
        """Give the replicas what the live module has now."""
        self._renew(self._now())

    def end(self) -> None:
        """Note that no backward of the forward follows."""
        _waiting.pop(id(self), None)

    def around(self, run: Callable[[T], None], repeats: bool, backward_of: T) -> None:
        """Call `run(backward_of)`, a backward of the replicas.

        Args:
            repeats: whether one backward of the caller's may run through the graphs several times, as for derivatives
                of higher order. One device runs a checkpoint once then: so each time that does begins with the same
                buffers, and what the first one and other forwards have made of them stays.
        """
        number = engine.number_of_backward()
        is_again = number == self._backward >= 0
        with on_streams(self.streams):
            others = self._passes_before(number) if _first_passes and not self._in_parts and not is_again else []
            for other in others:
                other._check_unchanged(self)
            is_noted = repeats or others or self._others_wait()
            state = self._state() if is_noted and not self._in_parts else None
            if state is not None and is_again:
                self._put_back(self._before)
            now = self._now()
            if not self._in_parts:
                self._renew(now)
            elif (name := self._changed_since_forward()) is not None:
                raise RuntimeError(_CHANGED.format(name=name))
            before = DictSnapshot(self._registries[0]) if self._reassigns else None
            copies = self._copies_of_first()
            versions = versions_of([own for own, _ in copies])
        run(backward_of)
        with torch.no_grad(), on_streams(self.streams):
            for (own, live), version in zip(copies, versions, strict=True):
                if versions_of([own]) != [version]:
                    live.copy_(own)
            if before is not None:  # what is reassigned again stays, without the history of a graph that is gone
                changes = before.changes()
                detached = {id(value): value.detach() for _, _, value in changes if isinstance(value, torch.Tensor)}
                devices = self._devices[0], self._live_device
                commit_buffers(changes, self._modules, self._live_modules, detached, *devices)
            if state is not None and is_again:
                self._put_back(state)
            elif state is not None:
                self._backward, self._before = number, state
                _first_passes[id(self)] = self
                engine.call_at_end_of_backward(self._forget)  # until then it is kept, if its graph is freed, too
                self._cause = _OF_GRADIENTS if repeats else _OF_OUTPUT
                for other in others:
                    if other._thread is not self._thread:
                        self._check_unchanged(other)
                if repeats and not self._changed():  # it may have come to no checkpoint
                    self._backward = -1

    def _copies_of_first(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the first replica's buffers that are copies, on another device, each with the live one."""
        if _devices.same_device(self._devices[0], self._live_device):
            return []
        pairs = zip(self._registries[0], self._live, strict=True)
        both = [(own[name], live[name]) for own, live in pairs for name in own.keys() & live.keys()]
        return [(one, other) for one, other in both if one is not None and other is not None and one is not other]

    def _state(self) -> "_State":
        """Return the live registries; and the buffers, each with its memory and its value."""
        buffers = [buffer for buffer in self._now() if not buffer.is_inference()]
        return [*map(dict, self._live)], [(buffer, buffer.data, buffer.detach().clone()) for buffer in buffers]

    def _put_back(self, state: "_State") -> None:
        registries, values = state
        for live, before in zip(self._live, registries, strict=True):
            fill(live, before)
        for buffer, data, value in values:
            data.copy_(value)  # no version counts it: graphs that have saved the buffer stay valid
            buffer.data = data

    def _passes_before(self, number: int) -> "list[BuffersInBackward]":
        """Return those to which backward `number` has come, and to which one device comes later, or may."""
        every = [each for ref in _first_passes.valuerefs() if (each := ref()) is not None and each._backward == number]
        return [each for each in every if each._forward < self._forward or self._is_in_another_thread(each)]

    def _check_unchanged(self, other: "BuffersInBackward") -> None:
        """Raise RuntimeError if this has changed a buffer of `other`, to which one device comes first, or may."""
        if changed := [name for registry, name in self._changed() if id(registry) in other._live_ids]:
            options = {"module": type(other._live_modules[0]).__name__, "name": repr(changed[0])}
            of_threads = other._thread is not self._thread
            raise RuntimeError((_OF_THREADS if of_threads else _OUT_OF_ORDER).format(**options, cause=self._cause))

    def _is_in_another_thread(self, other: "BuffersInBackward") -> bool:
        return other._thread is not self._thread and not self._live_ids.isdisjoint(other._live_ids)

    def _forget(self) -> None:
        self._backward, self._before = -1, None

    def _others_wait(self) -> bool:
        """Return whether a backward waits to which this one may come later, where one device may come to it first.

        It is that of a forward in another thread, or, on accelerators, of a later one.
        """
        every = [each for ref in _waiting.valuerefs() if (each := ref()) is not None]
        may_be_later = not _devices.all_on_host(self._devices)
        return any(
            (may_be_later and each._forward > self._forward) or self._is_in_another_thread(each) for each in every
        )

    def _changed(self) -> list[tuple[Any, str]]:
        """Return the live buffers that differ from those with which the last backward began: registry, name."""
        registries, values = self._before
        before = {id(buffer): value for buffer, _, value in values}
        found: list[tuple[Any, str]] = []
        for path, live, registry in zip(self._names, self._live, registries, strict=True):
            for name, was in registry.items():
                value = before.get(id(was))
                if live.get(name) is not was or (was is not None and value is not None and not _are_equal(was, value)):
                    found.append((live, f"{path}.{name}" if path else name))
        return found

    def _now(self) -> list[torch.Tensor]:
        return [buffer for buffer in chain(*map(_values, self._live)) if buffer is not None]

    def _changed_since_forward(self) -> str | None:
        """Return the name of a buffer that is not as it was after the forward; None if all are.

        Those of a replica, in which this forward may have been, are others in its backward, but with the same values.
        """
        paths = zip(self._names, self._live, strict=True)
        now = [(path, name, b) for path, live in paths for name, b in live.items() if b is not None]
        for (path, name, buffer), before, version in zip(now, self._buffers, self._versions, strict=False):
            if versions_of([before]) != [version] or not (buffer is before or _are_equal(buffer, before)):
                return repr(f"{path}.{name}" if path else name)
        return None if len(now) == len(self._buffers) else "that is new, or gone,"

    def _renew(self, buffers: list[torch.Tensor]) -> None:
        """Give the replicas what the live module has now."""
        for i, (registries, device) in enumerate(zip(self._registries, self._devices, strict=True)):
            here = [each for each in buffers if _devices.same_device(each.device, device)]
            if i == 0:
                own = {id(each): each.detach() if each.requires_grad else each for each in here}
            else:
                with torch.no_grad():
                    own = dict(zip(map(id, here), foreach.clones(here), strict=True))
            own.update({id(each): _devices.copied_to(each.detach(), device) for each in buffers if id(each) not in own})
            for registry, live in zip(registries, self._live, strict=True):
                fill(registry, {name: own.get(id(value), value) for name, value in live.items()})


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


_State: TypeAlias = tuple[list[dict[str, Any]], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]
_values = dict.values
_forwards = itertools.count(1)
_waiting: "weakref.WeakValueDictionary[int, BuffersInBackward]" = weakref.WeakValueDictionary()
# Those that later forwards, or a second run in the same backward, may follow.
_first_passes: "weakref.WeakValueDictionary[int, BuffersInBackward]" = weakref.WeakValueDictionary()
