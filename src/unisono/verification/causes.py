"""Why replicas give other numbers than one device: from the records of two steps to findings.

The first submodule whose output differs shows most. If its inputs are still the same, it is the cause itself; if they
differ already, the code between the submodules is. The kind of cause follows from the module's class, and from whether
the step gives the same when it is repeated. An output that is joined on the wrong axis shows in its shape, whatever
else differs.
"""

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

LOST = "what a replica assigns to its attributes is lost when its forward ends"

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
    "{generators} is drawn from, or seeded, in a way that cannot be switched off. Draw with torch's functions, or "
    "outside of the model, and pass the result to it as an input"
)
_PER_SHARD = (
    "batch norm takes its statistics from each shard, not from the batch. With sync_batch_norm=True it takes those of "
    "the batch; sync_batch_norm=False, given, says that this is intended"
)
_ROWS_INTERACT = (
    "what it computes for a row depends on the other rows of the shard{where}. Compute such things from the gathered "
    "output, outside of the model; or, if the rows are not on axis {dim}, say so with dim"
)
SPLIT_INPUT = (
    "{inputs}: split by rows, although it has none. With in_dims={in_dims} every replica gets all of it, and the "
    "numbers are those of one device"
)
SPLIT_LIST = (
    "{input} has one entry a row, and a {kind} is not split by entry: tensors in it are split one by one, and all else "
    "goes whole to every replica. As unisono.SampleList({entries}) it is split by entry, and the numbers are those of "
    "one device"
)
_WHOLE = (
    ". Or {paths}, which has as many entries as the batch has rows, and goes whole to every replica, belongs to "
    "them: then give it as a tensor or a unisono.SampleList, or say how it is split (unisono.register_batch_type)"
)
_LOST_AXIS = (
    "output{path} has shape {one} on one device, and {shard} in a replica with one row: its axis of rows is gone, as "
    "squeeze() removes each axis of size 1. Name the axis to remove, as in squeeze(-1)"
)
_ROWS_COMPARED = (
    "{output} compares rows with each other, and a replica has those of its shard only. Return what is computed of "
    "each row, and compare them in the gathered output, outside of the model"
)
_NO_ROWS = (
    "{output} has no rows, and each replica returns one of its own, which are joined on {axis}. A sum or mean over the "
    "rows belongs in a 0-dim output, for which scalars is the rule"
)
_LIST_OF_ROWS = (
    "{output} has {one} entries on one device, and {many} on several: the first entries of all replicas are joined, "
    "then the second ones, and so on. If each entry belongs to a row, return unisono.SampleList(entries)"
)
_VALUE = (
    "{output} is {values}: each replica has computed it from its own rows. Return what it is computed from, as a "
    "tensor, and compute it from the gathered output, outside of the model"
)
_ONE_NUMBER = (
    "each replica returns one number{at} for its own rows ({rows}), and their mean is not the batch's. {remedy}"
)
_SCALARS = {
    "mean": "scalars='mean' weights them",
    "sum": "scalars='sum' adds them up",
    "": "It is neither a mean over rows nor a sum: scalars='mean:name' weights by the output of that name, such as the "
    "number of tokens; or return one number a row, and reduce outside of the model",
}
_FIRST_BUFFERS = (
    "{name} is updated in forward. Only the first replica's updates stay, and it has seen its own rows only. Nothing "
    "else differs"
)
_BUFFER_OF_ROWS = (
    ". It has an entry for each row, and each replica has rows of its own, so those of the others are missing: return "
    "it from forward, and keep the gathered one"
)
_PARAMETERS = (
    "forward writes into {names}, in every replica: those in the module's memory write into one tensor, and what a "
    "replica writes in memory of its own, or assigns to `.data`, is lost. Make it a buffer, of which the first "
    "replica's updates stay, or update it outside of forward. For an initialisation from the first batch, call the "
    "plain module once before it is wrapped"
)
_MADE = (
    "forward makes {names}: each replica makes its own in each step, which ends with its forward, and no optimizer "
    "knows it. Make it in __init__; or before wrapping, with one forward of the plain module"
)
_ATTRIBUTES = (
    f"forward updates {{names}}, and {LOST}; what it changes in place, such as a tensor, a list to which it appends or "
    "an object, has the changes of all replicas, in the order of arrival. Update "
    "it outside of forward, from the gathered output; or make it a buffer, of which the first replica's updates stay"
)
_NONDETERMINISTIC = (
    "two runs on one device, from one state, differ as well{where}: an operation is not deterministic "
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

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        """Return the findings, at least one, about the comparisons of the steps' results.

        Raise why outputs could not be gathered, if no finding explains it.
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

    def _finding(self, name: str, cause: Cause, text: str) -> Finding:
        option, value = _ASKS_FOR.get(cause, ("", None))
        explained = option in self.given and self.given[option] == value
        if cause is Cause.PER_SHARD_BATCH_NORM and self.wrapped.sync_batch_norm is False:
            explained = True
        return Finding(self.mode, name, type(self._submodule(name)).__name__, cause, text, explained)

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
        if not calls or any(len(call.outputs) != len(outputs) for call in calls):
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
                wrong.append(f"the rows of {output} are on axis {fits}, and it is joined on {axis}")
            elif tensor.dim() and axis is not None and all(part.shape == tensor.shape for part in parts):
                if not all(self.tolerance.same(tensor, part) for part in parts):
                    yield self._finding("", Cause.JOINED_ON_ANOTHER_AXIS, _NO_ROWS.format(output=output, axis=axis))
                    continue
                dims[path] = None
                wrong.append(f"{output} has no rows, is the same in all replicas, and is joined on {axis}")
            elif self._num_axes_with_rows(tensor, parts) > 1:
                yield self._finding("", Cause.ROWS_INTERACT, _ROWS_COMPARED.format(output=output))
        if wrong:
            out_dims = pytree.unflatten(spec, [dims.get(path, self.wrapped.dim) for path in paths])
            text = f"{wrong[0]}. out_dims={out_dims!r} says where they are"
            yield self._finding("", Cause.JOINED_ON_ANOTHER_AXIS, text)

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
            text = "batch norm, although its statistics are those of the whole batch: please report this"
            yield self._finding(name, Cause.UNKNOWN, text)
        elif inputs_same and self._takes_statistics(first):
            yield self._finding(name, Cause.PER_SHARD_BATCH_NORM, _PER_SHARD)
        else:
            where = "" if inputs_same else f" (in the code in front of {name})"
            name = name if inputs_same else self._enclosing(name)
            text = _ROWS_INTERACT.format(where=where, dim=self.wrapped.dim)
            yield self._finding(name, Cause.ROWS_INTERACT, text)

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
            return self._finding("", Cause.UNKNOWN, "outputs and loss are the same, and the backward differs")
        return self._finding("", Cause.UNKNOWN, "no submodule that could be compared differs")

    def _numbers(self, name: str, scalars: str, at: str = "") -> Finding:
        rows = " + ".join(map(str, self.many.rows)) or "their own"
        text = _ONE_NUMBER.format(at=at, rows=rows, remedy=_SCALARS[scalars])
        return self._finding(name, Cause.ONE_NUMBER_A_SHARD, text)

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
            elif isinstance(one, int | float) and isinstance(many, list):
                as_tensor = torch.tensor(one, dtype=torch.float64, device="cpu")
                scalars = self._scalars_for(torch.tensor(many, device="cpu"), as_tensor)
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


def split_wrongly(findings: Sequence[Finding], text: str) -> list[Finding]:
    """Return the findings; the cause of those that it explains is how an input is split, which `text` says."""
    explained = _PERHAPS_SPLIT_WRONGLY
    return [replace(f, cause=Cause.SPLIT_WRONGLY, text=text) if f.cause in explained else f for f in findings]


def with_whole_inputs(findings: Sequence[Finding], paths: Sequence[str]) -> list[Finding]:
    """Return the findings; uncertain ones name the inputs at these paths, which go whole and may have rows."""
    text = _WHOLE.format(paths=", ".join(paths))
    return [replace(f, text=f.text + text) if paths and f.cause in _UNCERTAIN else f for f in findings]
