"""How many rows of a batch each replica gets.

A *share* is a number of rows; the shares of a batch add up to the batch, exactly. Three rules, and one that finds
weights by measuring (measured_shares.py):

    "chunk"    torch's own: ceil(rows / n) rows each until no rows are left, so possibly fewer shares than devices
    "even"     shares differ by one row at most
    weights    in proportion to the given numbers; a weight of 0 leaves that replica idle
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, cast, get_args

import torch

from unisono.runtime.errors import log_once, shown

ShareRule: TypeAlias = Literal["chunk", "even", "measured"]
Shares: TypeAlias = ShareRule | Sequence[float]
MEASURED = "measured"
_MOST_SHOWN = 16  # replicas whose rows a message has
RULES = get_args(ShareRule)
_EXPECTED = 'expected "chunk", "even", "measured" or'


def check_shares(shares: object, num_replicas: int | None) -> Shares:
    """Return `shares` in its normal form: a string, or a tuple of floats.

    Any number of weights is accepted if `num_replicas` is None.

    Raises:
        TypeError: neither a string nor a sequence of numbers.
        ValueError: an unknown rule, another number of weights than replicas, a negative or non-finite weight, or
            no weight above 0.
    """
    if isinstance(shares, str):
        if shares not in RULES:
            raise ValueError(f"shares={shares!r}: {_EXPECTED} one weight for each device")
        return cast(ShareRule, shares)
    if not isinstance(shares, Sequence) or not all(
        isinstance(weight, int | float) and not isinstance(weight, bool) for weight in shares
    ):
        raise TypeError(f"shares={shown(shares)}: {_EXPECTED} a sequence of numbers, one for each device")
    try:
        weights = tuple(map(float, shares))
    except OverflowError:  # an int beyond the range of floats
        weights = (math.inf,) * len(shares)
    if num_replicas is not None and len(weights) != num_replicas:
        raise ValueError(
            f"shares={shares!r} has {len(weights)} weight{'s' * (len(weights) != 1)} for {num_replicas} devices: "
            "give one for each device"
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise ValueError(f"shares={shares!r}: expected finite weights, 0 or more, at least one of them above 0")
    return weights


def check_parts(parts: object) -> int:
    """Return the number of parts of a shard; raise TypeError or ValueError if it is none."""
    if isinstance(parts, bool) or not isinstance(parts, int):
        raise TypeError(
            f"parts={shown(parts)}: expected a whole number: into how many parts each replica divides its rows"
        )
    if parts < 1:
        raise ValueError(f"parts={parts!r}: expected 1 (no division) or more")
    return parts


def split_rows(rows: int, num_replicas: int, shares: Shares = "chunk") -> list[int]:
    """Return how many of `rows` rows each replica gets; the result has `num_replicas` entries that sum to `rows`.

    >>> split_rows(10, 4), split_rows(10, 4, "even"), split_rows(30, 2, [2, 1])
    ([3, 3, 3, 1], [3, 3, 2, 2], [20, 10])

    "chunk" is the rule of `torch.Tensor.chunk`; weights are rounded by the largest remainder (Hamilton's method),
    ties to the lower replica.
    """
    if shares == "chunk":
        size = max(1, math.ceil(rows / num_replicas))
        return [max(0, min(size, rows - i * size)) for i in range(num_replicas)]
    if shares == "even":
        quotient, remainder = divmod(rows, num_replicas)
        return [quotient + (i < remainder) for i in range(num_replicas)]
    # Weights as whole numbers in the same proportion: with rounded quotas a tie would not always be one. (A float's
    # denominator is a power of two, so the largest is a multiple of all.)
    ratios = [float(weight).as_integer_ratio() for weight in shares]
    denominator = max(below for _, below in ratios)
    weights = [above * (denominator // below) for above, below in ratios]
    total = sum(weights)
    sizes = [rows * weight // total for weight in weights]
    by_remainder = sorted(range(num_replicas), key=lambda i: (-(rows * weights[i] % total), i))
    for i in by_remainder[: rows - sum(sizes)]:
        sizes[i] += 1
    return sizes


class IdleDevices:
    """Says once if full batches leave a device without rows; a short last batch may."""

    def __init__(self) -> None:
        self._most_rows = 0.0

    def say_nothing(self) -> None:
        self._most_rows = math.inf

    def see(
        self, sizes: Sequence[int], devices: Sequence[torch.device], has_share: Callable[[], Sequence[bool]]
    ) -> None:
        """Look at the sizes of one batch.

        Args:
            has_share: tells for each device whether its share is more than 0.
        """
        rows = sum(sizes)
        if rows < self._most_rows:
            return
        self._most_rows = rows
        if all(sizes):
            return
        idle = [str(d) for d, size, share in zip(devices, sizes, has_share(), strict=True) if share and not size]
        if idle:
            better = 'shares="even"' if rows >= len(sizes) else f"batches of at least {len(sizes)} rows"
            batch = "1 row" if rows == 1 else f"{rows} rows"
            log_once(
                f"a batch of {batch} gives {_shown(sizes)} rows to the {len(sizes)} devices: "
                f"{len(idle)} of them ({', '.join(dict.fromkeys(idle))}) "
                f"{'stays' if len(idle) == 1 else 'stay'} idle. Use {better}."
            )


def _shown(sizes: Sequence[int]) -> str:
    more = ", ..." if len(sizes) > _MOST_SHOWN else ""
    return f"[{', '.join(map(str, sizes[:_MOST_SHOWN]))}{more}]"
