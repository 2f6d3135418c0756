"""The report of `verify`: rows, findings, and the table as which they are printed, or shown by a notebook.

A `Row` is one comparison: an output, the loss, a gradient, a parameter that forward has written into, a buffer or an
attribute, in one mode and one precision. A `Finding` describes the differences of one mode: the first submodule whose
output differs, and the cause. Nothing here knows of tensors.
"""

import enum
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from unisono.console.tables import html_table

MODES = ("training", "eval")

_SHOWN = 6  # of the rows of one kind in one mode, the worst; the others are counted
_SHOWN_SAME = 3  # if none of them differs
_SHOWN_IN_NOTEBOOKS = 20  # of all rows
_WIDTH = 110  # of a line of text
_LEGEND = "differs: the difference is above allowed, which is relative to the scale. Each is the largest of its tensor"


class Cause(enum.StrEnum):
    """Why replicas give other numbers than one device."""

    PER_SHARD_BATCH_NORM = "batch norm per shard"
    RANDOM_NUMBERS = "random numbers that cannot be switched off"
    ROWS_INTERACT = "rows interact"
    SPLIT_WRONGLY = "an input is not split as meant"
    ONE_NUMBER_A_SHARD = "one number per replica"
    LIST_OF_ROWS = "a list with one entry per row"
    VALUE_OF_A_SHARD = "a value of each replica"
    JOINED_ON_ANOTHER_AXIS = "joined along the wrong dimension"
    LOST_AXIS = "batch dimension lost in a replica with one row"
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
        value: the largest absolute value on one device.
        scale: the size to which the difference is compared: the value itself, or that of a larger one whose rounding
            errors it has.
        difference: the largest absolute difference; infinite where values cannot be compared.
        allowed: the largest difference that rounding explains.
        note: why values cannot be compared.
        judged: whether the comparison shows anything: not if rounding alone may change the value by a large part.
        precision: the floating type of the step: "float64", or the model's own.
    """

    mode: str
    kind: Kind
    name: str
    shape: tuple[int, ...] | None = None
    value: float = 0.0
    scale: float = 0.0
    difference: float = 0.0
    allowed: float = 0.0
    note: str = ""
    judged: bool = True
    precision: str = ""

    @property
    def differs(self) -> bool:
        """Whether the difference is above what is allowed."""
        return self.judged and not self.difference <= self.allowed

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
        fix: arguments of `DataParallel` that give one device's numbers, as they are written.
    """

    mode: str
    module: str
    module_class: str
    cause: Cause
    text: str
    explained: bool = False
    fix: tuple[str, ...] = ()

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

        >>> def is_safe(report: unisono.Report) -> bool:
        ...     return report.same or report.explained
        >>> is_safe(unisono.verify(torch.nn.Linear(5, 2), torch.randn(30, 5), device_ids=["cpu", "cpu"], show=False))
        True

    Attributes:
        title: what was compared, and on which devices.
        rows: every comparison.
        findings: at least one for each mode in which something differs, or is not compared.
        notes: for example, what could not be compared.
        num_replicas: how many had rows; with one, one device was compared with itself.
        is_printed: whether `verify` has printed it, so that a notebook folds the table.
    """

    title: str
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    num_replicas: int = 2
    is_printed: bool = field(default=False, compare=False)

    @property
    def same(self) -> bool:
        """Whether something was compared, in both modes, every value was judged, and nothing was found."""
        return bool(self.rows) and not self.findings and not self.differences and not self.not_judged

    @property
    def compared(self) -> bool:
        """Whether both modes were compared: not if the model draws random numbers that cannot be switched off."""
        return all(finding.compared for finding in self.findings)

    @property
    def explained(self) -> bool:
        """Whether something differs, and all of it follows from the options."""
        return bool(self.findings) and all(finding.explained for finding in self.findings)

    @property
    def differences(self) -> tuple[Row, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if row.differs)

    @property
    def differs(self) -> bool:
        """Whether something differs, or was found, that no given option explains."""
        found = self.differences or [finding for finding in self.findings if finding.compared]
        return bool(found) and not self.explained

    @property
    def not_judged(self) -> tuple[Row, ...]:
        """The rows that show nothing, because rounding alone may change the value by a large part."""
        return tuple(row for row in self.rows if not row.judged)

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
        table = [*self._table(), ""] if self.rows else []
        if self.differences:
            table += [_LEGEND, ""]
        return "\n".join([self.title, "", *table, *self._conclusion()])

    def __repr__(self) -> str:
        return f"Report({self._closing_line()})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the closing line, and below it the causes and a table, what differs first."""
        rows = sorted(self.rows, key=lambda row: (not row.differs, row.judged, -row.badness))
        cells = [
            [row.mode, row.precision, *_place(row), _shape(row), _result(row) or "same", *_numbers(row)]
            for row in rows[:_SHOWN_IN_NOTEBOOKS]
        ]
        header = ["mode", "in", "module", "compared", "shape", "result", *_NUMBERS]
        paragraphs = [self.title, *self._paragraphs()]
        said = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
        rest = rows[_SHOWN_IN_NOTEBOOKS:]
        below = f"<p>{_counted(rest, 'comparison')}</p>" if rest else ""
        summary = f"<summary><b>{escape(self._closing_line())}</b></summary>"
        table = html_table(header, cells, text_columns=6) if cells else ""
        shown = f"{summary}{said}{table}{below}"
        return f"<details{'' if self.is_printed else ' open'}>{shown}</details>"

    def _table(self) -> Iterator[str]:
        """Yield the lines of the table: of each kind the worst rows."""
        names = max(len(_name(row)) for row in self.rows)
        shapes = max(len(_shape(row)) for row in self.rows)
        yield f"{'':{names}}  {'shape':{shapes}}  {'  '.join(f'{name:>10}' for name in _NUMBERS)}"
        for mode, precision in dict.fromkeys((row.mode, row.precision) for row in self.rows):
            yield f"{mode}, in {precision}" if precision else mode
            for kind in Kind:
                rows = [row for row in self.rows if (row.mode, row.precision, row.kind) == (mode, precision, kind)]
                rows.sort(key=lambda row: (not row.differs, row.judged, -row.badness))
                shown = _SHOWN if any(row.differs or not row.judged for row in rows) else _SHOWN_SAME
                for row in rows[:shown]:
                    numbers = "  ".join(f"{number:>10}" for number in _numbers(row))
                    cells = [f"{_name(row):{names}}", f"{_shape(row):{shapes}}", numbers, _result(row)]
                    yield "  ".join(cells).rstrip()
                if rest := rows[shown:]:
                    yield f"  {_counted(rest, kind)}"

    def _conclusion(self) -> Iterator[str]:
        for paragraph in self._paragraphs():
            yield from textwrap.wrap(paragraph, _WIDTH)
        yield from self._verdict()

    def _paragraphs(self) -> list[str]:
        """Return the findings and the notes in words."""
        together: dict[Finding, list[str]] = {}  # a finding of both modes is printed once
        for finding in self.findings:
            together.setdefault(replace(finding, mode=""), []).append(finding.mode)
        said = [str(replace(finding, mode=" and ".join(modes))) for finding, modes in together.items()]
        return [*said, *self.notes]

    def _closing_line(self) -> str:
        first = self._main
        where = "" if first is None else f"; first at {first.module or 'the model itself'} ({first.module_class})"
        return f"{'; '.join(self._verdict())}{where}"

    def _verdict(self) -> Iterator[str]:
        if self.differences:
            counted = f"{len(self.differences)} of {len(self.rows)} comparisons, in {_modes(self.differences)}"
            yield f"differs{', as expected' if self.explained else ''}: {counted}"
        elif self.findings and self.compared:
            num_judged = len(self.rows) - len(self.not_judged)
            yield f"differs{', as expected' if self.explained else ''}: {num_judged} comparisons are the same"
        elif judged := [row for row in self.rows if row.judged]:
            yield f"same: {len(judged)} comparisons, in {_modes(judged)}"
        if self.not_judged:
            yield f"not judged: {len(self.not_judged)} values, in {_modes(self.not_judged)}"
        if not self.rows and self.compared:
            yield "nothing was compared: there are no outputs, gradients or buffers"
        if not self.compared:
            modes = dict.fromkeys(finding.mode for finding in self.findings if not finding.compared)
            yield f"not compared: {' and '.join(modes)}"


