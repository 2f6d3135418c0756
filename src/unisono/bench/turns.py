"""How everything is measured here: contenders take turns, and their lower quartiles are compared.

Other programs make steps slower, never faster. So the figure of a contender is the lower quartile of its times, and its
range reaches from the fastest one to the upper quartile. Noise may be why two differ whose ranges overlap.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def upper_quartile(values: Sequence[float]) -> float:
    """Return the value that a quarter of the others are above.

    >>> upper_quartile([5.0, 1.0, 2.0, 4.0, 3.0])
    4.0
    """
    return sorted(values)[math.ceil(3 * (len(values) - 1) / 4)]


def in_turn(contenders: Sequence[_T], rounds: int) -> Iterator[_T]:
    """Yield each contender once a round: there and back again, so that none always follows the same one.

    >>> list(in_turn("abc", 2))
    ['a', 'b', 'c', 'c', 'b', 'a']
    """
    for number in range(rounds):
        yield from contenders if number % 2 == 0 else reversed(contenders)


def _seconds_of(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def timed(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    num_untimed: int = 1,
    before: Callable[[], object] = lambda: None,
    seconds_of: Callable[[Callable[[], object]], float] = _seconds_of,
) -> dict[str, list[float]]:
    """Return the seconds of the calls of each function, by name, which take turns in this process.

    So many rounds before those are not timed, nor is what is called `before` each call. `seconds_of` calls a function
    and says how long it took; by default by this process's clock.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for name in in_turn([*functions], num_untimed + rounds):
        before()
        times[name].append(seconds_of(functions[name]))
    return {name: seconds[num_untimed:] for name, seconds in times.items()}
