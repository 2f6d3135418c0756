"""Why replicas give other numbers than one device: from what two steps recorded to findings.

The submodule at which the two steps part tells most of it. Where its inputs are still the same, it does it itself;
where they differ already, the code between the submodules did. What it is follows from the module's class, from
whether random numbers had been drawn by then, and from whether the step gives the same when it is repeated. An output
that is joined on the wrong axis shows in its shape, whatever else differs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.data_parallel import DataParallel
from manyhands.primitives import pytree
from manyhands.primitives.dims import spread
from manyhands.verification.compare import Tolerance, plain, tensors_in
from manyhands.verification.report import Cause, Finding, Kind, Row
from manyhands.verification.step import RecordedStep
from manyhands.verification.watch import Parting, match, parting

# An option that is given with this value asks for what differs, and so explains it.
_ASKS_FOR = {Cause.PER_SHARD_BATCH_NORM: ("sync_batch_norm", False), Cause.ONE_NUMBER_A_SHARD: ("scalars", "stack")}

_OPEN = (Cause.ROWS_INTERACT, Cause.UNKNOWN)  # about these another run of the same step tells more


@dataclass(frozen=True)
class Comparison:
    """The two steps of one mode, and what came of them.

    Attributes:
        mode: "training" or "eval".
        wrapped: the wrapper around the module.
        given: the options that the caller gave by name.
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
        """Return what can be told of the differences, at least one finding.

        Raises:
            ValueError: why the replicas' outputs could not be gathered, where that cannot be told better.
        """
        findings = list(self._of_joins())
        if self.many.error is not None and not findings:
            raise self.many.error
        findings += self._of_types()
        apart = parting(self.one.watch, self.many.watch, self.many.rows, self.tolerance)
        if apart is not None:
            findings += self._of_submodules(apart)
        return findings or [self._of_the_rest()]

    def _finding(self, name: str, cause: Cause, text: str, *, explained: bool = False) -> Finding:
        option, value = _ASKS_FOR.get(cause, ("", None))
        asked_for = option in self.given and self.given[option] == value
        module = self.wrapped.module.get_submodule(name)
        return Finding(self.mode, name, type(module).__name__, cause, text, explained or asked_for)

    def _of_joins(self) -> Iterator[Finding]:
        """Yield findings about outputs that have another shape than on one device, or could not be joined at all."""
        outputs = list(tensors_in(self.one.output))
        of_one, of_many = self.one.watch.of_root(), self.many.watch.of_root()
        if not of_many or any(len(seen.outputs) != len(outputs) for seen in (*of_one, *of_many)):
            return
        axes: dict[str, int | None] = {}  # where the rows are
        wrong: list[str] = []
        for i, (path, tensor) in enumerate(outputs):
            parts = [seen.outputs[i][1] for seen in of_many]
            found = match([seen.outputs[i][1] for seen in of_one], parts, self.many.rows, self.tolerance)
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
            paths = iter([path for path, _ in pytree.leaves(self.one.output)])
            dims = pytree.map_leaves(lambda _: axes.get(next(paths), self.wrapped.dim), self.one.output)
            text = f"{wrong[0]}. out_dims={dims!r} says where they are"
            yield self._finding("", Cause.JOINED_ON_ANOTHER_AXIS, text)

    def _of_types(self) -> Iterator[Finding]:
        """Yield a finding about the first output that is something else than on one device."""
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
        """Return the axis on which an output is joined, as the wrapper's options say; None for a whole one."""
        axes = spread(self.wrapped.out_dims, self.one.output, self.wrapped.dim, "out_dims")
        paths = [where for where, _ in pytree.leaves(self.one.output)]
        axis = axes[paths.index(path)] if path in paths else None
        return axis if axis is None else axis % max(1, tensor.dim())

    def _of_submodules(self, apart: Parting) -> Iterator[Finding]:
        """Yield findings about the first submodule that differs, and what comes behind it that is certain anyway."""
        module = self.wrapped.module.get_submodule(apart.name)
        if apart.only_numbers and apart.inputs_same:
            yield self._of_numbers(apart.name, "")
        elif apart.inputs_same and _takes_statistics(module, apart.training):
            yield self._of_batch_norm(apart.name)
        elif apart.drawn:
            yield self._of_random_numbers(apart)
            for seen in self.one.watch.seen:
                module = self.wrapped.module.get_submodule(seen.name)
                if _takes_statistics(module, seen.training) and not self._synchronised():
                    yield self._of_batch_norm(seen.name)
                    return
        else:
            name = apart.name if apart.inputs_same else self._enclosing(apart.name)
            where = "" if apart.inputs_same else f" (in the code in front of {apart.name})"
            text = (
                f"what it computes for a row depends on the other rows of the shard{where}. Compute such things from "
                "the gathered output, outside of the model; or, if the rows are not on axis "
                f"{self.wrapped.dim}, say so with dim"
            )
            yield self._finding(name, Cause.ROWS_INTERACT, text)

    def _of_batch_norm(self, name: str) -> Finding:
        if self._synchronised():
            text = "batch norm, although its statistics are those of the whole batch: please report this"
            return self._finding(name, Cause.UNKNOWN, text)
        text = (
            "batch norm takes its statistics from each shard, not from the batch. With sync_batch_norm=True it takes "
            "those of the batch; sync_batch_norm=False, given, says that you want it so"
        )
        return self._finding(name, Cause.PER_SHARD_BATCH_NORM, text)

    def _synchronised(self) -> bool:
        return bool(vars(self.wrapped).get("sync_batch_norm", False))

    def _of_random_numbers(self, apart: Parting) -> Finding:
        class_name = type(self.wrapped.module.get_submodule(apart.name)).__name__
        dropout = apart.inputs_same and "dropout" in class_name.lower()
        what = "dropout is active, and replicas draw" if dropout else "random numbers are drawn, and replicas draw"
        text = f"{what} from streams of their own. What comes behind it is compared in eval mode only"
        cause = Cause.ACTIVE_DROPOUT if dropout else Cause.RANDOM_NUMBERS
        return self._finding(apart.name, cause, text, explained=True)

    def _of_numbers(self, name: str, scalars: str) -> Finding:
        rows = " + ".join(map(str, self.many.rows)) or "their own"
        text = f"each replica returns one number for its own rows ({rows}), and their mean is not the batch's. "
        if scalars:
            text += f"scalars={scalars!r} weights them" if scalars == "mean" else f"scalars={scalars!r} adds them up"
        else:
            text += (
                "It is no mean over rows and no sum: scalars='mean:name' weights by the output of that name, such as "
                "the number of tokens; or return one number a row, and reduce outside"
            )
        return self._finding(name, Cause.ONE_NUMBER_A_SHARD, text)

    def _of_the_rest(self) -> Finding:
        """Return the finding where no submodule was seen to differ, the model itself included."""
        differing = [row for row in self.rows if row.differs]
        outputs = {row.name for row in differing if row.kind is Kind.OUTPUT}
        for path, tensor in tensors_in(self.one.output):
            if path in outputs and tensor.dim() == 0:
                return self._of_numbers("", self._scalars_for(path, tensor))
        if all(row.kind is Kind.BUFFER for row in differing):
            name = differing[0].name
            text = (
                f"{name} is updated in forward, and of several replicas the first one's updates stay, which has seen "
                "its own rows only. Nothing else differs"
            )
            return self._finding(name.rpartition(".")[0], Cause.FIRST_REPLICAS_BUFFERS, text)
        if not any(row.kind in (Kind.OUTPUT, Kind.LOSS) for row in differing):
            return self._finding("", Cause.UNKNOWN, "outputs and loss are the same, and the backward differs")
        return self._finding("", Cause.UNKNOWN, "no submodule that could be compared differs")

    def _scalars_for(self, path: str, one: torch.Tensor) -> str:
        """Return which `scalars` makes one device's number of the replicas'; "" where none does."""
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
        """Return the innermost submodule around `name` that was called."""
        called = {seen.name for seen in self.one.watch.seen}
        while name:
            name = name.rpartition(".")[0]
            if name in called:
                break
        return name