def _name(row: Row) -> str:
    return f"  {row.kind}{' of ' if row.kind is Kind.GRADIENT else ' '}{row.name}".rstrip()


def _place(row: Row) -> tuple[str, str]:
    """Return the module that a comparison is about, "" for the model itself, and what of it is compared."""
    module, _, name = row.name.rpartition(".")
    is_dotted = all(part.isidentifier() or part.isdecimal() for part in row.name.split("."))
    if row.kind in (Kind.OUTPUT, Kind.LOSS) or not is_dotted:  # a path, or in words what replicas share
        module, name = "", row.name
    return module, _name(replace(row, name=name)).strip()


def _shape(row: Row) -> str:
    return "" if row.shape is None else " x ".join(map(str, row.shape)) or "0-dim"


def _result(row: Row) -> str:
    """Return whether it differs, and why; "" if it does not."""
    return ": ".join(filter(None, ("differs" if row.differs else "" if row.judged else "not judged", row.note)))


_NUMBERS = ("value", "scale", "difference", "allowed")


def _numbers(row: Row) -> tuple[str, str, str, str]:
    """Return the numbers of a row in the order of `_NUMBERS`, as tables show them."""
    return f"{row.value:.2e}", f"{row.scale:.2e}", f"{row.difference:.1e}", f"{row.allowed:.1e}"


def _counted(rows: Sequence[Row], what: str) -> str:
    differ, unjudged = sum(row.differs for row in rows), sum(not row.judged for row in rows)
    differing = f"{differ} of which {'differs' if differ == 1 else 'differ'}"
    parts = [differing] * bool(differ) + [f"{unjudged} of which are not judged"] * bool(unjudged)
    verdict = ", ".join(parts) or "all the same"
    return f"{len(rows)} more {what}{'s' * (len(rows) > 1)}, {verdict}"


def _modes(rows: Sequence[Row]) -> str:
    return " and ".join(dict.fromkeys(row.mode for row in rows))
