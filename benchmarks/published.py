"""How far `unisono plan` predicts published runs right: the table of reports and predictions in published.md.

    python benchmarks/published.py

All figures are in published.toml, as `{ value = ..., source = ... }` or `{ value = ..., assumed = ... }`.
"""

import argparse
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unisono.console.tables import table
from unisono.plan.links import LINKS, Cluster
from unisono.plan.prediction import StepCost, predict

CLOSE_POINTS = 10.0
DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_BYTES_PER_PARAMETER = 4  # all of these runs have gradients in single precision


class Comparison(NamedTuple):
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
    def is_close(self) -> bool:
        return abs(self.error_points) <= CLOSE_POINTS


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(document(), end="")


def document() -> str:
    """Return the table of all reports, the quality of the predictions, and the assumptions."""
    compared = comparisons()
    rows = []
    for one in compared:
        row = [one.run, f"{one.reference_devices} to {one.num_devices}", *(f"{100 * part:.1f} %" for part in one[3:])]
        speed_off = f"{100 * (one.predicted / one.reported - 1):+.1f} %"
        rows.append([*row, f"{one.error_points:+.1f}", speed_off, "" if one.is_close else "miss"])
    header = ["run", "devices", "reported", "predicted", "points off", "speed off", ""]
    naive = [one._replace(predicted=1.0) for one in compared]
    judged = (
        f"Predicted efficiency: {_score(compared)}. Predicting 100 % everywhere: {_score(naive)}. Most reports are of "
        "runs that scale well, so the second is the one to beat."
    )
    assumed = "\n".join(_assumptions())
    return f"{table(header, rows)}\n\n{judged}\n\nAssumed, because no source says so:\n\n{assumed}\n"


def comparisons() -> list[Comparison]:
    """Return every report beside its prediction."""
    return [comparison for run in DATA["runs"] for comparison in _compared(run)]


def _compared(run: dict[str, Any]) -> Iterator[Comparison]:
    figures = {name: figure["value"] for name, figure in run.items() if isinstance(figure, dict)}
    cluster = Cluster(LINKS[figures["inside"]], LINKS[figures["between"]], figures["devices_per_machine"])
    compute_s = figures["rows_per_device"] / figures["rows_per_s"]
    backward_s = figures["backward_fraction"] * compute_s
    step = StepCost(compute_s, backward_s, _BYTES_PER_PARAMETER * figures["parameters"], figures["bucket_bytes"])

    def efficiency(num_devices: int) -> float:
        return predict(step, cluster, num_devices, figures["all_reduce"]).efficiency

    reference = figures.get("reference_devices", 1)
    for report in run["reports"]:
        num_devices = report["devices"]
        speed = report.get("rows_per_s", 0.0) / (num_devices * figures["rows_per_s"])
        reported = report.get("efficiency", speed)
        yield Comparison(run["name"], reference, num_devices, reported, efficiency(num_devices) / efficiency(reference))


def _score(predictions: Sequence[Comparison]) -> str:
    num_close = sum(one.is_close for one in predictions)
    points = statistics.mean(abs(one.error_points) for one in predictions)
    return f"{num_close} of {len(predictions)} within {CLOSE_POINTS:g} points, {points:.1f} off on average"


def _assumptions() -> Iterator[str]:
    """Yield a line for each run; something is assumed of all of them."""
    for run in DATA["runs"]:
        assumed = [(key, figure) for key, figure in run.items() if "assumed" in figure]
        yield f"- {run['name']}: " + "; ".join(f"{key} {of['value']} ({of['assumed']})" for key, of in assumed)


if __name__ == "__main__":
    main()
