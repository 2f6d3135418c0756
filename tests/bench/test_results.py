"""Figures from figures: lower quartiles, ranges, tables, goals, advice, chart."""

from functools import partial

import pytest

from helpers.benchmarks import benchmark
from unisono.bench import chart, report
from unisono.bench.report import advice
from unisono.bench.results import Line, Results, Workload

MACHINE = {
    "processor": "Some $ Processor", "cores": 2, "memory_gib": 8, "system": "Linux x86_64", "python": "3.11.0",
    "torch": "2.13.0", "unisono": "0.1.0",
}  # fmt: skip


def line(contender: str, milliseconds: float, replicas: int = 2, **more: object) -> Line:
    """A contender with five turns, one of which was disturbed."""
    turns = [milliseconds / 1000 * factor for factor in (1.01, 1.0, 0.98, 3.0, 1.02)]
    return Line(contender, 1 if contender == "plain" else replicas, turns, memory_bytes=2**20 * 300, **more)


def results(*workloads: Workload) -> Results:
    return Results(MACHINE, {"rounds": 3, "seconds_per_turn": 2.0}, "PSS", list(workloads))


def test_figures_and_ranges():
    one, other = line("plain", 100), line("ddp", 200)
    assert one.step_s == pytest.approx(0.1)  # the lower quartile
    assert one.range_s == pytest.approx((0.098, 0.102))
    assert one.speed_of(other) == pytest.approx(2.0)
    assert one.speed_range_of(other) == pytest.approx((0.196 / 0.102, 0.204 / 0.098))


@pytest.mark.parametrize(
    ("turns", "is_lost"),
    [
        ([1.2, 1.3, 1.4], False),  # slower in each turn
        ([0.98, 1.3, 1.4], True),
        ([1.0, 1.01, 1.02], False),  # the ranges overlap, but no difference between them would matter
        ([0.37, 0.5, 90.0], True),  # a row with such a range was called 3.41 times as slow as ours
    ],
)
def test_noise_may_be_why_ranges_overlap(turns: list[float], is_lost: bool):
    one, other = Line("plain", 1, [1.0, 1.01, 1.02]), Line("threads", 2, turns)
    assert one.is_lost_in_noise(other) is other.is_lost_in_noise(one) is is_lost


def test_functions_take_turns():
    calls: list[str] = []
    functions = {name: partial(calls.append, name) for name in "ab"}
    times = benchmark("timed").timed(functions, 2, before=lambda: calls.append("-"))
    assert "".join(calls) == "-a-b-b-a-a-b"
    assert [len(seconds) for seconds in times.values()] == [2, 2]


def test_speeds():
    lines = [line("plain", 200), line("limit", 100), line("ddp", 160), line("threads", 110)]
    lines += [Line("torchrun", 2, failure="ended by SIGKILL"), line("ddp", 120, 4)]
    workload = Workload("mlp", lines, 64, 20_000_000, disturbance="other programs use 0.8 of 2 cores")
    shown = "\n".join(report.speed_tables(workload, "PSS"))
    assert shown.startswith("20,000,000 parameters, 64 rows in a batch.")
    assert "| unisono, threads |    9.09 |     110.0 | 107.8 to 112.2 |           1.45 |           0.91 |" in shown
    assert "| plain            |    5.00 |     200.0 | 196.0 to 204.0 |           0.80 |           0.50 |" in shown
    assert "| 4 replicas |" in shown
    assert "Not measured: unisono, torchrun on 2 replicas: ended by SIGKILL" in shown


