"""A plan: the prediction of one step on several numbers of devices, as a table and in words."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from unisono.bench.machine import no_verdict
from unisono.console.tables import table
from unisono.plan.allreduce import ALGORITHMS
from unisono.plan.links import Cluster, Link
from unisono.plan.prediction import BEST, Prediction, StepCost, counts_up_to, predict

GOOD = 0.9

_WEAK = "Weak scaling: every device has as many rows (samples) as one device alone, so the whole batch grows."
_STRONG = (
    "Strong scaling: the devices share one device's batch; computing time is assumed to be proportional to rows "
    "(samples)."
)


@dataclass(frozen=True)
class ScalingPlan:
    """A step, the cluster that runs it, and how."""

    step: StepCost
    cluster: Cluster
    algorithm: str = BEST  # one of `ALGORITHMS`, or the best of them for each number of devices
    strong: bool = False  # whether the devices share the batch of one
    most: int = 8  # the largest number of devices
    origin: str = "as given"  # in words, where the step's figures are from
    disturbance: str = ""  # in words, the other programs that kept cores busy while the step was measured

    @property
    def counts(self) -> list[int]:
        """The numbers of devices."""
        return counts_up_to(self.most)

    @cached_property
    def predictions(self) -> list[Prediction]:
        """The prediction for each of `counts`."""
        return self.with_algorithm(self.algorithm)

    def with_algorithm(self, algorithm: str) -> list[Prediction]:
        """Return the predictions with another all-reduce."""
        return [predict(self.step, self.cluster, count, algorithm, strong=self.strong) for count in self.counts]

    def good_up_to(self) -> int:
        """Return the last count before efficiency first falls below 90 %."""
        good_for = 1
        for prediction in self.predictions:
            if prediction.efficiency < GOOD:
                break
            good_for = prediction.num_devices
        return good_for

    def assumptions(self) -> str:
        """Return the assumptions of the prediction, and how good its measurement is, in one paragraph."""
        step, cluster = self.step, self.cluster
        num_machine = cluster.devices_per_machine
        inside = f" (inside: {cluster.inside})" if num_machine > 1 else ""
        between = f"; between machines: {cluster.between}" if cluster.num_machines(self.most) > 1 else ""
        disturbed = f"; {self.disturbance}" if self.disturbance else ""
        buckets = "one bucket" if len(step.buckets()) == 1 else f"{len(step.buckets())} buckets"
        return (
            f"A step computes for {1000 * step.compute_s:.4g} ms on one device, {1000 * step.backward_s:.4g} ms of it "
            f"backward, and has {step.gradient_bytes / 1e6:.4g} MB of gradients, in {buckets}: {self.origin}"
            f"{disturbed}. {num_machine} device{'s' * (num_machine > 1)} a machine{inside}{between}. "
            f"{_STRONG if self.strong else _WEAK}"
        )

    def to_table(self) -> str:
        """Return the predictions, with the efficiency of each all-reduce."""
        header = ["devices", "machines", "all-reduce", "reducing, ms", "exposed, ms", "step, ms", "efficiency"]
        header += ["speed-up", *ALGORITHMS, "no overlap"]
        others = [self.with_algorithm(name) for name in ALGORITHMS]
        rows = []
        for place, one in enumerate(self.predictions):
            row = [str(one.num_devices), str(self.cluster.num_machines(one.num_devices))]
            row += ["" if one.num_devices == 1 else one.algorithm]
            row += [two_digits(1000 * seconds) for seconds in (one.communication_s, one.exposed_s, one.step_s)]
            row += [percent(one.efficiency), two_digits(one.num_devices * one.efficiency)]
            row += [percent(other[place].efficiency) for other in others]
            rows.append([*row, percent(one.efficiency_without_overlap)])
        return table(header, rows, text_columns=0)

    def conclusion(self) -> str:
        """Return how far it scales, what limits it there, and which improvement would help.

        There is no verdict where other programs have disturbed the measurement of the step.
        """
        if self.disturbance:
            return no_verdict(self.disturbance)
        good_for = self.good_up_to()
        if good_for == self.most:
            said = f"Efficiency stays above 90 % up to {good_for:,} devices, the largest number in the table."
            return f"{said} {_UPPER_BOUND}"
        first_bad = self.predictions[self.counts.index(good_for) + 1]
        said = f"Efficiency stays above 90 % up to {good_for:,} devices; beyond that,"
        if good_for == 1:
            shown = percent(first_bad.efficiency)
            said = f"Efficiency is {'just below' if shown == '90 %' else 'only'} {shown} on 2 devices;"
        what, better = self._limit(first_bad.num_devices)
        helped = better.good_up_to() if better is not None else good_for
        remedy = f" If that were twice as good, efficiency would stay above 90 % up to {helped:,} devices."
        if helped == good_for:
            remedy = " Twice as good would not be enough." if better is not None else ""
        fastest = max(self.predictions, key=lambda one: one.num_devices * one.efficiency).num_devices
        peak = "" if fastest == self.most else f" More than {fastest:,} devices are slower than {fastest:,}."
        if fastest == 1:
            peak = " One device is faster than several."
        return f"{said} {what} limits it.{remedy}{peak} {_UPPER_BOUND}"

    def _limit(self, num_devices: int) -> tuple[str, "ScalingPlan | None"]:
        """Return which figure of the links costs the most time on so many devices, and the plan with one twice as good.

        The cost of a figure is the time that would be saved if it alone were perfect.
        """
        now = predict(self.step, self.cluster, num_devices, self.algorithm, strong=self.strong)
        gains: dict[tuple[str, str], float] = {}
        for place in ("inside", "between"):
            for figure in ("latency", "bandwidth"):
                better = replace(self, cluster=_with_improved(self.cluster, place, figure, math.inf))
                then = predict(better.step, better.cluster, num_devices, self.algorithm, strong=self.strong)
                gains[place, figure] = now.step_s - then.step_s
        place, figure = max(gains, key=lambda key: gains[key])
        if gains[place, figure] < 0.01 * now.exposed_s:
            return "no single figure, but the links inside and between machines together,", None
        where = "inside a machine" if place == "inside" else "between machines"
        return f"the {figure} {where}", replace(self, cluster=_with_improved(self.cluster, place, figure, 2.0))


_UPPER_BOUND = "(Real runs lose more: docs/plan.md says what is left out.)"


def _with_improved(cluster: Cluster, place: str, figure: str, factor: float) -> Cluster:
    link: Link = getattr(cluster, place)
    if figure == "latency":
        link = replace(link, latency_s=link.latency_s / factor)
    else:
        link = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
    return replace(cluster, inside=link) if place == "inside" else replace(cluster, between=link)


def percent(fraction: float) -> str:
    """Return a fraction in per cent: a model is not worth more than two digits.

    >>> percent(0.9803), two_digits(1003.8), two_digits(7.84)
    ('98 %', '1,000', '7.8')
    """
    return f"{100 * fraction:.0f} %"


def two_digits(value: float) -> str:
    """Return a figure with two digits, hundredths at most."""
    rounded = round(float(f"{value:.2g}"), 2)
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def document(plan: ScalingPlan, title: str, *, picture: bool) -> str:
    """Return plan.md, with the picture beside it where there is one."""
    parts = [f"# {title}", plan.assumptions(), *["![Efficiency and time of a step](plan.png)"][: int(picture)]]
    return "\n\n".join([*parts, plan.to_table(), plan.conclusion()]) + "\n"
