"""Means and sums of the numbers that a metric returns for each batch, over all rows."""

import contextlib
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from unisono.inference.batches import Inputs, inputs_of
from unisono.primitives.batch_types import batch_type_of

Reduction: TypeAlias = Literal["mean", "sum"]
_REDUCTIONS = get_args(Reduction)


def inputs_and_target(batch: Any) -> tuple[Inputs, Any]:
    """Return what a batch has for the model, and what it has for the metric.

    >>> inputs_and_target((1, 2, "target")), inputs_and_target(({"x": 1}, "target"))
    ((((1, 2), {}), 'target'), (((), {'x': 1}), 'target'))

    Of a tuple or list the last value is the target; what precedes it are the positional inputs, or, if that is one
    mapping, the keyword inputs. A mapping has the keyword inputs, and is the target, too.

    Raises:
        TypeError: a batch of another kind, or without inputs.
    """
    if isinstance(batch, Mapping) and batch_type_of(batch) is None:
        return inputs_of(batch), batch
    if not isinstance(batch, tuple | list) or batch_type_of(batch) is not None or len(batch) < 2:
        raise TypeError(
            f"a batch is a {type(batch).__name__}{' of 1' if isinstance(batch, tuple | list) else ''}: "
            "evaluate expects inputs and a target, as in (x, y), or a mapping of keyword inputs"
        )
    *inputs, target = batch
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return inputs_of(inputs[0]), target
    return (tuple(inputs), {}), target


class Totals:
    """What a metric has returned so far: a number for each name, weighted by rows where it is a mean.

    Args:
        reduction: "mean", "sum", or a mapping from names to these; what it lacks is a mean.

    Raises:
        ValueError, TypeError: another reduction.
    """

    def __init__(self, reduction: str | Mapping[str, str]) -> None:
        rules = reduction.values() if isinstance(reduction, Mapping) else [reduction]
        wrong = [rule for rule in rules if rule not in _REDUCTIONS]
        if wrong:
            raise (ValueError if isinstance(wrong[0], str) else TypeError)(
                f"reduction={reduction!r}: expected one of {list(_REDUCTIONS)}, or a dict of these by the "
                "names of the metric's numbers"
            )
        self._reduction = reduction
        self._sums: dict[str | None, float] | None = None
        self._rows = 0

    def add(self, values: Any, rows: int) -> None:
        """Add what the metric returned for a batch.

        Raises:
            TypeError: values that are no numbers. ValueError: other names than those of the first batch.
        """
        values = values if isinstance(values, Mapping) else {None: values}
        numbers = {name: _number(value, name) for name, value in values.items()}
        if self._sums is None:
            unknown = [] if isinstance(self._reduction, str) else [k for k in self._reduction if k not in numbers]
            if unknown:
                raise ValueError(f"reduction names {unknown[0]!r}, but the metric returns {_names(numbers)}")
            self._sums = dict.fromkeys(numbers, 0.0)
        if numbers.keys() != self._sums.keys():
            raise ValueError(f"the metric returned {_names(self._sums)} before, but now {_names(numbers)}")
        for name, number in numbers.items():
            if rows or self._rule(name) == "sum":  # the mean over no rows is not a number
                self._sums[name] += number * (rows if self._rule(name) == "mean" else 1)
        self._rows += rows

    def _rule(self, name: str | None) -> str:
        return self._reduction if isinstance(self._reduction, str) else self._reduction.get(name or "", "mean")

    def merge(self, other: "Totals") -> None:
        """Add those of another process."""
        if other._sums is None:
            return
        if self._sums is None:
            self._sums, self._rows = dict(other._sums), other._rows
            return
        if self._sums.keys() != other._sums.keys():
            raise ValueError(
                f"the metric returns {_names(self._sums)} in one process, but {_names(other._sums)} in another"
            )
        for name, number in other._sums.items():
            self._sums[name] += number
        self._rows += other._rows

    def result(self) -> float | dict[str, float]:
        """Return the number, or a number for each name.

        Raises:
            ValueError: there were no rows.
        """
        if self._sums is None or not self._rows:
            raise ValueError("nothing to evaluate: expected at least one batch with rows")
        results: dict[Any, float] = {}
        for name, total in self._sums.items():
            results[name] = total / self._rows if self._rule(name) == "mean" else total
        return results.get(None, results)


def _number(value: Any, name: str | None) -> float:
    what = "the metric" if name is None else f"the metric's {name!r}"
    if hasattr(value, "__float__"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # a tensor or an array of several numbers
            return float(value)
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    expected = "expected a number, a 0-dim tensor, or a dict of these"
    raise TypeError(f"{what} returned {type(value).__name__}{shape}: {expected}")


def _names(numbers: Mapping[Any, float]) -> str:
    return "a number" if None in numbers else f"numbers for {list(numbers)}"
