"""Keeps the workers' modules equal to the live one: tracks what they have, and packs what has to be sent.

Before each forward the engine does three steps:

    1. `diff` looks for changes in the live module
    2. `pack` returns the `Update` that all workers get
    3. `commit` records what containers hold after the first replica's forward

Parameters: on the CPU they are in memory that all processes map, so what an optimizer writes is seen at once. On other
devices each worker has its own; those that changed are sent before a forward (reducers/collectives.py). Buffers and
other tensors are copied, again whenever they changed. Everything else is pickled, and sent when it changed: attributes
with plain values one by one, anything else with the whole module.

Seen: attributes that are rebound, in any module; the contents of plain containers in them; children, parameters,
buffers and hooks that are added or removed; train/eval and requires_grad; a parameter whose memory was replaced;
tensors that were written into. Not seen: changes inside objects of other classes, class attributes, closures, globals;
these need `refresh`. A container that the first replica changed during a forward is not sent: each process has its own.

Assumes that between two forwards only this process changes the module.
"""

import ctypes
import itertools
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from unisono.engines.processes.pickling import dumps
from unisono.engines.processes.shared_memory import (
    BumpAllocator,
    Segment,
    TensorSpec,
    is_movable,
    is_plain_strided,
    move_to_shared_memory,
)
from unisono.primitives.blueprint import Blueprint, collector_paused
from unisono.primitives.change_tracking import ChangeTracker
from unisono.primitives.references import INERT, is_inert
from unisono.runtime import devices as _devices
from unisono.runtime import torch_private
from unisono.runtime.buckets import Bucket, Form, buckets_of, fingerprint
from unisono.runtime.forks import in_forked_child

_ALWAYS_REWRITTEN_BYTES = 1 << 20
_never_equal = itertools.count()
_module_syncs: "weakref.WeakSet[ModuleSync]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class TensorRecipe:
    """How a worker makes its own copy of one of the module's tensors.

    Attributes:
        spec: where the tensor is in shared memory; None if it is `inline` or sent.
        inline: a tensor that shared memory cannot hold (a sparse one, a subclass with data of its own).
        sent_form: the form of a parameter that is sent after the module.
        device: the device of the worker's copy; None: the worker's device, as the live tensor is on the module's.
        kind: its class, if that is a subclass of Parameter; else Parameter or Tensor.
        attributes: the tensor's `__dict__`.
        may_share: whether a worker may use the shared memory at `spec` itself, if its device can, or has to copy it.
    """

    spec: TensorSpec | None
    inline: torch.Tensor | None
    sent_form: Form | None
    device: torch.device | None
    kind: type
    requires_grad: bool
    attributes: dict[str, Any]
    may_share: bool


@dataclass(frozen=True)
class Update:
    """What is sent to the workers before a forward.

    Attributes:
        module: the whole module, pickled; None if they have it.
        path: `sys.path`; only with a module.
        changes: (number of a module, attribute, its new value), one `GONE` for what was deleted.
        requires_grad: the flags of the module's parameters; None if unchanged.
        rewritten: whether copied tensors were written anew.
        buckets: those in which parameters are sent; None if unchanged.
        sent: the numbers of the buckets that are sent now.
    """

    module: bytes | None = None
    path: tuple[str, ...] = ()
    changes: tuple[tuple[int, str, Any], ...] = ()
    requires_grad: tuple[bool, ...] | None = None
    rewritten: bool = False
    buckets: tuple[Bucket, ...] | None = None
    sent: tuple[int, ...] = ()

    @property
    def has_content(self) -> bool:
        """Whether a worker that misses it would be out of sync."""
        return bool(
            self.module is not None or self.changes or self.requires_grad is not None or self.rewritten or self.sent
        )


