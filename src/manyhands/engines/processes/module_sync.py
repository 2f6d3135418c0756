"""The mirror: what the workers have of the live module, and what has to be sent to make them equal again.

On the CPU parameters lie in memory that all processes map; so what an optimizer writes is seen at once, and exists
once. Elsewhere each worker has its own, and those that changed are sent before a forward (collectives.py). Buffers and
other tensors are copied, again whenever they changed here. All else is pickled and sent when it changed: attributes
with plain values one by one, anything else with the whole module.

What is noticed: attributes that are rebound, in any module; the contents of plain containers in them; children,
parameters, buffers and hooks that come and go; train/eval and requires_grad; a parameter whose memory was replaced;
tensors that were written into. What is not: changes inside objects of other classes, class attributes, closures,
globals; for these there is `refresh`. A container that the caller's own replica changed during a forward is not sent:
each process has its own.

Assumes that between two forwards a module is changed by this process only.
"""

import ctypes
import itertools
import os
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from manyhands.engines.processes.change_tracking import ChangeTracker
from manyhands.engines.processes.pickling import dumps
from manyhands.engines.processes.shared_memory import (
    BumpAllocator,
    Segment,
    TensorSpec,
    can_lie_in_memory,
    is_movable,
    move_to_shared_memory,
)
from manyhands.primitives.blueprint import Blueprint, collector_paused
from manyhands.primitives.references import INERT, is_inert
from manyhands.runtime import devices as _devices
from manyhands.runtime import torch_private
from manyhands.runtime.buckets import Bucket, Form, buckets_of, fingerprint

_LITTLE_BYTES = 1 << 20
_never_equal = itertools.count()
_module_syncs: "weakref.WeakSet[ModuleSync]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Described:
    """How a worker makes its own of one of the module's tensors.

    Attributes:
        place: where it lies; None if it is `inline` or comes later.
        inline: a tensor that cannot lie in shared memory (a sparse one, a subclass with data of its own).
        later: what it is like, if it is a parameter that is sent behind the module.
        device: where the worker's own is to be; None: on the worker's device, as the live one is on the module's.
        kind: its class, where that is a subclass of Parameter; else Parameter or Tensor.
        attributes: the tensor's `__dict__`.
        is_shared: whether it has to stay in the shared memory where it lies, rather than be copied from there.
    """

    place: TensorSpec | None
    inline: torch.Tensor | None
    later: Form | None
    device: torch.device | None
    kind: type
    requires_grad: bool
    attributes: dict[str, Any]
    is_shared: bool


@dataclass(frozen=True, slots=True)
class Update:
    """What has to be sent to the workers before a forward.

    Attributes:
        module: the whole module, pickled: None if they have it.
        path: where Python looks for modules; only with a module.
        changes: (number of a module, attribute, its new value), one `GONE` for what was deleted.
        requires_grad: the flags of the module's parameters, None if they are as they were.
        rewritten: whether copied tensors were written anew.
        buckets: in which parameters are sent; None if they are what they were.
        sent: the numbers of those buckets that are sent now.
    """

    module: bytes | None = None
    path: tuple[str, ...] = ()
    changes: tuple[tuple[int, str, Any], ...] = ()
    requires_grad: tuple[bool, ...] | None = None
    rewritten: bool = False
    buckets: tuple[Bucket, ...] | None = None
    sent: tuple[int, ...] = ()

    @property
    def says_something(self) -> bool:
        """Return whether a worker that misses it is behind."""
        said = (self.module is not None, self.changes, self.requires_grad is not None, self.rewritten, self.sent)
        return any(said)


