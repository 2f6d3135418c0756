"""Why replicas give other numbers than one device: from the records of two steps to findings.

The first submodule whose output differs shows most. If its inputs are still the same, it is the cause itself; if they
differ already, the code between the submodules is. The kind of cause follows from the module's class, and from whether
the step gives the same when it is repeated. An output that is joined on the wrong axis shows in its shape, whatever
else differs.
"""

import numbers
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.data_parallel import DataParallel
from unisono.primitives import pytree
from unisono.verification.call_recorder import RecordedCall, first_divergence, match
from unisono.verification.compare import Tolerance, plain, values_in
from unisono.verification.report import Cause, Finding, Kind, Row
from unisono.verification.step import RecordedStep

LOST = "values that a replica assigns to its attributes are lost when forward ends"

# An option that was given with this value explains the difference.
_SEQUENCES = (list, tuple, deque, dict)
_ASKS_FOR = {Cause.PER_SHARD_BATCH_NORM: ("sync_batch_norm", False), Cause.ONE_NUMBER_A_SHARD: ("scalars", "stack")}
_UNCERTAIN = (Cause.ROWS_INTERACT, Cause.UNKNOWN)  # repeating the step shows more about these
_PERHAPS_SPLIT_WRONGLY = (
    *_UNCERTAIN,
    Cause.JOINED_ON_ANOTHER_AXIS,
    Cause.VALUE_OF_A_SHARD,
)  # another way to split the inputs may
_DRAWN = (
    "random numbers come from {generators}, in a way that verify cannot switch off. Use torch's functions "
    "without generator=; or draw outside the model, and pass the result as an input"
)
_PER_SHARD = "batch norm used each replica's own rows (samples). Fix: {fix}. Accept, as in torch: sync_batch_norm=False"
_ROWS_INTERACT = (
    "the result for one row depends on other rows of the replica{where}. Compute this from the gathered "
    "output, outside the model. Is the batch dimension not {dim}? Pass dim="
)
SPLIT_INPUT = (
    "{inputs}: split by rows, but has no batch dimension. Fix: {fix}. Every replica then has all of it, and "
    "the numbers are those of one device"
)
SPLIT_LIST = (
    "{input} has one entry for each row, but a {kind} is not split by entry: its tensors are split one by "
    "one, everything else goes to every replica. Fix: unisono.SampleList({entries}); the numbers are then "
    "those of one device"
)
_WHOLE = (
    ". Or {paths}, which every replica gets whole, has one entry for each row: then give it as a tensor or a "
    "unisono.SampleList, or register how it is split (unisono.register_batch_type)"
)
_LOST_AXIS = (
    "output{path} has shape {one} on one device, but {shard} in a replica with one row: the batch dimension "
    "is lost, as squeeze() removes every dimension of size 1. Name the dimension, such as squeeze(-1)"
)
_ROWS_COMPARED = (
    "{output} compares rows with each other, but each replica has only its own rows. Return one result for "
    "each row, and compare them in the gathered output, outside the model"
)
_NO_ROWS = (
    "{output} has no batch dimension, and each replica's value is joined along dimension {axis}. If it is a "
    'sum or mean over rows, return a 0-dim tensor, and pass scalars="sum" or "mean"'
)
_LIST_OF_ROWS = (
    "{output} has {one} entries on one device, {many} on several: the first entries of all replicas are "
    "joined, then the second ones, and so on. If each entry belongs to a row, return "
    "unisono.SampleList(entries)"
)
_VALUE = (
    "{output} is {values}: each replica computed it from its own rows. Return the tensor it is computed "
    "from, and compute it from the gathered output, outside the model"
)
_ONE_NUMBER = (
    "each replica returned one number{at} for its own rows ({rows}), and the mean of these is not the batch's. {remedy}"
)
_NO_SCALARS = (
    "It is neither a mean over rows nor a sum. Fix: scalars='mean:name', where name is the output with the "
    "weights, such as the number of tokens; or return one number for each row, and reduce outside the model"
)
_FIRST_BUFFERS = (
    "forward updates {name}. The first replica's updates are kept, computed from its own rows only. Nothing "
    "else differs"
)
_BUFFER_OF_ROWS = (
    ". It has one entry for each row, and those of the other replicas are missing: return it from forward, "
    "and keep the gathered one"
)
_PARAMETERS = (
    "forward writes into {names}, once in each replica; a value written into a replica's own memory, or "
    "assigned to `.data`, is lost. Make it a buffer (the first replica's updates are kept), or update it "
    "outside forward. To initialise from the first batch, call the plain module once before you wrap it"
)
_MADE = (
    "forward creates {names}: each replica creates its own in each step, it is lost when forward ends, and "
    "no optimizer has it. Create it in __init__, or by one forward of the plain module before wrapping"
)
_ATTRIBUTES = (
    f"forward updates {{names}}: {LOST}. A tensor, list or object changed in place gets the changes of all "
    "replicas, in the order in which they finish. Update it outside forward, from the gathered output; or "
    "make it a buffer (the first replica's updates are kept)"
)
_NONDETERMINISTIC = (
    "two runs on one device, from the same state, differ too{where}: an operation is not deterministic "
    "(torch.use_deterministic_algorithms(True) names many), or draws random numbers that no seed controls"
)


