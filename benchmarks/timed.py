"""How the other files here time functions: they take turns, and their lower quartiles are compared."""

import time
from collections.abc import Callable, Mapping

from unisono.bench.results import in_turn


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
