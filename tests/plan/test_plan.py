"""The model behind `unisono plan`: its limits, a simulation of the pipeline as its oracle, and published figures."""

import itertools
import math
import random
from argparse import ArgumentTypeError
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.benchmarks import benchmark
from unisono.plan.allreduce import ALGORITHMS, halving_doubling, ring, tree, two_level
from unisono.plan.links import BYTES, LINKS, SECONDS, Cluster, Link, parse_link, parse_quantity
from unisono.plan.plans import ScalingPlan
from unisono.plan.prediction import BEST, StepCost, counts_up_to, exposed_s, predict

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

INSIDE = Link(5e-6, 16e9)
BETWEEN = Link(10e-6, 3e9)
CLUSTER = Cluster(INSIDE, BETWEEN, 8)
PERFECT = Link(0.0, math.inf)
STEP = StepCost(compute_s=0.3, backward_s=0.2, gradient_bytes=100e6, bucket_bytes=25e6)

algorithms = pytest.mark.parametrize("algorithm", [*ALGORITHMS, BEST])


@pytest.mark.parametrize("all_reduce", ALGORITHMS.values())
@pytest.mark.parametrize("devices_per_machine", [1, 3, 8, 2048])
def test_nothing_beats_the_lower_bounds(all_reduce, devices_per_machine):
    """Latency: a value needs log2(n) steps. Bandwidth: 2 (n - 1) / n of the bytes, on equal links."""
    link = Link(1e-5, 1e9)
    cluster = Cluster(link, link, devices_per_machine)
    assert all_reduce(cluster, 1, 1e9) == 0
    for num_devices in range(2, 70):
        assert all_reduce(cluster, num_devices, 0.0) >= math.log2(num_devices) * 1e-5
        if all_reduce is not two_level or devices_per_machine in (1, 2048):  # else a machine's devices share the bytes
            assert all_reduce(cluster, num_devices, 1e6) >= 2 * (num_devices - 1) / num_devices * 1e-3


ALIKE = Cluster(Link(0.5, 100.0), Link(0.5, 100.0), 2048)  # all devices in one machine
BETWEEN_ONLY = Cluster(PERFECT, Link(0.0, 3e9), 8)


@pytest.mark.parametrize(
    ("found_s", "expected_s"),
    [
        (ring(ALIKE, 4, 1000.0), 6 * (0.5 + 250 / 100)),
        (ring(CLUSTER, 32, 0.0), (62 - 6) * 5e-6 + 6 * 10e-6),  # few steps are between machines
        (ring(BETWEEN_ONLY, 32, 3e9), 2 * 31 / 32),  # at the pace of the narrowest link
        (ring(BETWEEN_ONLY, 16, 3e9), 2 * 15 / 16),
        (tree(CLUSTER, 32, 3e9), 2 * 3 * 5e-6 + 2 * 2 * 10e-6 + 2.0),
        (two_level(BETWEEN_ONLY, 16, 3e9), 1.0),  # each of two machines sends half of it twice
        (halving_doubling(Link(0.5, 100.0), 4, 1000.0), 2 * ((0.5 + 5) + (0.5 + 2.5))),
        (halving_doubling(Link(0.5, 100.0), 5, 1000.0), 17 + 2 * (0.5 + 10)),
        (halving_doubling(Link(0.5, 100.0), 1, 1000.0), 0),
    ],
)
def test_times_by_hand(found_s, expected_s):
    assert found_s == pytest.approx(expected_s)


# A step


def simulated_end_s(ready_s: list[float], reduce_s: list[float]) -> float:
    """Play it: the channel takes the next bucket when it is free and the bucket is full."""
    clock = 0.0
    for ready, seconds in zip(ready_s, reduce_s, strict=True):
        clock = max(clock, ready) + seconds
    return clock


def test_overlap_is_what_a_simulation_of_the_channel_gives():
    draw = random.Random(0)
    for _ in range(500):
        num_buckets = draw.randint(1, 12)
        ready_s = list(itertools.accumulate(draw.random() for _ in range(num_buckets)))
        reduce_s = [draw.expovariate(draw.choice([0.2, 2, 20])) for _ in range(num_buckets)]
        expected = max(0.0, simulated_end_s(ready_s, reduce_s) - ready_s[-1])
        assert exposed_s(ready_s, reduce_s, ready_s[-1]) == pytest.approx(expected)


@algorithms
@pytest.mark.parametrize("strong", [False, True])
def test_a_prediction_is_what_a_simulation_gives(algorithm, strong):
    for num_devices in counts_up_to(1024):
        one = predict(STEP, CLUSTER, num_devices, algorithm, strong=strong)
        share = num_devices if strong else 1
        reduce_s = [ALGORITHMS[one.algorithm](CLUSTER, num_devices, 25e6)] * 4
        ended_s = simulated_end_s([0.2 / share * k / 4 for k in (1, 2, 3, 4)], reduce_s)
        assert one.step_s == pytest.approx(0.1 / share + max(0.2 / share, ended_s))
        assert one.efficiency_without_overlap == pytest.approx(0.3 / share / (0.3 / share + sum(reduce_s)))
        assert one.step_s >= predict(STEP, CLUSTER, num_devices, strong=strong).step_s, "the best is better"