def test_goals():
    """Each is met, missed, lost in noise, or was not measured."""
    goals = benchmark("goals")
    of_threads = {"resnet": 170, "mlp": 100, "gpt": 161, "tiny": 320}  # milliseconds
    workloads = [
        Workload(name, [line("ddp", 160), line("threads", milliseconds)]) for name, milliseconds in of_threads.items()
    ]
    judged = {verdict.goal: verdict for verdict in goals.verdicts(workloads)}
    expected = {
        "threads on resnet: at least 1.00 of ddp's speed": ("0.94", "missed"),
        "threads on mlp: at least 1.00 of ddp's speed": ("1.60", "met"),
        "threads on gpt: at least 1.00 of ddp's speed": ("0.99", "lost in noise"),
        "threads on tiny: at least 0.95 of ddp's speed": ("0.50", "missed"),
        "torchrun on mlp: at least 0.97 of ddp's speed": ("", "not measured"),
    }
    assert {goal: (judged[goal].measured, judged[goal].word) for goal in expected} == expected
    assert {verdict.word for verdict in goals.verdicts([])} == {"not measured"}


MORE = ((60, 2), (40, 4), (39, 8))  # milliseconds and replicas
ALIKE = (Line("plain", 1, [0.1, 0.1, 0.101]), Line("threads", 2, [0.099, 0.099, 0.1005]))
ONE = "**One device is fastest here**: the plain module takes 100.0 ms a step"


@pytest.mark.parametrize(
    ("lines", "cores", "said"),
    [
        (
            [line("plain", 100), line("limit", 99), line("threads", 110)],
            2,
            [ONE, "the best of ours, threads on 2 replicas, takes 110.0 ms.", "Even without communication"],
        ),
        ([line("plain", 100), line("limit", 100), line("threads", 110)], 1, [ONE, "The machine has one core"]),
        (
            [line("plain", 100), line("limit", 60), line("threads", 110)],
            2,
            [ONE, "so 40.00 ms could be gained", "costs about 50.00 ms"],
        ),
        ([*ALIKE], 2, [ONE, "The contender `limit` would show"]),  # 1 % is nothing
        (
            [line("plain", 100), line("threads", 97)],
            2,
            ["**No verdict**: the plain module takes 98.00 to 102.0 ms", "95.06 to 98.94 ms. The ranges overlap"],
        ),
        (
            [line("plain", 100), line("limit", 50), line("ddp", 70), line("threads", 52)],
            2,
            [
                '**`unisono.DataParallel(model, ["cpu"] * 2)` is fastest here**: 52.00 ms a step',
                "1.92 times as fast as the plain module",
                "That is 96 % of the speed of 2 processes",
            ],
        ),
        (
            [line("plain", 90), line("limit", 20, 4), *(line("threads", ms, n) for ms, n in MORE)],
            8,
            [
                '**`unisono.DataParallel(model, ["cpu"] * 4)` is fastest here**',  # 8 replicas gain 1 %: not worth it
                "The rest is the cost of splitting each step",
            ],
        ),
    ],
)  # fmt: skip
def test_advice(lines: list[Line], cores: int, said: list[str]):
    given = "\n".join(advice(Workload("own", lines), cores))
    for part in said:
        assert part in given
    assert "batch norm" not in given


def test_no_advice_while_other_programs_keep_cores_busy():
    lines = [line("plain", 100), line("threads", 60)]
    (said,) = advice(Workload("own", lines, disturbance="other programs use 0.8 of 2 cores"), 2)
    assert said.startswith("**No verdict**: other programs use 0.8 of 2 cores, so do not rely on these figures")


def test_advice_on_batch_norm_and_none_without_both_sides():
    workload = Workload("own", [line("plain", 100), line("threads", 60)], normalises_shards=True)
    assert "sync_batch_norm=True" in [*advice(workload, 2)][-1]
    assert [*advice(Workload("own", [line("threads", 60)]), 2)] == []
    assert [*advice(Workload("own", [line("plain", 60), line("ddp", 50)]), 2)] == []


@pytest.mark.parametrize("reference", ["limit", "ddp"])
def test_the_chart(reference: str):
    workloads = [
        Workload(name, [line("plain", 200), line(reference, 100), line("threads", 120)]) for name in ("a", "$b")
    ]
    workloads.append(Workload("failed", [Line("plain", 1, failure="for some reason")]))
    assert chart.png(results(*workloads)).startswith(b"\x89PNG")
