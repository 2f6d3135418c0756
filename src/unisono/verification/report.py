"""The report of `verify`: rows, findings, and the table as which they are printed.

A `Row` is one comparison: an output, the loss, a gradient, a parameter that forward has written into, a buffer or an
attribute, in one mode. A `Finding` describes the differences of one mode: the first submodule whose output differs,
and the cause. Nothing here knows of tensors.
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
    RANDOM_NUMBERS = "random numbers that cannot be switched off"
    ROWS_INTERACT = "rows interact"
    SPLIT_WRONGLY = "an input is not split as meant"
    ONE_NUMBER_A_SHARD = "one number a shard"
    LIST_OF_ROWS = "a list with one entry a row"
    VALUE_OF_A_SHARD = "a value of each shard"
    JOINED_ON_ANOTHER_AXIS = "joined on the wrong axis"
    LOST_AXIS = "no axis of rows in a replica with one row"
    NONDETERMINISTIC = "nondeterministic"
    FIRST_REPLICAS_BUFFERS = "buffers of the first replica"
    PARAMETERS_OF_REPLICAS = "parameters that forward writes into"
    ATTRIBUTES_OF_REPLICAS = "attributes that forward updates"
    UNKNOWN = "unknown"


class Kind(enum.StrEnum):
    """What a row compares; the table has them in this order."""

    OUTPUT = "output"
    LOSS = "loss"
    GRADIENT = "gradient"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        mode: "training" or "eval".
        kind: what is compared.
        name: of the parameter, buffer or attribute, or the path in the output; "" if there is only one.
        shape: on one device; None if there are no tensors to compare.
        largest: the largest absolute value, to which the difference is compared.
        difference: the largest absolute difference; infinite where values cannot be compared.
        allowed: the largest difference that rounding explains.
        note: why values cannot be compared.
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
        """Whether the difference is above what is allowed."""
        return not self.difference <= self.allowed

    @property
    def badness(self) -> float:
        """The difference in units of what is allowed."""
        if self.allowed:
            return self.difference / self.allowed
        return math.inf if self.difference else 0.0


@dataclass(frozen=True)
class Finding:
    """The first difference in one mode and its cause, or why the mode is not compared.

    Attributes:
        mode: "training" or "eval".
        module: dotted name of the first submodule whose gathered output differs; "" is the model itself.
        module_class: the name of its class.
        cause: why it differs.
        text: the cause in words, with the remedy.
        explained: whether it follows from the options.
    """

    mode: str
    module: str
    module_class: str
    cause: Cause
    text: str
    explained: bool = False

    @property
    def compared(self) -> bool:
        """Whether numbers were compared: not if they are random."""
        return self.cause is not Cause.RANDOM_NUMBERS

    def __str__(self) -> str:
        where = f"{self.module} ({self.module_class})" if self.module else f"the model itself ({self.module_class})"
        if not self.compared:
            return f"{self.mode}: not compared, because of {where}: {self.text}"
        expected = ", as expected" if self.explained else ""
        return f"{self.mode}: differs{expected}, first at {where}: {self.text}"


@dataclass(frozen=True)
class Report:
    """One device against several, number by number; `str(report)` is the table.

    Attributes:
        title: what was compared, and on which devices.
        rows: every comparison.
        findings: at least one for each mode in which something differs, or is not compared.
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
        """Whether both modes were compared, and nothing differs."""
        return self.compared and not self.differences

    @property
    def compared(self) -> bool:
        """Whether both modes were compared: not if the model draws random numbers that cannot be switched off."""
        return all(finding.compared for finding in self.findings)

    @property
    def explained(self) -> bool:
        """Whether something differs, and all of it follows from the options."""
        return not self.same and all(finding.explained for finding in self.findings)

    @property
    def differences(self) -> tuple[Row, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if row.differs)

    @property
    def first_module(self) -> str | None:
        """Dotted name of the first submodule that differs, or that draws ("" is the model itself); None if none does.

        Like `cause`, it is from the first finding that is not explained, or else from the first.
        """
        return self._main.module if self._main else None

    @property
    def cause(self) -> Cause | None:
        """Why it differs, or is not compared; None if all is the same."""
        return self._main.cause if self._main else None

    @property
    def _main(self) -> Finding | None:
        return next((f for f in self.findings if not f.explained), next(iter(self.findings), None))

    def __str__(self) -> str:
        return "\n".join([self.title, "", *self._table(), "", *self._conclusion()])

    def __repr__(self) -> str:
        first = self._main
        where = "" if first is None else f"; first at {first.module or 'the model itself'} ({first.module_class})"
        return f"Report({'; '.join(self._verdict())}{where})"

    def _table(self) -> Iterator[str]:
        """Yield the lines of the table: of each kind the worst rows."""
        names = max((len(_name(row)) for row in self.rows), default=0)
        shapes = max((len(_shape(row)) for row in self.rows), default=0)
        yield f"{'':{names}}  {'shape':{shapes}}  largest value  difference  allowed"
        for mode in dict.fromkeys(row.mode for row in self.rows):
            yield mode
            for kind in Kind:
                rows = [row for row in self.rows if (row.mode, row.kind) == (mode, kind)]
                rows.sort(key=lambda row: -row.badness)
                shown = _SHOWN if any(row.differs for row in rows) else _SHOWN_SAME
                for row in rows[:shown]:
                    numbers = f"{row.largest:13.2e}  {row.difference:10.1e}  {row.allowed:7.1e}"
                    verdict = ": ".join(filter(None, ("differs" if row.differs else "", row.note)))
                    cells = [f"{_name(row):{names}}", f"{_shape(row):{shapes}}", numbers, verdict]
                    yield "  ".join(cells).rstrip()
                if rest := rows[shown:]:
                    differ = sum(row.differs for row in rest)
                    verdict = f"{differ} of which differ" if differ else "all the same"
                    yield f"  {len(rest)} more {kind}{'s' * (len(rest) > 1)}, {verdict}"

    def _conclusion(self) -> Iterator[str]:
        together: dict[Finding, list[str]] = {}  # a finding of both modes is printed once
        for finding in self.findings:
            together.setdefault(replace(finding, mode=""), []).append(finding.mode)
        said = [str(replace(finding, mode=" and ".join(modes))) for finding, modes in together.items()]
        for paragraph in (*said, *self.notes):
            yield from textwrap.wrap(paragraph, _WIDTH)
        yield from self._verdict()

    def _verdict(self) -> Iterator[str]:
        if self.differences:
            counted = f"{len(self.differences)} of {len(self.rows)} comparisons, in {_modes(self.differences)}"
            yield f"differs{', as expected' if self.explained else ''}: {counted}"
        elif self.rows:
            yield f"same: {len(self.rows)} comparisons, in {_modes(self.rows)}"
        if not self.compared:
            modes = dict.fromkeys(finding.mode for finding in self.findings if not finding.compared)
            yield f"not compared: {' and '.join(modes)}"


def _name(row: Row) -> str:
    return f"  {row.kind}{' of ' if row.kind is Kind.GRADIENT else ' '}{row.name}".rstrip()


def _shape(row: Row) -> str:
    return "" if row.shape is None else " x ".join(map(str, row.shape)) or "0-dim"


def _modes(rows: Sequence[Row]) -> str:
    return " and ".join(dict.fromkeys(row.mode for row in rows))