def test_buckets_have_all_bytes_and_the_last_is_full_when_backward_ends():
    for gradient_bytes in (1.0, 25e6, 25e6 + 1, 99e6, 100e6):
        step = replace(STEP, gradient_bytes=gradient_bytes)
        assert math.fsum(step.buckets()) == pytest.approx(gradient_bytes)
        assert all(0 < size <= 25e6 for size in step.buckets())
        assert step.ready_s()[-1] == pytest.approx(0.2)
        assert step.ready_s() == sorted(step.ready_s())


# A plan


SLOW = Cluster(INSIDE, Link(10e-6, 0.5e9), 8)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            ScalingPlan(STEP, SLOW, most=1024),
            "above 90 % up to 8 devices; beyond that, the bandwidth between machines limits it",
        ),
        (
            ScalingPlan(replace(STEP, gradient_bytes=1e6), Cluster(INSIDE, Link(0.01, 100e9), 8), "ring", most=1024),
            "the latency between machines limits it",
        ),
        (
            ScalingPlan(STEP, Cluster(Link(5e-6, 0.2e9), BETWEEN, 2048)),
            "on 2 devices; the bandwidth inside a machine limits it",
        ),
        (ScalingPlan(STEP, CLUSTER), "above 90 % up to 8 devices, the largest"),
    ],
)
def test_the_conclusion_names_the_limit(plan, says):
    assert says in plan.conclusion()


def test_the_conclusion_is_right_about_the_improvement_and_where_strong_scaling_turns():
    better = ScalingPlan(STEP, replace(SLOW, between=Link(10e-6, 1e9)), most=1024).good_up_to()
    said = f"If that were twice as good, efficiency would stay above 90 % up to {better:,} devices"
    assert said in ScalingPlan(STEP, SLOW, most=1024).conclusion()

    plan = ScalingPlan(STEP, CLUSTER, strong=True, most=1024)
    speeds = {one.num_devices: one.num_devices * one.efficiency for one in plan.predictions}
    fastest = max(speeds, key=speeds.__getitem__)
    assert 1 < fastest < 1024
    assert f"More than {fastest:,} devices are slower than {fastest:,}." in plan.conclusion()


def test_links_that_limit_together_are_named_together():
    """In a ring the narrowest link sets the pace: to better one of two equal ones gains nothing."""
    equal = Link(0.0, 0.3e9)
    plan = ScalingPlan(replace(STEP, bucket_bytes=1e9), Cluster(equal, equal, 2), "ring", most=1024)
    what, better = plan._limit(1024)
    assert better is None
    assert what.startswith("no single figure")


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [("180ms", SECONDS, 0.18), ("1e-3 s", SECONDS, 1e-3), (".5us", SECONDS, 5e-7), ("25MiB", BYTES, 25 * 2**20)]
    + [
        (text, SECONDS, None)
        for text in ("", "180", "ms", "0ms", "-1ms", "1,5ms", "nan s", "inf s", "1e999s", "1 Mb", "1ms2", "1_0ms")
    ],
)
def test_quantities(text, units, value):
    with nullcontext() if value else pytest.raises(ArgumentTypeError, match="expected a number above 0 with one of"):
        assert parse_quantity(text, units) == pytest.approx(value)


def test_links_by_name_and_by_figures():
    assert parse_link("25gbe") == LINKS["25gbe"] == Link(9.6e-6, 3.125e9)
    assert parse_link("1us, 8Gbit/s") == Link(1e-6, 1e9)
    assert parse_link("0us,8Gbit/s") == Link(0.0, 1e9)  # a perfect latency was refused
    for text in ("10us", "10us,25Gbit/s,1", "25gb", "10us,0GB/s", "25Gbit/s,10us", "10us,1e999GB/s", "1e999s,1GB/s"):
        with pytest.raises(ArgumentTypeError, match="expected"):
            parse_link(text)


# Published runs

published = benchmark("published")


def test_every_published_figure_has_a_source_that_is_listed_or_is_marked_as_assumed():
    runs = published.DATA["runs"]
    figures = [figure for run in runs for key, figure in run.items() if key not in ("name", "reports")]
    reports = [report for run in runs for report in run["reports"]]
    assert len(figures) + len(reports) > 70
    assert all(("source" in figure) != bool(figure.get("assumed")) for figure in figures)
    cited = {figure["source"].split(":")[0].split(",")[0] for figure in figures + reports if "source" in figure}
    assert cited == set(published.DATA["sources"])
    assert not any("assumed" in report for report in reports)


def test_the_documentation_has_the_table_as_it_is():
    page = (BENCHMARKS / "published.md").read_text(encoding="utf-8")
    assert published.document() in page, "python benchmarks/published.py"
