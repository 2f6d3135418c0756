"""Why replicas give other numbers than one device: from the records of two steps to findings.

The first submodule whose output differs shows most. If its inputs are still the same, it is the cause itself; if they
differ already, the code between the submodules is. The kind of cause follows from the module's class, from whether
random numbers had been drawn by then, and from whether the step gives the same when it is repeated. An output that is
joined on the wrong axis shows in its shape, whatever else differs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.data_parallel import DataParallel
from unisono.primitives import pytree
from unisono.verification.call_recorder import Divergence, first_divergence, match
from unisono.verification.compare import Tolerance, plain, tensors_in
from unisono.verification.report import Cause, Finding, Kind, Row
from unisono.verification.step import RecordedStep

# An option that was given with this value explains the difference.
_ASKS_FOR = {Cause.PER_SHARD_BATCH_NORM: ("sync_batch_norm", False), Cause.ONE_NUMBER_A_SHARD: ("scalars", "stack")}

_NOT_THOSE_OF_ONE_DEVICE = (
    'the numbers are not those of one device, although randomness="one_device" asks for them: rows may interact, or an '
    "axis that is drawn may have all rows k times, block after block, instead of k entries of each row"
)

LOST = "what a replica assigns to its attributes is lost when its forward ends"

_UNCERTAIN = (Cause.ROWS_INTERACT, Cause.UNKNOWN)  # repeating the step shows more about these


@dataclass(frozen=True)
class Comparison:
    """The two steps of one mode, and the comparisons of their results.

    Attributes:
        mode: "training" or "eval".
        wrapped: the wrapper around the module.
        given: the keyword options of the caller.
        one, many: the steps on one device and on several.
        rows: the comparisons.
        tolerance: how large a difference may be.
    """

    mode: str
    wrapped: DataParallel
    given: Mapping[str, Any]
    one: RecordedStep
    many: RecordedStep
    rows: Sequence[Row]
    tolerance: Tolerance

    def differs(self) -> bool:
        return any(row.differs for row in self.rows)

    def find(self) -> list[Finding]:
        """Return the findings about the differences, at least one.

        Raises:
            ValueError: the replicas' outputs could not be gathered, and no finding explains it.
        """
        findings = list(self._joins())
        if self.many.error is not None and not findings:
            raise self.many.error
        findings += self._types()
        divergence = first_divergence(self.one.recorder, self.many.recorder, self.many.rows, self.tolerance)
        if divergence is not None:
            findings += self._submodules(divergence)
        if not findings and any(row.differs and row.kind is not Kind.ATTRIBUTE for row in self.rows):
            findings.append(self._other())
        return [*findings, *self._attributes()]

    def _finding(self, name: str, cause: Cause, text: str, *, explained: bool = False) -> Finding:
        option, value = _ASKS_FOR.get(cause, ("", None))
        asked_for = option in self.given and self.given[option] == value
        module = self.wrapped.module.get_submodule(name)
        return Finding(self.mode, name, type(module).__name__, cause, text, explained or asked_for)

    def _joins(self) -> Iterator[Finding]:
        """Yield findings about outputs whose shape is not that on one device, or that could not be joined."""
        outputs = list(tensors_in(self.one.output))
        of_one, of_many = self.one.recorder.root_calls(), self.many.recorder.root_calls()
        if not of_many or any(len(call.outputs) != len(outputs) for call in (*of_one, *of_many)):
            return
        axes: dict[str, int | None] = {}  # of the rows
        wrong: list[str] = []
        for i, (path, tensor) in enumerate(outputs):
            parts = [call.outputs[i][1] for call in of_many]
            found = match([call.outputs[i][1] for call in of_one], parts, self.many.rows, self.tolerance)
            whole = tensor.dim() > 0 and all(p.shape == tensor.shape for p in parts)
            joined_on = self._joined_on(path, tensor)
            if self.many.error is None and self.many.shape_of(path) in (tensor.shape, None):
                continue
            if found is not None and found.axis not in (None, joined_on):
                axes[path] = found.axis
                wrong.append(f"the rows of {_output(path)} are on axis {found.axis}, and it is joined on {joined_on}")
            elif whole and joined_on is not None and all(self.tolerance.same(tensor, part) for part in parts):
                axes[path] = None
                wrong.append(f"{_output(path)} has no rows, is the same in all replicas, and is joined on {joined_on}")
            elif whole and joined_on is not None:
                text = (
                    f"{_output(path)} has no rows, and each replica returns one of its own, which are joined on "
                    f"{joined_on}. A sum or mean over the rows belongs in a 0-dim output, for which scalars is the rule"
                )
                yield self._finding("", Cause.JOINED_ON_ANOTHER_AXIS, text)
            elif len(self._axes_with_rows(tensor, parts)) > 1:
                text = (
                    f"{_output(path)} compares rows with each other, and a replica has those of its shard only. Return "
                    "what is computed of each row, and compare them in the gathered output, outside of the model"
                )
                yield self._finding("", Cause.ROWS_INTERACT, text)
        if wrong:
            _, spec = pytree.flatten(self.one.output)
            dims = pytree.unflatten(spec, [axes.get(path, self.wrapped.dim) for path in spec.paths()])
            text = f"{wrong[0]}. out_dims={dims!r} says where they are"
            yield self._finding("", Cause.JOINED_ON_ANOTHER_AXIS, text)

    def _types(self) -> Iterator[Finding]:
        """Yield a finding about the first output whose type is not that on one device."""
        shapes = {path for path, _ in tensors_in(self.one.output)} & {path for path, _ in tensors_in(self.many.output)}
        for row in self.rows if self.many.error is None else ():
            if row.kind is Kind.OUTPUT and math.isinf(row.difference) and row.note and row.name not in shapes:
                yield self._finding("", Cause.UNKNOWN, f"{_output(row.name)} is {row.note}")
                return

    def _axes_with_rows(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[int]:
        """Return the axes that are as long as the batch on one device, and as long as its shard in each replica."""
        sizes = list(self.many.rows)
        return [
            axis
            for axis in range(tensor.dim())
            if tensor.size(axis) == sum(sizes) and [p.size(axis) for p in parts if p.dim() > axis] == sizes
        ]

    def _joined_on(self, path: str, tensor: torch.Tensor) -> int | None:
        """Return the axis on which the wrapper's options join an output; None if they do not join it."""
        _, spec = pytree.flatten(self.one.output)
        axes, _ = self.wrapped._options.rules().axes(spec)
        paths = [*spec.paths()]
        axis = axes[paths.index(path)] if path in paths else None
        return axis if axis is None else axis % max(1, tensor.dim())

    def _submodules(self, divergence: Divergence) -> Iterator[Finding]:
        """Yield findings about the first submodule that differs, and about later ones that are certain nevertheless."""
        module = self.wrapped.module.get_submodule(divergence.name)
        if divergence.only_numbers and divergence.inputs_same:
            yield self._numbers(divergence.name, "")
        elif divergence.inputs_same and _takes_statistics(module, divergence.training):
            yield self._batch_norm(divergence.name)
        elif divergence.drawn:
            yield self._random_numbers(divergence)
            for call in self.one.recorder.calls:
                module = self.wrapped.module.get_submodule(call.name)
                if _takes_statistics(module, call.training) and not self._synchronised():
                    yield self._batch_norm(call.name)
                    return
        else:
            name = divergence.name if divergence.inputs_same else self._enclosing(divergence.name)
            where = "" if divergence.inputs_same else f" (in the code in front of {divergence.name})"
            text = (
                f"what it computes for a row depends on the other rows of the shard{where}. Compute such things from "
                "the gathered output, outside of the model; or, if the rows are not on axis "
                f"{self.wrapped.dim}, say so with dim"
            )
            yield self._finding(name, Cause.ROWS_INTERACT, text)

    def _batch_norm(self, name: str) -> Finding:
        if self._synchronised():
            text = "batch norm, although its statistics are those of the whole batch: please report this"
            return self._finding(name, Cause.UNKNOWN, text)
        text = (
            "batch norm takes its statistics from each shard, not from the batch. With sync_batch_norm=True it takes "
            "those of the batch; sync_batch_norm=False, given, says that this is intended"
        )
        return self._finding(name, Cause.PER_SHARD_BATCH_NORM, text)

    def _synchronised(self) -> bool:
        return bool(self.wrapped.sync_batch_norm)

    def _random_numbers(self, divergence: Divergence) -> Finding:
        if self.wrapped.randomness == "one_device":
            return self._finding(divergence.name, Cause.RANDOM_NUMBERS, _NOT_THOSE_OF_ONE_DEVICE)
        class_name = type(self.wrapped.module.get_submodule(divergence.name)).__name__
        dropout = divergence.inputs_same and "dropout" in class_name.lower()
        what = "dropout is active, and replicas draw" if dropout else "random numbers are drawn, and replicas draw"
        text = (
            f"{what} from streams of their own. Everything after it is compared in eval mode only; with "
            'randomness="one_device", in both modes'
        )
        cause = Cause.ACTIVE_DROPOUT if dropout else Cause.RANDOM_NUMBERS
        return self._finding(divergence.name, cause, text, explained=True)

    def _numbers(self, name: str, scalars: str) -> Finding:
        rows = " + ".join(map(str, self.many.rows)) or "their own"
        text = f"each replica returns one number for its own rows ({rows}), and their mean is not the batch's. "
        if scalars:
            text += f"scalars={scalars!r} weights them" if scalars == "mean" else f"scalars={scalars!r} adds them up"
        else:
            text += (
                "It is neither a mean over rows nor a sum: scalars='mean:name' weights by the output of that name, "
                "such as the number of tokens; or return one number a row, and reduce outside of the model"
            )
        return self._finding(name, Cause.ONE_NUMBER_A_SHARD, text)

    def _other(self) -> Finding:
        """Return the finding if no recorded call differs, not even that of the model itself."""
        differing = [row for row in self.rows if row.differs and row.kind is not Kind.ATTRIBUTE]
        outputs = {row.name for row in differing if row.kind is Kind.OUTPUT}
        for path, tensor in tensors_in(self.one.output):
            if path in outputs and tensor.dim() == 0:
                return self._numbers("", self._scalars_for(path, tensor))
        if all(row.kind is Kind.BUFFER for row in differing):
            name = differing[0].name
            text = (
                f"{name} is updated in forward. Only the first replica's updates stay, and it has seen its own rows "
                "only. Nothing else differs"
            )
            return self._finding(name.rpartition(".")[0], Cause.FIRST_REPLICAS_BUFFERS, text)
        if not any(row.kind in (Kind.OUTPUT, Kind.LOSS) for row in differing):
            return self._finding("", Cause.UNKNOWN, "outputs and loss are the same, and the backward differs")
        return self._finding("", Cause.UNKNOWN, "no submodule that could be compared differs")

    def _attributes(self) -> Iterator[Finding]:
        """Yield a finding about the attributes that differ."""
        names = [row.name for row in self.rows if row.differs and row.kind is Kind.ATTRIBUTE]
        if names:
            known = [name for name in self.one.attributes if names[0] == name or names[0].startswith(f"{name}[")]
            text = (
                f"forward updates {', '.join(names)}. {LOST[0].upper()}{LOST[1:]}; a list or a tensor that it changes "
                "in place has the changes of all replicas. Update it outside of forward, from the gathered output; or "
                "make it a buffer, of which the first replica's updates stay"
            )
            yield self._finding(known[0].rpartition(".")[0], Cause.ATTRIBUTES_OF_REPLICAS, text)

    def _scalars_for(self, path: str, one: torch.Tensor) -> str:
        """Return the rule of `scalars` that gives the number of one device; "" if none does."""
        numbers = dict(tensors_in(self.many.output)).get(path)
        if numbers is None or numbers.shape != (len(self.many.rows),):
            return ""
        numbers = plain(numbers).cpu().double()
        weights = torch.tensor(self.many.rows, dtype=torch.float64) / sum(self.many.rows)
        for scalars, joined in (("mean", numbers @ weights), ("sum", numbers.sum())):
            if self.tolerance.same(one, joined.to(one.dtype)):
                return scalars
        return ""

    def _enclosing(self, name: str) -> str:
        """Return the innermost submodule that contains `name` and was called."""
        called = {call.name for call in self.one.recorder.calls}
        while name:
            name = name.rpartition(".")[0]
            if name in called:
                break
        return name


