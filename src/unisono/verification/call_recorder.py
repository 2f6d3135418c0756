"""The inputs and outputs of every submodule, on one device and in the replicas, and the first call that differs.

A `CallRecorder` is a set of forward hooks on a module. Replicas have them too, and each call is recorded with
the replica in whose thread it ran. The recorder copies each tensor to the host when it sees it, so that later in-place
operations change nothing; a tensor that several modules pass on is copied once. So a recorded step needs about as much
host memory as its activations need on the device. The hooks return nothing, so they do not change the step. Submodules
inside a compiled or scripted module are not recorded, because hooks would change the code that runs there; nor are
those inside another wrapper.
"""

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from unisono.data_parallel import DataParallel
from unisono.runtime.contexts import contextmanager
from unisono.runtime.thread_pool import replica_path
from unisono.runtime.torch_private import compiler, modes
from unisono.verification.compare import Tolerance, plain, tensors_in

Path: TypeAlias = tuple[int, ...]
Recorded: TypeAlias = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class RecordedCall:
    """One call of one submodule: its inputs and outputs, as copies on the host."""

    name: str  # of the submodule, dotted; "" is the root
    path: Path  # the replica, see `thread_pool.replica_path`
    inputs: Recorded
    outputs: Recorded
    training: bool  # whether it was in training mode
    drew: bool  # whether random numbers were drawn between its start and its end


