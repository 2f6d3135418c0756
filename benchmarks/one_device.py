"""The cost of the wrapper on one device: `DataParallel(model, ["cpu"])` against the model, in one run.

    python benchmarks/one_device.py

It should not grow with the model, so two sizes are measured. The goal is at most 20 µs a forward. On an accelerator
(gpu_figures.py) the time until the work is queued is measured; the queue is empty when a forward begins, so that no
forward waits for a place in it.
"""

import argparse
from collections.abc import Callable

import torch
from timed import timed
from torch import nn

from unisono.console.tables import table
from unisono.data_parallel import DataParallel
from unisono.primitives.measured_shares import lower_quartile
from unisono.runtime.devices import wait_for_work

GOAL_US = 20
_REPEATS = 2000
_WARM_UP = 20
_CPU = torch.device("cpu")

MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "one Linear": lambda: (nn.Linear(8, 8), torch.zeros(4, 8)),
    "52 thin layers": lambda: (nn.Sequential(*(nn.Linear(16, 16) for _ in range(52))), torch.zeros(4, 16)),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    costs = {name: added_us(name) for name in MODELS}
    rows = [[name, f"{cost:.1f}", "met" if cost <= GOAL_US else "missed"] for name, cost in costs.items()]
    print('The time that `DataParallel(model, ["cpu"])` adds to a forward.\n')
    print(table(["model", "µs", f"at most {GOAL_US}"], rows))


def added_us(name: str, device: torch.device = _CPU, repeats: int = _REPEATS) -> float:
    """Return the microseconds that the wrapper adds to a forward of a model."""
    model, batch = MODELS[name]()
    model, batch = model.to(device), batch.to(device)
    wrapped = DataParallel(model, [device])
    seconds = timed(
        {"plain": lambda: model(batch), "wrapped": lambda: wrapped(batch)},
        repeats,
        num_untimed=_WARM_UP,
        before=lambda: wait_for_work(device),
    )
    return 1e6 * (lower_quartile(seconds["wrapped"]) - lower_quartile(seconds["plain"]))


if __name__ == "__main__":
    main()
