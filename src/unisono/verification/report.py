"""The report of `verify`: rows, findings, and the table as which they are printed.

A `Row` is one comparison: an output, the loss, a gradient, a buffer or an attribute, in one mode. A `Finding` describes
the differences of one mode: the first submodule whose output differs, and the cause. Nothing here knows of tensors.
"""

import enum
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

MODES = ("training", "eval")

_SHOWN = 6  # of the rows of one kind in one mode, the worst; the others are counted
_SHOWN_SAME = 3  # if none of them differs
_WIDTH = 110  # of a line of text


class Cause(enum.StrEnum):
    """Why replicas give other numbers than one device."""

    PER_SHARD_BATCH_NORM = "batch norm per shard"
    ACTIVE_DROPOUT = "active dropout"
    RANDOM_NUMBERS = "random numbers"
    ROWS_INTERACT = "rows interact"
    ONE_NUMBER_A_SHARD = "one number a shard"
    JOINED_ON_ANOTHER_AXIS = "joined on the wrong axis"
    NONDETERMINISTIC = "nondeterministic"
    FIRST_REPLICAS_BUFFERS = "buffers of the first replica"
    ATTRIBUTES_OF_REPLICAS = "attributes that forward updates"
    UNKNOWN = "unknown"


class Kind(enum.StrEnum):
    """What a row compares; the table has them in this order."""

    OUTPUT = "output"
    LOSS = "loss"
    GRADIENT = "gradient"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        mode: "training" or "eval".
        name: of the parameter, buffer or attribute, or the path in the output; "" if there is only one.
        shape: on one device; None if it is no tensor.
        largest: the largest absolute value, to which the difference is compared.
        difference: the largest absolute difference; infinite where values cannot be compared.
        allowed: the largest difference that rounding explains.
        note: what the numbers do not show.
    """

    mode: str
    kind: Kind
    name: str
    shape: tuple[int, ...] | None = None
    largest: float = 0.0
    difference: float = 0.0
    allowed: float = 0.0
    note: str = ""

    @property
    def differs(self) -> bool:
        return not self.difference <= self.allowed

    @property
    def badness(self) -> float:
        """The difference in units of what is allowed."""
        if self.allowed:
            return self.difference / self.allowed
        return math.inf if self.difference else 0.0


@dataclass(frozen=True)
class Finding:
    """The first difference in one mode, and its cause.

    Attributes:
        mode: "training" or "eval".
        module: dotted name of the first submodule whose gathered output differs; "" is the model itself.
        module_class: the name of its class.
        cause: why.
        text: the cause in words, with the remedy.
        explained: whether it follows from the options, or cannot be otherwise.
    """

    mode: str
    module: str
    module_class: str
    cause: Cause
    text: str
    explained: bool = False

    def __str__(self) -> str:
        where = f"{self.module} ({self.module_class})" if self.module else f"the model itself ({self.module_class})"
        expected = ", as expected" if self.explained else ""
        return f"{self.mode}: differs{expected}, first at {where}: {self.text}"


@dataclass(frozen=True)
class Report:
    """One device against several, number by number; `str(report)` is the table.

    Attributes:
        title: what was compared, and on which devices.
        rows: every comparison.
        findings: at least one for each mode in which something differs.
        notes: for example, what could not be compared.
        num_replicas: how many had rows; with one, one device was compared with itself.
    """

    title: str
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    num_replicas: int = 2

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def explained(self) -> bool:
        """Whether something differs, and all of it follows from the options, or cannot be otherwise."""
        return not self.same and all(finding.explained for finding in self.findings)

    @property
    def differences(self) -> tuple[Row, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if row.differs)

    @property
    def first_module(self) -> str | None:
        """Dotted name of the first submodule that differs ("" is the model itself); None if nothing differs.

        Like `cause`, it is from the first finding that is not explained, or else from the first.
        """
        return self._main.module if self._main else None

    @property
    def cause(self) -> Cause | None:
        """Why; None if nothing differs."""
        return self._main.cause if self._main else None

    @property
    def _main(self) -> Finding | None:
        return next((f for f in self.findings if not f.explained), next(iter(self.findings), None))

    def __str__(self) -> str:
        lines = [self.title, ""]
        table = list(self._table())
        widths = [max(len(cells[i]) for cells in table if len(cells) > 1) for i in range(6)]
        for cells in table:
            if len(cells) == 1:
                lines.append(cells[0])
            else:
                left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
                right = [cell.rjust(width) for cell, width in zip(cells[2:5], widths[2:5], strict=True)]
                lines.append("  ".join([*left, *right, cells[5]]).rstrip())
        return "\n".join([*lines, "", *self._conclusion()])

    def _table(self) -> Iterator[Sequence[str]]:
        """Yield the cells of each line; a single cell spans all columns."""
        yield "", "shape", "largest value", "difference", "allowed", ""
        for mode in MODES:
            of_mode = [row for row in self.rows if row.mode == mode]
            if of_mode:
                yield (mode,)
            for kind in Kind:
                rows = sorted((row for row in of_mode if row.kind is kind), key=lambda row: -row.badness)
                shown = _SHOWN if any(row.differs for row in rows) else _SHOWN_SAME
                for row in rows[:shown]:
                    yield _cells(row)
                rest = rows[shown:]
                if rest:
                    differ = sum(row.differs for row in rest)
                    s = "s" if len(rest) > 1 else ""
                    yield (
                        f"  {len(rest)} more {kind}{s}, {f'{differ} of which differ' if differ else 'all the same'}",
                    )

    def _conclusion(self) -> Iterator[str]:
        together: dict[Finding, list[str]] = {}  # a finding of both modes is printed once
        for finding in self.findings:
            together.setdefault(replace(finding, mode=""), []).append(finding.mode)
        said = [str(replace(finding, mode=" and ".join(modes))) for finding, modes in together.items()]
        for paragraph in (*said, *self.notes):
            yield from textwrap.wrap(paragraph, _WIDTH)
        modes = " and ".join(dict.fromkeys(row.mode for row in self.rows))
        if self.same:
            yield f"same: {len(self.rows)} comparisons, in {modes}"
        else:
            where = " and ".join(dict.fromkeys(row.mode for row in self.differences))
            counted = f"{len(self.differences)} of {len(self.rows)} comparisons"
            yield f"differs{', as expected' if self.explained else ''}: {counted}, in {where}"


def _cells(row: Row) -> Sequence[str]:
    name = f"  {row.kind}{' of ' if row.kind is Kind.GRADIENT else ' '}{row.name}".rstrip()
    shape = "" if row.shape is None else " x ".join(map(str, row.shape)) or "0-dim"
    verdict = ": ".join(word for word in ("differs" if row.differs else "", row.note) if word)
    if math.isinf(row.difference) or row.shape is None:
        return name, shape, "", "", "", verdict
    return name, shape, f"{row.largest:.2e}", f"{row.difference:.1e}", f"{row.allowed:.1e}", verdict