class ModuleSync:
    """What the workers have of one live module.

    Attributes:
        segments: the memory that holds the module's tensors.
        tensors: the module's tensors, in the order that workers know: first its parameters, as the blueprint has them.
        outside: numbers of tensors that need gradients and are not the module's: globals that its functions use.
    """

    def __init__(self) -> None:
        _module_syncs.add(self)
        self.forget()

    def forget(self) -> None:
        """Let everything be sent again."""
        self.segments: list[Segment] = []
        self.tensors: list[torch.Tensor] = []
        self.outside: list[int] = []
        self._modules: list[nn.Module] = []  # kept, so that nothing else can come to have their ids
        self._ids: list[int] = []
        self._number: dict[int, int] = {}  # of each tensor, by its id
        self._watch = ChangeTracker([])
        self._blueprint: Blueprint | None = None
        self._changes: list[tuple[int, str, Any]] | None = None
        self._is_settled = True
        self._in_shared_memory: list[torch.Tensor] = []
        self._layouts: list[Any] = []  # how and where the module's tensors lay
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []  # the live tensor, its copy in shared memory
        self._always: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters that others refer to: copied each time
        self._num_copied_bytes = 0
        self._inline_versions: list[tuple[torch.Tensor, int]] = []
        self._versions: list[int] = []
        self._sent: dict[int, Form] = {}  # parameters of which the workers have their own
        self._forms: list[Any] = []  # what these are like, and where they lie
        self._buckets: list[_Known] = []  # in which they are sent
        self._flats: list[torch.Tensor] = []
        self._requires_grad: tuple[bool, ...] = ()

    def diff(self, root: nn.Module) -> Blueprint:
        """Look for what has changed; return a blueprint of the module as it is: the last one, if that still holds."""
        if not self._is_settled:  # a step has ended between `diff` and `commit`: what was to be sent may not have been
            self.forget()
        self._is_settled = False
        known = self._blueprint
        self._changes = self._watch.changes() if known is not None and known.root is root else None
        if known is None or self._changes != [] or not self._holds(known):
            with collector_paused:
                self._blueprint = known = Blueprint(root)
        return known

    def _holds(self, blueprint: Blueprint) -> bool:
        """Return whether a blueprint of modules in which nothing was rebound is still that of the module."""
        without_gradients = (*blueprint.buffers.values(), *blueprint.constants.values())
        return blueprint.follows_from_attributes and not any(t.requires_grad for t in without_gradients)

    def pack(self, blueprint: Blueprint, source: torch.device, shares_parameters: bool) -> Update:
        """Return what has to be sent to make workers have what `diff` has found, and take it as sent.

        Args:
            source: where the module is.
            shares_parameters: whether the workers have the parameters' own memory.
        """
        changes = self._changes if self._has(blueprint) else None
        if changes is None:
            return self._everything(blueprint, source, shares_parameters)
        flags = tuple(blueprint.need_gradients())
        changed_flags = None if flags == self._requires_grad else flags
        self._requires_grad = flags
        versions = _versions(self._copied)
        # What is written by way of `.data` leaves no trace. Where there is little, it is written anew each time.
        rewritten = versions != self._versions or 0 < self._num_copied_bytes <= _LITTLE_BYTES
        if rewritten:
            self._versions = versions
            _write(self._copied)
        if self._always:
            _write(self._always)
        sent = self._changed_parameters()
        return Update(changes=tuple(changes), requires_grad=changed_flags, rewritten=rewritten, sent=sent)

    def commit(self) -> None:
        """Take all as sent, and what containers hold now as known: the replicas have changed their own."""
        self._is_settled = True
        self._watch.commit()

    def numbers(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Return the numbers of some of the module's tensors."""
        return [self._number[id(parameter)] for parameter in parameters]

    def with_gradients(self) -> dict[int, torch.Tensor]:
        """Return the tensors that have a gradient, or may have one day, by number."""
        return {number: self.tensors[number] for number in (*range(len(self._requires_grad)), *self.outside)}

    def leave_shared_memory(self) -> None:
        """Give parameters and gradients memory of their own, in the child of a fork: they must not be the parent's."""
        with torch.inference_mode(False):
            for tensor in self._in_shared_memory:
                tensor.data = _copy_in_this_thread(tensor.detach())
            for tensor in self.tensors:
                if tensor.is_leaf and tensor.grad is not None and can_lie_in_memory(tensor.grad):
                    tensor.grad = _copy_in_this_thread(tensor.grad)
        self.forget()

    def _has(self, blueprint: Blueprint) -> bool:
        """Return whether the workers have this structure, and its parameters where they are now."""
        if _identities(blueprint) != self._ids:
            return False
        if _layouts(self._in_shared_memory, self._copied) != self._layouts:
            return False
        if any(tensor._version != version for tensor, version in self._inline_versions):
            return False
        if [_form(self.tensors[number]) for number in self._sent] != self._forms:
            return False
        return not any(is_movable([tensor]) for tensor, _ in self._always)

    def take_flats(self) -> list[torch.Tensor]:
        """Return the buckets that `pack` has said are sent."""
        flats, self._flats = self._flats, []
        return flats

    def _changed_parameters(self) -> tuple[int, ...]:
        """Return the numbers of the buckets of which a parameter has changed, and take them as sent.

        What is written by way of `.data` leaves no trace but the new numbers. So where it seems that nothing has been
        written, the numbers are looked at.
        """
        flats = {b: flat for b, known in enumerate(self._buckets) if (flat := known.changed(self.tensors)) is not None}
        self._flats = list(flats.values())
        return tuple(flats)

    @torch.inference_mode(False)  # what is made here is for steps of every kind
    def _everything(self, blueprint: Blueprint, source: torch.device, shares_parameters: bool) -> Update:
        """Return the whole module as what has to be sent."""
        self.forget()
        if blueprint.compiled or any(map(torch_private.is_scripted, blueprint.modules)):
            raise _cannot_be_sent(blueprint, TypeError("it is code for this very object"))
        self._begin_with(blueprint)
        pickled = self._pickled(blueprint)
        described = self._copied_into_a_segment(self._described(blueprint, source, shares_parameters))
        tensors = dumps(described, lambda tensor: None)
        for needs_gradient in (True, False):  # what an optimizer changes, apart from what is frozen
            forms = {n: form for n, form in self._sent.items() if self.tensors[n].requires_grad == needs_gradient}
            self._buckets += [_Known(bucket) for bucket in buckets_of(forms)]
        return Update(
            module=dumps((tensors, pickled, self.outside), lambda tensor: None),
            path=tuple(sys.path),
            buckets=tuple([known.bucket for known in self._buckets]),
            sent=self._changed_parameters(),
        )

    def _begin_with(self, blueprint: Blueprint) -> None:
        """Take the module as it is for what is known from now on."""
        self._is_settled = False
        self._blueprint = blueprint
        self._modules = blueprint.modules
        self._ids = _identities(blueprint)
        self._watch = ChangeTracker(blueprint.modules)
        parameters = blueprint.parameters.values()
        self.tensors = [*parameters, *blueprint.buffers.values(), *blueprint.constants.values()]
        self._number = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._requires_grad = tuple(blueprint.need_gradients())

    def _pickled(self, blueprint: Blueprint) -> bytes:
        """Return the modules without their tensors; further ones that turn up in them get numbers too."""

        def take(tensor: torch.Tensor) -> int:
            number = self._number.get(id(tensor))
            if number is None:
                number = self._number[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
                if tensor.requires_grad and tensor.is_leaf:
                    self.outside.append(number)
            return number

        try:
            # What switches the cache on is a global of functions that go by value: workers would have it on for ever.
            with torch_private.parametrizations_not_cached():
                # Children before their parents: pickle goes down only as far as what it does not know yet.
                parts = (blueprint.modules[::-1], _class_attributes(blueprint.modules))
                return dumps(parts, take, blueprint.modules)
        except Exception as error:
            self.forget()
            raise _cannot_be_sent(blueprint, error) from error

    def _described(self, blueprint: Blueprint, source: torch.device, shares_parameters: bool) -> list[Described]:
        """Return how the workers get each tensor; those that are copied have places in a segment that is yet to be."""
        with_gradients = self.with_gradients().values()
        ids = set(map(id, with_gradients))
        places = move_to_shared_memory([*with_gradients]) if shares_parameters else {}
        allocator, described = BumpAllocator(), []
        for number, tensor in enumerate(self.tensors):
            place, inline, later = None, None, None
            if not shares_parameters and id(tensor) in ids and can_lie_in_memory(tensor.detach()):
                later = self._sent[number] = Form.of(tensor.detach())
                self._forms.append(_form(tensor))
            elif id(tensor) in places:
                segment, place = places[id(tensor)]
                if segment not in self.segments:
                    self.segments.append(segment)
                self._in_shared_memory.append(tensor)
            elif can_lie_in_memory(tensor.detach()):
                place = allocator.place(tensor.detach())
            else:
                inline = tensor.detach()
                self._inline_versions.append((tensor, tensor._version))
            is_parameter = isinstance(tensor, nn.Parameter)
            described.append(
                Described(
                    place,
                    inline,
                    later,
                    None if _devices.same_device(tensor.device, source) else tensor.device,
                    type(tensor) if is_parameter and type(tensor.detach()) is torch.Tensor else torch.Tensor,
                    # One with a history that stands for a parameter (functional_call) is a leaf in the worker.
                    tensor.requires_grad and (tensor.is_leaf or id(tensor) in blueprint.parameters),
                    tensor.__dict__,
                    is_shared=id(tensor) in ids or id(tensor) in blueprint.buffers,
                )
            )
        self._num_copied_bytes = allocator.num_bytes
        return described

    def _copied_into_a_segment(self, described: Sequence[Described]) -> list[Described]:
        """Copy what has no segment yet into a new one; return how the workers get each tensor now."""
        segment = Segment.create(self._num_copied_bytes)
        self.segments.append(segment)
        ids = set(map(id, self.with_gradients().values()))
        placed = []
        for tensor, one in zip(self.tensors, described, strict=True):
            if one.place is not None and one.place.segment < 0:
                pairs = self._always if id(tensor) in ids else self._copied
                pairs.append((tensor, segment.view(one.place)))
                one = replace(one, place=one.place._replace(segment=segment.number))
            placed.append(one)
        self._versions = _versions(self._copied)
        self._layouts = _layouts(self._in_shared_memory, self._copied)
        _write([*self._copied, *self._always])
        return placed


@dataclass(slots=True)
class _Known:
    """What is known of a bucket of parameters as they were sent."""

    bucket: Bucket
    versions: list[tuple[int, int]] = field(default_factory=list)
    fingerprint: torch.Tensor | None = None

    def changed(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the parameters as they are now, flat; None if they are what they were the last time."""
        own = [tensors[number] for number, _ in self.bucket.items]
        versions = [(tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version) for tensor in own]
        flat = self.bucket.flat(tensors)
        now, before = fingerprint(flat), self.fingerprint
        if versions == self.versions and before is not None and torch.equal(now, before):
            return None
        self.versions, self.fingerprint = versions, now
        return flat


def _class_attributes(modules: Iterable[nn.Module]) -> list[tuple[type, dict[str, Any]]]:
    """Return what the users' classes hold themselves, as far as it is plain: imported anew, they hold other values."""
    classes = {cls for module in modules for cls in type(module).__mro__}
    return [
        (cls, {name: value for name, value in vars(cls).items() if not name.startswith("__") and _is_plain(value)})
        for cls in classes
        if cls.__module__.partition(".")[0] not in ("builtins", "torch", "manyhands")
    ]


def _is_plain(value: Any) -> bool:
    return is_inert(value) and not isinstance(value, types.BuiltinFunctionType | types.ModuleType)


def _identities(blueprint: Blueprint) -> list[int]:
    return [
        *map(id, blueprint.modules),
        *blueprint.parameters,
        *blueprint.buffers,
        *blueprint.constants,
        len(blueprint.parameters),
        len(blueprint.buffers),
    ]


def _versions(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    try:
        return [live._version for live, _ in pairs]
    except RuntimeError:  # inference tensors keep no count
        return [-1 if live.is_inference() else live._version for live, _ in pairs] + [next(_never_equal)]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.device


def _layouts(
    in_shared_memory: Sequence[torch.Tensor], copied: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[Any]:
    """Return what changes when the memory or the form of a tensor is replaced, as by `.data =`."""
    tensors = [*in_shared_memory, *(live for live, _ in copied)]
    # Quicker than a loop, and this is done in every forward. (A new dtype comes with new memory.)
    return [*map(torch.Tensor.data_ptr, tensors), *map(torch.Tensor.size, tensors), *map(torch.Tensor.stride, tensors)]


def _write(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        torch_private.copy_all_in_place([copy for _, copy in pairs], [live.detach() for live, _ in pairs])


def _cannot_be_sent(blueprint: Blueprint, error: Exception) -> Exception:
    """Return the error that names what cannot be pickled, and the way out."""
    names = {id(module): name for name, module in blueprint.root.named_modules()}
    culprit = "what torch.compile has made of it" if blueprint.compiled else f"{type(blueprint.root).__name__}"
    for module in () if blueprint.compiled else blueprint.modules:
        if torch_private.is_scripted(module):
            culprit = f"module {names.get(id(module), '') or 'itself'!r} ({type(module).__name__})"
            break
        for name, value in module.__dict__.items():
            if name == "_modules" or type(value) in INERT:
                continue
            try:
                others = dict(value) if isinstance(value, dict) else value
                dumps(others, lambda tensor: 0, blueprint.modules)
            except Exception:  # noqa: BLE001 - whatever its class raises: it is the one that is looked for
                path = ".".join(part for part in (names.get(id(module), ""), name) if part)
                culprit = f"attribute {path!r} ({type(value).__name__})"
                break
        else:
            continue
        break
    return TypeError(
        f'engine="processes" sends the module to other processes, and {culprit} cannot be pickled '
        f"({type(error).__name__}: {error}). Make it in forward, or leave it out of the module; or use "
        'engine="threads", which sends nothing.'
    )


def _copy_in_this_thread(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, made without the threads that torch copies large tensors with: no child of a fork has them."""
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), copy.untyped_storage().nbytes())
    return copy


def _after_fork() -> None:
    for mirror in list(_module_syncs):
        mirror.leave_shared_memory()


os.register_at_fork(after_in_child=_after_fork)