@dataclass(frozen=True)
class Comparison:
    """The two steps of one mode, on one device and on several."""

    mode: str  # "training" or "eval"
    wrapped: DataParallel
    given: Mapping[str, Any]  # the keyword options of the caller
    one: RecordedStep
    many: RecordedStep
    tolerance: Tolerance
    has_step: bool = False  # whether the outputs are those of a function of the caller's, not the model's

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        """Return the findings about the comparisons of the steps' results: at least one, if one differs.

        Without one there may be findings about submodules. Raise why outputs could not be gathered, if no finding
        explains it.
        """
        findings = list(self._joins())
        if self.many.error is not None and not findings:
            raise self.many.error
        names = [row.name for row in rows if row.differs and row.kind is Kind.PARAMETER]
        live = dict(self.wrapped.module.named_parameters(remove_duplicate=False))
        if written := [name for name in names if name in live]:
            text = _PARAMETERS.format(names=", ".join(written))
            findings.append(self._finding(written[0].rpartition(".")[0], Cause.PARAMETERS_OF_REPLICAS, text))
        if made := [name for name in names if name not in live]:
            text = _MADE.format(names=", ".join(made))
            findings.append(self._finding(self._that_has(made[0]), Cause.ATTRIBUTES_OF_REPLICAS, text))
        divergence = first_divergence(self.one.recorder, self.many.recorder, self.many.rows, self.tolerance)
        if divergence is not None:
            findings += self._submodules(*divergence)
        if not any(finding.cause is Cause.PER_SHARD_BATCH_NORM for finding in findings):
            findings += self._batch_norms()
        differing = [row for row in rows if row.differs and row.kind is not Kind.ATTRIBUTE]
        of_values = [*self._values(differing)]
        findings += [each for each in of_values if each.cause is Cause.LIST_OF_ROWS] or (
            [] if findings else of_values[:1]
        )
        if differing and not findings:
            findings.append(self._other(differing))
        if names := [row.name for row in rows if row.differs and row.kind is Kind.ATTRIBUTE]:
            text = _ATTRIBUTES.format(names=", ".join(names))
            findings.append(self._finding(self._that_has(names[0]), Cause.ATTRIBUTES_OF_REPLICAS, text))
        return findings

    def draws(self) -> Finding | None:
        """Return the finding about draws that could not be switched off; None if there were none."""
        generators = dict.fromkeys([*self.one.drawn_from, *self.many.drawn_from])
        if not generators:
            return None
        where = next((call.name for call in self.one.recorder.calls if call.drew), "")  # inner calls end first
        return self._finding(where, Cause.RANDOM_NUMBERS, _DRAWN.format(generators=" and ".join(generators)))

    def _finding(self, name: str, cause: Cause, text: str, *fix: str) -> Finding:
        option, value = _ASKS_FOR.get(cause, ("", None))
        explained = option in self.given and self.given[option] == value
        if cause is Cause.PER_SHARD_BATCH_NORM and self.wrapped.sync_batch_norm is False:
            explained = True
        return Finding(self.mode, name, type(self._submodule(name)).__name__, cause, text, explained, fix)

    def _submodule(self, name: str) -> nn.Module:
        modules: dict[str, nn.Module] = dict(self.wrapped.module.named_modules(remove_duplicate=False))
        return modules[name]

    def _that_has(self, name: str) -> str:
        """Return the name of the innermost module in which an attribute is, of those that the live module has."""
        known = dict(self.wrapped.module.named_modules(remove_duplicate=False))
        name = name.rpartition(".")[0]
        while name not in known:
            name = name.rpartition(".")[0]
        return name

    def _joins(self) -> Iterator[Finding]:
        """Yield findings about outputs whose shape is not that on one device, or that could not be joined."""
        outputs, joined, calls = self.one.outputs, self.many.outputs, self.many.recorder.root_calls()
        if self.has_step or not calls or any(len(call.outputs) != len(outputs) for call in calls):
            return
        _, spec = pytree.flatten(self.one.output)
        paths = [*spec.paths()]
        joined_on = dict(zip(paths, self.wrapped._options.rules().axes(spec)[0], strict=True))
        if lost := self._lost_axis():
            yield lost
            return
        dims: dict[str, int | None] = {}  # where the rows are
        wrong: list[str] = []
        for i, (path, tensor) in enumerate(outputs.items()):
            if self.many.error is None and (path not in joined or joined[path].shape == tensor.shape):
                continue
            axis, output = joined_on.get(path), f"output{path}" if path else "the output"
            axis = axis + tensor.dim() if axis is not None and axis < 0 else axis
            parts = [call.outputs[i][1] for call in calls]
            found = match(plain(tensor).cpu(), parts, self.many.rows, self.tolerance)
            fits = None if found is None else found[1]
            if fits not in (None, axis):
                dims[path] = fits
                wrong.append(f"{output} has its batch on dimension {fits}, but is joined along dimension {axis}")
            elif tensor.dim() and axis is not None and all(part.shape == tensor.shape for part in parts):
                if not all(self.tolerance.same(tensor, part) for part in parts):
                    yield self._finding("", Cause.JOINED_ON_ANOTHER_AXIS, _NO_ROWS.format(output=output, axis=axis))
                    continue
                dims[path] = None
                wrong.append(
                    f"{output} has no batch dimension and is the same in all replicas, but is joined along "
                    f"dimension {axis}"
                )
            elif self._num_axes_with_rows(tensor, parts) > 1:
                yield self._finding("", Cause.ROWS_INTERACT, _ROWS_COMPARED.format(output=output))
        if wrong:
            out_dims = pytree.unflatten(spec, [dims.get(path, self.wrapped.dim) for path in paths])
            fix = f"out_dims={out_dims!r}"
            yield self._finding("", Cause.JOINED_ON_ANOTHER_AXIS, f"{wrong[0]}. Fix: {fix}", fix)

    def _lost_axis(self) -> Finding | None:
        """Return the finding about the first call whose output has fewer axes in a replica with one row."""
        of_many, rows = self.many.recorder.grouped(), self.many.rows
        for key, (call, *_) in self.one.recorder.grouped().items() if 1 in rows else ():
            parts = [part.outputs for part in of_many.get(key, ())]
            if len(parts) != len(rows) or any(len(part) != len(call.outputs) for part in parts):
                continue
            for i, (path, tensor) in enumerate(call.outputs):
                shapes = [part[i][1].shape for part in parts]
                if all((len(shape) < tensor.dim()) <= (size == 1) for shape, size in zip(shapes, rows, strict=True)):
                    fewest = min(shapes, key=len)
                    if len(fewest) < tensor.dim():
                        text = _LOST_AXIS.format(path=path, one=tuple(tensor.shape), shard=tuple(fewest))
                        return self._finding(call.name, Cause.LOST_AXIS, text)
        return None

    def _num_axes_with_rows(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> int:
        """Return how many axes are as long as the batch on one device, and as long as its shard in each replica."""
        sizes = list(self.many.rows)
        return sum(
            tensor.size(axis) == sum(sizes) and [p.size(axis) for p in parts if p.dim() > axis] == sizes
            for axis in range(tensor.dim())
        )

    def _submodules(self, first: RecordedCall, inputs_same: bool) -> Iterator[Finding]:
        """Yield the finding about the first call that differs."""
        name = first.name
        if inputs_same and all(tensor.dim() == 0 for _, tensor in first.outputs):
            yield self._numbers(name, "")
        elif inputs_same and self._takes_statistics(first) and self.wrapped.sync_batch_norm:
            text = "batch norm, although it used the statistics of the whole batch: please report this"
            yield self._finding(name, Cause.UNKNOWN, text)
        elif inputs_same and self._takes_statistics(first):
            yield self._per_shard(name)
        else:
            where = "" if inputs_same else f" (in the code before {name or 'the model'})"
            name = name if inputs_same else self._enclosing(name)
            text = _ROWS_INTERACT.format(where=where, dim=self.wrapped.dim)
            yield self._finding(name, Cause.ROWS_INTERACT, text)

    def _batch_norms(self) -> Iterator[Finding]:
        """Yield the finding about the first batch norm that uses a replica's rows, whether its numbers show it or not.

        One with a forward of its own may do something else, and one whose inputs are not split has all rows: their
        numbers decide.
        """
        of_many = self.many.recorder.grouped()
        for key, (call, *_) in self.one.recorder.grouped().items() if not self.wrapped.sync_batch_norm else ():
            parts = of_many.get(key, [])
            shapes = [[tensor.shape for _, tensor in each.inputs] for each in (call, *parts)]
            is_split = len(parts) > 1 and shapes[0] not in shapes[1:]
            if is_split and self._takes_statistics(call) and _is_torchs(self._submodule(call.name)):
                yield self._per_shard(call.name)
                return

    def _per_shard(self, name: str) -> Finding:
        fix = "sync_batch_norm=True"
        return self._finding(name, Cause.PER_SHARD_BATCH_NORM, _PER_SHARD.format(fix=fix), fix)

    def _takes_statistics(self, call: RecordedCall) -> bool:
        """Return whether a call is one of a batch norm that normalises with the statistics of its input."""
        module = self._submodule(call.name)
        return isinstance(module, _BatchNorm) and (call.training or module.running_mean is None)

    def _enclosing(self, name: str) -> str:
        """Return the innermost submodule that contains `name` and was called."""
        called = {"", *(call.name for call in self.one.recorder.calls)}
        name = name.rpartition(".")[0]
        while name not in called:
            name = name.rpartition(".")[0]
        return name

    def _other(self, differing: Sequence[Row]) -> Finding:
        """Return the finding if no recorded call differs, not even that of the model itself."""
        outputs = self.one.outputs
        for row in differing:
            if row.kind is Kind.OUTPUT and row.name in outputs and outputs[row.name].dim() == 0:
                return self._numbers("", self._scalars_for(self.many.outputs.get(row.name), outputs[row.name]))
        if all(row.kind is Kind.BUFFER for row in differing):
            name = differing[0].name
            buffer, rows = self.one.buffers.get(name), sum(self.many.rows)
            has_rows = buffer is not None and buffer.dim() and buffer.size(0) == rows and len(self.many.rows) > 1
            text = _FIRST_BUFFERS.format(name=name) + (_BUFFER_OF_ROWS if has_rows else "")
            return self._finding(name.rpartition(".")[0], Cause.FIRST_REPLICAS_BUFFERS, text)
        if not any(row.kind in (Kind.OUTPUT, Kind.LOSS) for row in differing):
            return self._finding("", Cause.UNKNOWN, "outputs and loss are the same, but the backward differs")
        return self._finding("", Cause.UNKNOWN, "no submodule differs, of those that could be compared")

    def _numbers(self, name: str, scalars: str, at: str = "") -> Finding:
        rows = " + ".join(map(str, self.many.rows)) or "their own"
        fix = f"scalars={scalars!r}" if scalars else ""
        text = _ONE_NUMBER.format(at=at, rows=rows, remedy=f"Fix: {fix}" if fix else _NO_SCALARS)
        return self._finding(name, Cause.ONE_NUMBER_A_SHARD, text, *filter(None, [fix]))

    def _values(self, differing: Sequence[Row]) -> Iterator[Finding]:
        """Yield findings about values in the output that are no tensors, and differ."""
        differ = {row.name: row.note for row in differing if row.kind is Kind.OUTPUT}
        for path, one, many in values_in(self.one.output, self.many.output) if self.many.error is None else ():
            if path not in differ:
                continue
            output = f"output{path}" if path else "the output"
            if type(one) is type(many) and isinstance(one, _SEQUENCES) and len(one) == sum(self.many.rows) > len(many):
                text = _LIST_OF_ROWS.format(output=output, one=len(one), many=len(many))
                yield self._finding("", Cause.LIST_OF_ROWS, text)
            elif isinstance(one, numbers.Real) and isinstance(many, list):
                as_tensor = torch.tensor(float(one), dtype=torch.float64, device="cpu")
                of_many = torch.tensor([*map(float, many)], dtype=torch.float64, device="cpu")
                scalars = self._scalars_for(of_many, as_tensor)
                yield self._numbers("", scalars, f", {output}," if path else "")
            else:
                yield self._finding("", Cause.VALUE_OF_A_SHARD, _VALUE.format(output=output, values=differ[path]))

    def _scalars_for(self, numbers: torch.Tensor | None, one: torch.Tensor) -> str:
        """Return the rule of `scalars` that makes the number of one device of the replicas'; "" if none does."""
        if numbers is None or numbers.shape != (len(self.many.rows),):
            return ""
        numbers = plain(numbers).cpu().double()
        weights = torch.tensor(self.many.rows, dtype=torch.float64, device="cpu") / sum(self.many.rows)
        for scalars, joined in (("mean", numbers @ weights), ("sum", numbers.sum())):
            if self.tolerance.same(one, joined.to(one.dtype)):
                return scalars
        return ""


def _is_torchs(module: nn.Module) -> bool:
    """Return whether a batch norm has torch's forward."""
    return getattr(module.forward, "__func__", None) is _BatchNorm.forward


def is_uncertain(findings: Sequence[Finding]) -> bool:
    """Return whether repeating the step would show more."""
    return any(finding.cause in _UNCERTAIN for finding in findings)


def nondeterministic(
    findings: Sequence[Finding], first: RecordedStep, again: RecordedStep, tolerance: Tolerance
) -> list[Finding]:
    """Return the findings; the cause of uncertain ones is that the step, repeated, had another result."""
    divergence = first_divergence(first.recorder, again.recorder, (), tolerance)
    where = f", first at {divergence[0].name or 'the model itself'}" if divergence else ""
    cause, text = Cause.NONDETERMINISTIC, _NONDETERMINISTIC.format(where=where)
    return [replace(f, cause=cause, text=text) if f.cause in _UNCERTAIN else f for f in findings]


def may_be_split_wrongly(findings: Sequence[Finding]) -> bool:
    """Return whether to split the inputs in another way would show more."""
    return any(finding.cause in _PERHAPS_SPLIT_WRONGLY for finding in findings)


def split_wrongly(findings: Sequence[Finding], text: str, fix: tuple[str, ...]) -> list[Finding]:
    """Return the findings; the cause of those that it explains is how an input is split, which `text` says."""
    explained = _PERHAPS_SPLIT_WRONGLY
    return [
        replace(finding, cause=Cause.SPLIT_WRONGLY, text=text, fix=fix) if finding.cause in explained else finding
        for finding in findings
    ]


def with_whole_inputs(findings: Sequence[Finding], paths: Sequence[str]) -> list[Finding]:
    """Return the findings; uncertain ones name the inputs at these paths, which go whole and may have rows."""
    text = _WHOLE.format(paths=", ".join(paths))
    return [replace(f, text=f.text + text) if paths and f.cause in _UNCERTAIN else f for f in findings]