@dataclass
class CallRecorder:
    """Records every call of every submodule while it is attached."""

    watch: Callable[[], Callable[[], Any]]  # returns what tells whether random numbers have been drawn since
    calls: list[RecordedCall] = field(default_factory=list)  # in the order in which they ended
    _running: dict[Path, list[tuple[str, Recorded, Callable[[], Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _copies: dict[tuple[Path, int], tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = field(default_factory=dict)
    _num_modules: int = 0  # that have hooks
    _is_attached: bool = False  # replicas keep the hooks, and may run forward again in backward

    # Several replicas call at once. Each entry of the tables above belongs to one path, so to one thread.

    @contextmanager
    def attached(self, root: nn.Module) -> Iterator[None]:
        """Record the calls of `root` and of all its submodules while the context lasts."""
        handles = []
        self._num_modules, self._is_attached = 0, True
        for name, module in _recordable(root, "", set()):
            self._num_modules += 1
            before, after = functools.partial(self._before, name), functools.partial(self._after, name)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            yield
        finally:
            self._is_attached = False
            for handle in handles:
                handle.remove()
            self._copies.clear()

    def has_seen_calls(self) -> bool:
        """Return whether there were calls, or could be none to see: all is compiled or scripted."""
        return bool(self.calls) or not self._num_modules

    def grouped(self) -> dict[tuple[str, int], list[RecordedCall]]:
        """Return the calls by name and number, in the order of execution; for each, the replicas in row order."""
        grouped: dict[tuple[str, int], list[RecordedCall]] = defaultdict(list)
        num_calls = Counter[tuple[Path, str]]()
        for call in self.calls:
            grouped[call.name, num_calls[call.path, call.name]].append(call)
            num_calls[call.path, call.name] += 1
        for replicas in grouped.values():
            replicas.sort(key=lambda call: call.path)
        return grouped

    def root_calls(self) -> list[RecordedCall]:
        """Return the root's first call in each replica, in row order."""
        return self.grouped().get(("", 0), [])

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_attached or modes.has_transforms():  # tensors of vmap or grad have no values outside of it
            return
        path = replica_path()
        self._running[path].append((name, self._copied((args, kwargs), path), self.watch()))

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._is_attached or modes.has_transforms():
            return
        path = replica_path()
        running, inputs, has_drawn = self._running[path].pop()
        while running != name:  # calls that an exception ended
            running, inputs, has_drawn = self._running[path].pop()
        outputs = self._copied(output, path)
        self.calls.append(RecordedCall(name, path, inputs, outputs, module.training, bool(has_drawn())))

    def _copied(self, value: Any, path: Path) -> Recorded:
        return [(where, self._copy(tensor, path)) for where, tensor in tensors_in(value)]

    def _copy(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        if tensor.is_inference():  # nothing tells whether it has been written into since
            return plain(tensor).to("cpu", copy=True)
        known = self._copies.get((path, id(tensor)))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        copied = plain(tensor).to("cpu", copy=True)
        self._copies[path, id(tensor)] = (weakref.ref(tensor), tensor._version, copied)
        return copied


def _recordable(module: nn.Module, name: str, known: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in known or isinstance(module, torch.jit.ScriptModule) or compiler.has_compiled_call(module):
        return
    known.add(module)
    yield name, module
    for child_name, child in () if isinstance(module, DataParallel) else module.named_children():
        yield from _recordable(child, f"{name}.{child_name}" if name else child_name, known)


def match(
    one: torch.Tensor, parts: Sequence[torch.Tensor], rows: Sequence[int], tolerance: Tolerance
) -> tuple[bool, int | None] | None:
    """Join the replicas' parts along the axis that fits, and compare.

    If no axis fits and each part has the shape of the tensor on one device, it may be independent of the rows (then
    all parts are equal), or a sum or a mean over rows. A mean cannot be compared if the replicas' rows are not known.

    Returns:
        Whether both have the same tensor, and the axis along which the parts fit, if one does; None: not comparable.
    """
    found: tuple[bool, int | None] | None = None
    for axis in range(one.dim()):
        joined = _joined(parts, axis)
        if joined is not None and joined.shape == one.shape and (found is None or not found[0]):
            found = tolerance.same(one, joined), axis
    if found is None and all(part.shape == one.shape for part in parts):
        is_same = any(tolerance.same(one, each) for each in _without_rows(one, parts, rows, tolerance))
        return (is_same, None) if is_same or len(rows) == len(parts) else None
    return found


def _joined(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor | None:
    forms = {(part.dim(), *part.shape[:axis], *part.shape[axis + 1 :], part.dtype) for part in parts}
    return torch.cat(list(parts), axis) if len(forms) == 1 else None


def _without_rows(
    one: torch.Tensor, many: Sequence[torch.Tensor], rows: Sequence[int], tolerance: Tolerance
) -> Iterator[torch.Tensor]:
    if all(tolerance.same(many[0], part) for part in many):
        yield many[0]
    stacked = torch.stack(list(many))
    yield stacked.sum(0).to(one.dtype)
    if one.is_floating_point() and len(rows) == len(many):
        weights = torch.tensor(rows, dtype=torch.float64, device="cpu") / max(1, sum(rows))
        yield torch.tensordot(weights, stacked.double(), 1).to(one.dtype)


def first_divergence(
    one: CallRecorder, many: CallRecorder, rows: Sequence[int], tolerance: Tolerance
) -> tuple[RecordedCall, bool] | None:
    """Return the first call on one device whose output differs from the replicas', and whether its inputs do not.

    Inputs that cannot be compared do not differ; None if no output is known to differ.
    """
    calls_of_one, calls_of_many = one.grouped(), many.grouped()
    counts, counts_of_many = (Counter(name for name, _ in calls) for calls in (calls_of_one, calls_of_many))
    for key, (call, *_) in calls_of_one.items():
        # One that is called once for each row has other rows in the calls of one number.
        others = calls_of_many.get(key, []) if counts[call.name] == counts_of_many[call.name] else []
        if _same(call.outputs, [other.outputs for other in others], rows, tolerance) is False:
            inputs_same = _same(call.inputs, [other.inputs for other in others], rows, tolerance) is not False
            return call, inputs_same
    return None


def _same(one: Recorded, many: Sequence[Recorded], rows: Sequence[int], tolerance: Tolerance) -> bool | None:
    """Return whether all tensors that can be compared are the same; None if none can."""
    if not many or len({tuple(path for path, _ in part) for part in (one, *many)}) > 1:
        return None
    matches = [match(tensor, [part[i][1] for part in many], rows, tolerance) for i, (_, tensor) in enumerate(one)]
    comparable = [found[0] for found in matches if found is not None]
    return all(comparable) if comparable else None