class ModuleSync:
    """What the workers have of one live module.

    Attributes:
        segments: the memory that holds the module's tensors.
        tensors: the module's tensors, in the workers' order: first its parameters, as the blueprint has them.
    """

    def __init__(self) -> None:
        _module_syncs.add(self)
        self.invalidate()

    def invalidate(self) -> None:
        """Let everything be sent again."""
        self.segments: list[Segment] = []
        self.tensors: list[torch.Tensor] = []
        self._modules: list[nn.Module] = []  # kept, so that no other object gets their ids
        self._ids: list[int] = []
        self._number: dict[int, int] = {}  # of each tensor, by its id
        self._outside: list[int] = []  # the numbers of `tensors_from_outside`
        self._tracker = ChangeTracker([])
        self._blueprint: Blueprint | None = None
        self._changes: list[tuple[int, str, Any]] | None = None
        self._is_committed = True
        self._in_shared_memory: list[torch.Tensor] = []
        self._layouts: list[Any] = []  # the addresses and forms of the module's tensors
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []  # (live tensor, its copy in shared memory)
        self._aliased: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters with an alias: copied each time
        self._num_copied_bytes = 0
        self._inline_versions: list[tuple[torch.Tensor, int]] = []
        self._versions: list[int] = []
        self._sent: dict[int, Form] = {}  # parameters of which each worker has its own
        self._forms: list[Any] = []  # these parameters' forms and devices
        self._buckets: list[_SentBucket] = []  # their buckets
        self._flats: list[torch.Tensor] = []
        self._requires_grad: tuple[bool, ...] = ()

    def diff(self, root: nn.Module) -> Blueprint:
        """Look for changes; return a blueprint of the module: the last one, if it is still valid."""
        if not self._is_committed:  # the last step failed before `commit`: its update may not have been sent
            self.invalidate()
        self._is_committed = False
        known = self._blueprint
        self._changes = self._tracker.changes() if known is not None and known.root is root else None
        if known is None or self._changes != [] or not (known.is_reusable and known.tensors_are_current()):
            with collector_paused:
                self._blueprint = known = Blueprint(root)
                known.keep()
        return known

    def pack(self, blueprint: Blueprint, source: torch.device, shares_parameters: bool) -> Update:
        """Return what has to be sent so that the workers have what `diff` found, and take it as sent.

        Args:
            source: the module's device.
            shares_parameters: whether the workers map the parameters' own memory.
        """
        changes = self._changes if self._workers_have(blueprint) else None
        if changes is None:
            return self._full_update(blueprint, source, shares_parameters)
        flags = tuple(blueprint.need_gradients())
        changed_flags = None if flags == self._requires_grad else flags
        self._requires_grad = flags
        versions = _versions(self._copied)
        # A write through `.data` changes no version. Where there is little, all is rewritten each time.
        rewritten = versions != self._versions or 0 < self._num_copied_bytes <= _ALWAYS_REWRITTEN_BYTES
        if rewritten:
            self._versions = versions
            _write(self._copied)
        if self._aliased:
            _write(self._aliased)
        sent = self._changed_parameters()
        return Update(changes=tuple(changes), requires_grad=changed_flags, rewritten=rewritten, sent=sent)

    def commit(self) -> None:
        """Take everything as sent, and the containers' contents as known: the workers' replicas changed their own."""
        self._is_committed = True
        self._tracker.commit()

    def tensors_from_outside(self) -> list[torch.Tensor]:
        """Return the tensors that need gradients and are not the module's: globals that its functions use."""
        return [self.tensors[number] for number in self._outside]

    def leave_shared_memory(self) -> None:
        """Give parameters and gradients memory of their own, in the child of a fork: it must not share the parent's."""
        with torch.inference_mode(False):
            for tensor in self._in_shared_memory:
                tensor.data = _copy_in_this_thread(tensor.detach())
            for tensor in self.tensors:
                # Not those on an accelerator, which the child of a fork cannot use, and cannot read from the host.
                if tensor.is_leaf and tensor.grad is not None and _in_host_memory(tensor.grad):
                    tensor.grad = _copy_in_this_thread(tensor.grad)
        self.invalidate()

    def _workers_have(self, blueprint: Blueprint) -> bool:
        """Return whether the workers have this structure, with its parameters where they are now."""
        if _identities(blueprint) != self._ids:
            return False
        if _layouts(self._in_shared_memory, self._copied) != self._layouts:
            return False
        if any(tensor._version != version for tensor, version in self._inline_versions):
            return False
        if [_form(self.tensors[number]) for number in self._sent] != self._forms:
            return False
        return not any(is_movable([tensor]) for tensor, _ in self._aliased)

    def take_flats(self) -> list[torch.Tensor]:
        """Return the flat buckets that `pack` announced."""
        flats, self._flats = self._flats, []
        return flats

    def _changed_parameters(self) -> tuple[int, ...]:
        """Return the numbers of the buckets with a changed parameter, and take them as sent.

        A write through `.data` changes only the values. So where versions are unchanged, the values are compared.
        """
        flats = {b: flat for b, sent in enumerate(self._buckets) if (flat := sent.changed(self.tensors)) is not None}
        self._flats = list(flats.values())
        return tuple(flats)

    @torch.inference_mode(False)  # what is made here also serves later steps outside inference mode
    def _full_update(self, blueprint: Blueprint, source: torch.device, shares_parameters: bool) -> Update:
        """Return an update with the whole module."""
        self.invalidate()
        if blueprint.compiled or any(map(torch_private.is_scripted, blueprint.modules)):
            raise _not_picklable_error(blueprint, TypeError("it is code for this very object"))
        self._track(blueprint)
        pickled = self._pickled(blueprint)
        recipes = self._copied_into_segment(self._recipes(blueprint, source, shares_parameters))
        for needs_gradient in (True, False):  # separate buckets for what an optimizer changes and what is frozen
            forms = {n: form for n, form in self._sent.items() if self.tensors[n].requires_grad == needs_gradient}
            self._buckets += [_SentBucket(bucket) for bucket in buckets_of(forms)]
        return Update(
            module=dumps((recipes, pickled, len(self._requires_grad), self._outside)),
            path=tuple(sys.path),
            buckets=tuple([sent.bucket for sent in self._buckets]),
            sent=self._changed_parameters(),
        )

    def _track(self, blueprint: Blueprint) -> None:
        """Track the module as it is now."""
        self._is_committed = False
        self._blueprint = blueprint
        self._modules = blueprint.modules
        self._ids = _identities(blueprint)
        self._tracker = ChangeTracker(blueprint.modules)
        parameters = blueprint.parameters.values()
        self.tensors = [*parameters, *blueprint.buffers.values(), *blueprint.constants.values()]
        self._number = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._requires_grad = tuple(blueprint.need_gradients())

    def _pickled(self, blueprint: Blueprint) -> bytes:
        """Return the modules pickled without their tensors; tensors found only now get numbers too."""

        def to_number(tensor: torch.Tensor) -> int:
            number = self._number.get(id(tensor))
            if number is None:
                number = self._number[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
                if tensor.requires_grad and tensor.is_leaf:
                    self._outside.append(number)
            return number

        try:
            # The cache's switch is a global of functions that are pickled by value: in workers it would stay on.
            with torch_private.parametrizations_not_cached():
                # Children before their parents, which limits pickle's recursion.
                parts = (blueprint.modules[::-1], _class_attributes(blueprint.modules))
                return dumps(parts, to_number, blueprint.modules)
        except Exception as error:
            self.invalidate()
            raise _not_picklable_error(blueprint, error) from error

    def _with_gradients(self) -> list[torch.Tensor]:
        """Return the tensors that have a gradient, or may get one later."""
        return [*self.tensors[: len(self._requires_grad)], *self.tensors_from_outside()]

    def _recipes(self, blueprint: Blueprint, source: torch.device, shares_parameters: bool) -> list[TensorRecipe]:
        """Return each tensor's recipe; tensors that are copied have specs in a segment that does not exist yet."""
        with_gradients = self._with_gradients()
        ids = set(map(id, with_gradients))
        specs = move_to_shared_memory(with_gradients) if shares_parameters else {}
        allocator, recipes = BumpAllocator(), []
        for number, tensor in enumerate(self.tensors):
            spec, inline, sent_form = None, None, None
            if not shares_parameters and id(tensor) in ids and is_plain_strided(tensor.detach()):
                sent_form = self._sent[number] = Form.of(tensor.detach())
                self._forms.append(_form(tensor))
            elif id(tensor) in specs:
                segment, spec = specs[id(tensor)]
                if segment not in self.segments:
                    self.segments.append(segment)
                self._in_shared_memory.append(tensor)
            elif is_plain_strided(tensor.detach()):
                spec = allocator.allocate(tensor.detach())
            else:
                inline = tensor.detach()
                self._inline_versions.append((tensor, tensor._version))
            is_parameter = isinstance(tensor, nn.Parameter)
            recipes.append(
                TensorRecipe(
                    spec,
                    inline,
                    sent_form,
                    None if _devices.same_device(tensor.device, source) else tensor.device,
                    type(tensor) if is_parameter and type(tensor.detach()) is torch.Tensor else torch.Tensor,
                    # A tensor with a history in place of a parameter (functional_call) is a leaf in the worker.
                    tensor.requires_grad and (tensor.is_leaf or id(tensor) in blueprint.parameters),
                    tensor.__dict__,
                    may_share=id(tensor) in ids or id(tensor) in blueprint.buffers,
                )
            )
        self._num_copied_bytes = allocator.num_bytes
        return recipes

    def _copied_into_segment(self, recipes: Sequence[TensorRecipe]) -> list[TensorRecipe]:
        """Copy the tensors that have no segment yet into a new one; return the recipes with it."""
        segment = Segment.create(self._num_copied_bytes)
        self.segments.append(segment)
        ids = set(map(id, self._with_gradients()))
        placed = []
        for tensor, recipe in zip(self.tensors, recipes, strict=True):
            if recipe.spec is not None and recipe.spec.segment < 0:
                pairs = self._aliased if id(tensor) in ids else self._copied
                pairs.append((tensor, segment.view(recipe.spec)))
                recipe = replace(recipe, spec=recipe.spec._replace(segment=segment.number))
            placed.append(recipe)
        self._versions = _versions(self._copied)
        self._layouts = _layouts(self._in_shared_memory, self._copied)
        _write([*self._copied, *self._aliased])
        return placed


@dataclass(slots=True)
class _SentBucket:
    """A bucket of parameters as it was last sent.

    Attributes:
        fingerprint: None if the last call found other versions than the one before. So training, where each step has
            new versions, computes none; and the first call after it sends the bucket once more.
    """

    bucket: Bucket
    versions: list[tuple[int, int]] = field(default_factory=list)
    fingerprint: torch.Tensor | None = None

    def changed(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the parameters, flat, as they are now; None if unchanged since the last call."""
        own = [tensors[number] for number, _ in self.bucket.items]
        versions = [(tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version) for tensor in own]
        flat = self.bucket.flat(tensors)
        if versions != self.versions:
            self.versions, self.fingerprint = versions, None
            return flat
        now, before = fingerprint(flat), self.fingerprint
        if before is not None and torch.equal(now, before):
            return None
        self.fingerprint = now
        return flat


def _class_attributes(modules: Iterable[nn.Module]) -> list[tuple[type, dict[str, Any]]]:
    """Return the plain attributes of the users' classes: a worker that imports the classes has other values."""
    classes = {cls for module in modules for cls in type(module).__mro__}
    return [
        (cls, {name: value for name, value in vars(cls).items() if not name.startswith("__") and _is_plain(value)})
        for cls in classes
        if cls.__module__.partition(".")[0] not in ("builtins", "torch", "unisono")
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
    except RuntimeError:  # inference tensors have no version
        return [-1 if live.is_inference() else live._version for live, _ in pairs] + [next(_never_equal)]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.device


def _layouts(
    in_shared_memory: Sequence[torch.Tensor], copied: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[Any]:
    """Return what changes when a tensor's memory or form is replaced, as by `.data =`."""
    tensors = [*in_shared_memory, *[live for live, _ in copied]]
    # Faster than a loop, and this runs in every forward. (A new dtype comes with new memory.)
    return [*map(torch.Tensor.data_ptr, tensors), *map(torch.Tensor.size, tensors), *map(torch.Tensor.stride, tensors)]


def _write(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.inference_mode(False), torch.set_grad_enabled(False):
        torch_private.copy_all_in_place([copy for _, copy in pairs], [live for live, _ in pairs])


def _not_picklable_error(blueprint: Blueprint, error: Exception) -> Exception:
    """Return the error that names what cannot be pickled, and the remedy."""
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
                dumps(dict(value) if isinstance(value, dict) else value, lambda tensor: 0, blueprint.modules)
            except Exception:  # noqa: BLE001 - whatever its class raises: this attribute is the culprit
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


def _in_host_memory(tensor: torch.Tensor) -> bool:
    return is_plain_strided(tensor) and _devices.is_cpu(tensor.device)


def _copy_in_this_thread(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, made without the threads with which torch copies large tensors: the child of a fork lacks them."""
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), copy.untyped_storage().nbytes())
    return copy


def _after_fork() -> None:
    for module_sync in list(_module_syncs):
        module_sync.leave_shared_memory()


in_forked_child(_after_fork)
