"""How long the first steps of a model take, as multiples of a later one: they look for more, and make the replicas.

    python benchmarks/first_steps.py [--sizes 1 10 30 100]

Each model trains on two replicas in one memory: forward, loss, backward. A step of the plain module is timed in the
same way: its first step is slower than its later ones, too. A wrapper's first steps happen once, so each round has a
new copy of the model, of the plain one and of the wrapped one in turn. Lower quartiles are compared.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import unisono
from unisono.console.tables import table

_WIDTHS = {1: 160, 10: 512, 30: 768, 100: 1280}  # of a transformer's layer, by millions of parameters
_STEPS = 6  # of which the last half are steady


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = "of the transformers, in millions of parameters (default: 1 10 30)"
    parser.add_argument("--sizes", type=int, nargs="+", choices=[*_WIDTHS], default=[1, 10, 30], help=sizes)
    parser.add_argument("--rounds", type=int, default=8, help="new copies of each model (default: %(default)s)")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: expected 2 or more")
    rows = []
    for name, model, inputs in models(options.sizes):
        parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        found = multiples(model, inputs, options.rounds)
        rows.append([name, f"{parameters:.1f}", *(f"{each:.2f}" for each in found["wrapped"] + found["plain"][:1])])
        print(f"{name}, {parameters:.1f} million parameters: timed", flush=True)
    columns = ["model", "million parameters", "first", "second", "third", "plain's first"]
    print("\nMultiples of a later step\n")
    print(table(columns, rows, text_columns=1))


def models(sizes: list[int]) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield a name, a model and its inputs."""
    torch.manual_seed(0)
    for size in sizes:
        width = _WIDTHS[size]
        layers = max(1, round(size * 1e6 / (12 * width**2)))
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.0, batch_first=True)
        yield "transformer", nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.randn(8, 32, width)
    yield "with nested data", WithNestedData(100_000), torch.randn(64, 64)


class WithNestedData(nn.Module):
    """Layers, and a dict in dicts of so many entries, as a vocabulary's prefixes are."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.ReLU())))
        tens = range(10)
        self.prefixes: Any = {i: {j: {k: k for k in tens} for j in tens} for i in range(entries // 100)}

    def forward(self, x: torch.Tensor) -> Any:
        """Return features."""
        return self.layers(x)


def multiples(model: nn.Module, inputs: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the times of the first three steps as multiples of a later one's, of the plain and the wrapped model."""
    wrap: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain": lambda module: module,
        "wrapped": lambda module: unisono.DataParallel(module, ["cpu", "cpu"]),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in wrap}
    for _ in range(rounds + 1):
        for name, of in wrap.items():
            wrapped = of(copy.deepcopy(model))
            found[name].append([seconds_of_step(wrapped, inputs) for _ in range(_STEPS)])
    return {name: _multiples(of_rounds[1:]) for name, of_rounds in found.items()}


def _multiples(rounds: list[list[float]]) -> list[float]:
    steady = _quartile([seconds for times in rounds for seconds in times[_STEPS // 2 :]])
    return [_quartile([times[k] for times in rounds]) / steady for k in range(3)]


def _quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def seconds_of_step(model: nn.Module, inputs: torch.Tensor) -> float:
    """Return the seconds of a step."""
    began = time.perf_counter()
    model(inputs).square().mean().backward()
    seconds = time.perf_counter() - began
    model.zero_grad()
    return seconds


if __name__ == "__main__":
    main()
