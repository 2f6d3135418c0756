"""Predictions of published runs beside their reports.

All figures are in `published.toml`; its [links] are the links that have names on the command line. A figure there is
`{ value = ..., source = ... }` or `{ value = ..., assumed = ... }`.
"""

import functools
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from unisono.console.tables import table
from unisono.plan.links import Cluster, Link
from unisono.plan.plans import percent
from unisono.plan.prediction import StepCost, predict

CLOSE_POINTS = 10.0
_BYTES_PER_PARAMETER = 4  # all of these runs have gradients in single precision


@dataclass(frozen=True)
class Comparison:
    """One report beside its prediction; efficiencies are relative to `reference_devices`."""

    run: str
    reference_devices: int
    num_devices: int
    reported: float
    predicted: float

    @property
    def error_points(self) -> float:
        """Prediction less report, in points of efficiency."""
        return 100 * (self.predicted - self.reported)

    @property
    def close(self) -> bool:
        """Whether the prediction is off by ten points at most."""
        return abs(self.error_points) <= CLOSE_POINTS


@functools.cache
def data() -> dict[str, Any]:
    """Return the contents of published.toml."""
    return tomllib.loads(resources.files("unisono.plan").joinpath("published.toml").read_text(encoding="utf-8"))


def links() -> dict[str, Link]:
    """Return the links that have names.

    >>> links()["25gbe"].bandwidth_bytes_per_s
    3125000000.0
    """
    return {
        name: Link(figures["latency_s"]["value"], figures["bandwidth_bytes_per_s"]["value"])
        for name, figures in data()["links"].items()
    }


def comparisons() -> list[Comparison]:
    """Return every report beside its prediction."""
    return [comparison for run in data()["runs"] for comparison in _compared(run)]


def document() -> str:
    """Return the table of all reports, the quality of the predictions, and the assumptions."""
    compared = comparisons()
    rows = []
    for one in compared:
        row = [one.run, f"{one.reference_devices} to {one.num_devices}", percent(one.reported), percent(one.predicted)]
        speed_off = f"{100 * (one.predicted / one.reported - 1):+.1f} %"
        rows.append([*row, f"{one.error_points:+.1f}", speed_off, "" if one.close else "miss"])
    header = ["run", "devices", "reported", "predicted", "points off", "speed off", ""]
    naive = [replace(one, predicted=1.0) for one in compared]
    judged = (
        f"Predicted efficiency: {_score(compared)}. Predicting 100 % everywhere: {_score(naive)}. Most reports are of "
        "runs that scale well, so the second is the one to beat."
    )
    assumed = "\n".join(_assumptions())
    return f"{table(header, rows)}\n\n{judged}\n\nAssumed, because no source says so:\n\n{assumed}\n"


def _score(predictions: Sequence[Comparison]) -> str:
    num_close = sum(one.close for one in predictions)
    points = statistics.mean(abs(one.error_points) for one in predictions)
    return f"{num_close} of {len(predictions)} within {CLOSE_POINTS:g} points, {points:.1f} off on average"


def _compared(run: dict[str, Any]) -> list[Comparison]:
    figures = {name: figure["value"] for name, figure in run.items() if isinstance(figure, dict)}
    known = links()
    cluster = Cluster(known[figures["inside"]], known[figures["between"]], figures["devices_per_machine"])
    compute_s = figures["rows_per_device"] / figures["rows_per_s"]
    backward_s = figures["backward_fraction"] * compute_s
    step = StepCost(compute_s, backward_s, _BYTES_PER_PARAMETER * figures["parameters"], figures["bucket_bytes"])

    def efficiency(num_devices: int) -> float:
        return predict(step, cluster, num_devices, figures["all_reduce"]).efficiency

    reference = figures.get("reference_devices", 1)
    result = []
    for report in run["reports"]:
        num_devices = report["devices"]
        speed = report.get("rows_per_s", 0.0) / (num_devices * figures["rows_per_s"])
        reported = report.get("efficiency", speed)
        predicted = efficiency(num_devices) / efficiency(reference)
        result.append(Comparison(run["name"], reference, num_devices, reported, predicted))
    return result


def _assumptions() -> Iterator[str]:
    """Yield a line for each run and each link that something is assumed of."""
    links = [(f"link {name}", figures) for name, figures in data()["links"].items()]
    for name, figures in [*((run["name"], run) for run in data()["runs"]), *links]:
        assumed = [(key, figure) for key, figure in figures.items() if "assumed" in figure]
        if assumed:
            yield f"- {name}: " + "; ".join(f"{key} {of['value']} ({of['assumed']})" for key, of in assumed)
