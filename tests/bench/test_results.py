"""Figures from figures: medians, ratios, tables, goals, advice, chart."""

from pathlib import Path

import pytest

from unisono.bench import chart, goals, tables
from unisono.bench.advice import advice
from unisono.bench.results import Line, Results, Workload, mean_over_rows

MACHINE = {
    "processor": "Some $ Processor", "cores": 2, "memory_gib": 8, "system": "Linux x86_64", "python": "3.11.0",
    "torch": "2.13.0", "unisono": "0.1.0",
}  # fmt: skip


def line(contender: str, milliseconds: float, replicas: int = 2, **more: object) -> Line:
    """A contender whose turns are a tenth apart."""
    turns = [milliseconds / 1000 * factor for factor in (1.0, 0.9, 1.1)]
    return Line(contender, 1 if contender == "plain" else replicas, turns, memory_bytes=2**20 * 300, **more)


def results(*workloads: Workload, **more: object) -> Results:
    return Results(MACHINE, {"rounds": 3, "seconds_per_turn": 2.0}, "PSS", list(workloads), **more)


def test_medians_ratios_and_means():
    one = Line("plain", 1, [0.1, 0.3, 0.2])
    other = Line("ddp", 2, [0.2, 0.3, 0.8])
    assert one.step_s == 0.2
    assert one.spread == pytest.approx(0.5)
    assert one.speed_of(other) == pytest.approx(2.0)  # of 2, 1 and 4, round by round
    assert Line("plain", 1, [0.1, 0.3]).spread == pytest.approx(1.0)
    assert mean_over_rows([[1.0, 4.0], [4.0, 1.0]], [2, 1]) == pytest.approx([2.0, 3.0])
    assert mean_over_rows([[1.0], [4.0]], [0, 0]) == [2.5]


def test_speeds():
    lines = [line("plain", 200), line("limit", 100), line("ddp", 160), line("processes", 110)]
    lines += [Line("threads", 2, failure="ended by SIGKILL"), line("ddp", 120, 4, differs="loss 1 in step 1")]
    shown = "\n".join(tables.speed_tables(Workload("mlp", lines, 64, 20_000_000), "PSS"))
    assert shown.startswith("20,000,000 parameters, 64 rows a batch.")
    assert "| processes  |    9.09 |     110.0 |  99.00 |   121.0 |           1.45 |           0.91 |" in shown
    assert "| plain      |    5.00 |     200.0 |  180.0 |   220.0 |           0.80 |           0.50 |" in shown
    assert "| 4 replicas |" in shown
    assert "Not measured: threads, 2 replicas: ended by SIGKILL" in shown
    assert "The loss of ddp, 4 replicas is not that of the others: loss 1 in step 1." in shown


def test_costs_of_added_replicas():
    workload = Workload("tiny", [line("threads", ms, n) for n, ms in ((1, 2.0), (2, 3.0), (4, 9.0))])
    assert tables.added_replicas_table(workload).splitlines()[-3:] == [
        "| 1        |               2.00 |                        |",
        "| 2        |               3.00 |                   1.00 |",
        "| 4        |               9.00 |                   3.00 |",
    ]


def test_goals():
    """Each is met, missed, or was not measured."""
    of_processes = {"resnet": 1.04, "mlp": 1.2, "gpt": 1.0, "tiny": 1.5}
    workloads = [
        Workload(name, [line("limit", 100), line("ddp", 160), line("threads", 170), line("processes", 100 * factor)])
        for name, factor in of_processes.items()
    ]
    judged = {verdict.goal: verdict for verdict in goals.verdicts(results(*workloads, one_device_us={"a": 12.0}))}
    assert judged["processes on resnet: at least 0.95 of the limit's speed"].word == "met"
    assert judged["processes on mlp: at least 0.85 of the limit's speed"].word == "missed"
    assert judged["processes on tiny: at least 0.70 of the limit's speed"].measured == "0.67"
    assert judged["processes on gpt: at least 1.00 of DDP's speed"].word == "met"
    assert judged["processes, geometric mean of the four: at least 1.25 of DDP's speed"].measured == "1.37"
    assert judged["threads on gpt: at least 1.00 of DDP's speed"].word == "missed"
    assert judged["processes on mlp: memory at most 0.75 of DDP's"].word == "missed"
    assert judged["the wrapper on one device: at most 20 µs a forward"].measured == "12.0 µs"
    assert {verdict.word for verdict in goals.verdicts(results())} == {"not measured"}


MORE = ((60, 2), (40, 4), (39, 8))  # milliseconds and replicas
ONE = "**One device is fastest here**: the plain module takes 100.0 ms a step"


@pytest.mark.parametrize(
    ("lines", "cores", "said"),
    [
        (
            [line("plain", 100), line("limit", 99), line("threads", 120), line("processes", 110)],
            2,
            [ONE, "the best of ours is processes on 2 replicas with 110.0 ms", "Even without any communication"],
        ),
        ([line("plain", 100), line("limit", 100), line("threads", 110)], 1, [ONE, "There is one core"]),
        (
            [line("plain", 100), line("limit", 60), line("threads", 110)],
            2,
            [ONE, "so 40.00 ms could be gained", "costs about 50.00 ms"],
        ),
        ([line("plain", 100), line("processes", 98)], 2, [ONE, "The contender `limit` would show"]),  # 2 % is nothing
        (
            [line("plain", 100), line("limit", 50), line("ddp", 70), line("threads", 80), line("processes", 52)],
            2,
            [
                '**`unisono.DataParallel(model, ["cpu"] * 2, engine="processes")` is fastest here**: 52.00 ms a step',
                "1.92 times as fast as the plain module",
                "Threads take 80.00 ms",
                "96 % of the speed of 2 processes",
                "torch DDP, on as many replicas, takes 70.00 ms",
            ],
        ),
        (
            [line("plain", 90), line("limit", 20, 4), *(line("threads", ms, n) for ms, n in MORE)],
            8,
            [
                '**`unisono.DataParallel(model, ["cpu"] * 4)` is fastest here**',  # 8 replicas gain 1 %: not worth it
                "Other numbers of replicas, with threads: 2 replicas 60.00 ms, 8 replicas 39.00 ms",
                "the rest is the cost of splitting each step",
            ],
        ),
        (
            [line("plain", 100), line("threads", 60), line("processes", 65)],
            2,
            ['["cpu"] * 2)` is fastest here', "Processes are no faster (65.00 ms)"],
        ),
    ],
)  # fmt: skip
def test_advice(lines: list[Line], cores: int, said: list[str]):
    given = "\n".join(advice(Workload("own", lines), cores))
    for part in said:
        assert part in given
    assert "batch norm" not in given


def test_advice_on_batch_norm_and_none_without_both_sides():
    workload = Workload("own", [line("plain", 100), line("threads", 60)], normalises_shards=True)
    assert "sync_batch_norm=True" in advice(workload, 2)[-1]
    assert advice(Workload("own", [line("threads", 60)]), 2) == []
    assert advice(Workload("own", [line("plain", 60), line("ddp", 50)]), 2) == []


@pytest.mark.parametrize("reference", ["limit", "ddp"])
def test_the_chart(reference: str, tmp_path: Path):
    workloads = [
        Workload(name, [line("plain", 200), line(reference, 100), line("threads", 120)]) for name in ("a", "$b")
    ]
    workloads.append(Workload("failed", [Line("plain", 1, failure="for some reason")]))
    chart.draw(tmp_path / "results.png", results(*workloads))
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