def is_open(findings: Sequence[Finding]) -> bool:
    """Return whether another run of the same step would tell more."""
    return any(finding.cause in _OPEN for finding in findings)


def about_repetition(first: RecordedStep, again: RecordedStep, tolerance: Tolerance) -> str:
    """Return what to say where a step was repeated on one device, from the same state, and gave something else."""
    apart = parting(first.watch, again.watch, (), tolerance)
    where = f", first at {apart.name or 'the model itself'}" if apart else ""
    return (
        f"two runs on one device, from one state, differ as well{where}: an operation is not deterministic "
        "(torch.use_deterministic_algorithms(True) names many), or draws random numbers that no seed governs"
    )


def settled(findings: Sequence[Finding], unsteady: str) -> list[Finding]:
    """Return the findings with the open ones settled: what the repetition showed is the cause."""
    cause = Cause.NONDETERMINISTIC
    return [replace(f, cause=cause, text=unsteady) if f.cause in _OPEN else f for f in findings]


def _takes_statistics(module: nn.Module, training: bool) -> bool:
    """Return whether a module is a batch norm that normalises with the statistics of the rows it is given."""
    return isinstance(module, _BatchNorm) and (training or module.running_mean is None)


def _output(path: str) -> str:
    return f"output{path}" if path else "the output"
