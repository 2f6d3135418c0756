"""The loss of a model of transformers over the whole batch, from those of the replicas.

Such a model takes the mean over its labels; or it divides a sum over them by a number of tokens, if it is given one:

    N   what the caller gives, `num_items_in_batch`: the Trainer counts the tokens in all batches of an optimizer's step
    n   labels of this batch that count, n_r of them in the rows of replica r

From outside it cannot be seen which of the two a model does. So replica r is given N * n_r / n, and its loss has the
weight n_r / n. A mean S_r / n_r then makes sum(S_r) / n; a sum S_r, divided by what it was given, sum(S_r) / N.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from unisono.engines.step_plan import StepPlan
from unisono.primitives.batch_types import register_batch_type

_COUNT = "num_items_in_batch"
_IGNORED = -100  # in labels, by the convention of transformers


class LabelCount:
    """A number of tokens, split among replicas in the measure of the labels in their rows."""

    def __init__(self, count: Any, of_rows: Sequence[int]) -> None:
        self.count, self.of_rows = count, of_rows

    def split(self, sizes: Sequence[int]) -> list[Any]:
        labels = _of_replicas(self.of_rows, sizes)
        total = sum(labels)
        return [self.count * (own / total) if total else self.count for own in labels]


def _no_gather(_: Sequence[Any]) -> Any:
    raise TypeError("a LabelCount is an input only")


register_batch_type(LabelCount, scatter=LabelCount.split, gather=_no_gather, rows=lambda count: len(count.of_rows))


class LabelWeights:
    """Makes the losses of a wrapper's replicas count in the measure of their labels; without labels, of their rows."""

    def __init__(self, *, shifted: bool) -> None:
        self._shifted = shifted  # whether the loss shifts labels, so that the first of each row does not count
        self._of_rows: list[int] | None = None  # in the forward that is under way

    def inputs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Take note of the labels of a forward; return its inputs, in which each replica has its number of tokens."""
        self._of_rows = _labels_of_rows(kwargs, self._shifted)
        if self._of_rows is None or kwargs.get(_COUNT) is None:
            return kwargs
        return {**kwargs, _COUNT: LabelCount(kwargs[_COUNT], self._of_rows)}

    def weighed(self, plan: StepPlan) -> StepPlan:
        """Return the plan of that forward, in which the losses have their weights."""
        amounts = None if self._of_rows is None else _of_replicas(self._of_rows, plan.sizes)
        rules = replace(plan.rules, scalars="mean", amounts=amounts)
        return replace(plan, rules=rules, part_rules=rules)


def _labels_of_rows(kwargs: dict[str, Any], shifted: bool) -> list[int] | None:
    """Return how many labels of each row count; None if there are no labels."""
    labels = kwargs.get("shift_labels")
    if labels is None:
        labels = kwargs.get("labels")
        if shifted and isinstance(labels, torch.Tensor) and labels.dim() > 1:
            labels = labels[..., 1:]
    if not isinstance(labels, torch.Tensor) or not labels.dim():
        return None
    of_rows: list[int] = labels.unsqueeze(-1).ne(_IGNORED).flatten(1).sum(1).tolist()  # waits for an accelerator
    return of_rows


def _of_replicas(of_rows: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the labels in each replica's rows."""
    return tuple([sum(of_rows[start:end]) for start, end in pairwise(accumulate(sizes, initial=0))])