def is_uncertain(findings: Sequence[Finding]) -> bool:
    """Return whether repeating the step would show more."""
    return any(finding.cause in _UNCERTAIN for finding in findings)


def about_repetition(first: RecordedStep, again: RecordedStep, tolerance: Tolerance) -> str:
    """Return the text about a step that was repeated on one device, from the same state, with another result."""
    divergence = first_divergence(first.recorder, again.recorder, (), tolerance)
    where = f", first at {divergence.name or 'the model itself'}" if divergence else ""
    return (
        f"two runs on one device, from one state, differ as well{where}: an operation is not deterministic "
        "(torch.use_deterministic_algorithms(True) names many), or draws random numbers that no seed controls"
    )


def made_certain(findings: Sequence[Finding], text: str) -> list[Finding]:
    """Return the findings; the cause of the uncertain ones is the nondeterminism that the text describes."""
    cause = Cause.NONDETERMINISTIC
    return [replace(f, cause=cause, text=text) if f.cause in _UNCERTAIN else f for f in findings]


def _takes_statistics(module: nn.Module, training: bool) -> bool:
    """Return whether a module is a batch norm that normalises with the statistics of its input."""
    return isinstance(module, _BatchNorm) and (training or module.running_mean is None)


def _output(path: str) -> str:
    return f"output{path}" if path else "the output"
