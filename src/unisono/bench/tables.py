"""results.md: the measurements as tables."""

from collections.abc import Iterator, Sequence

from unisono.bench import machine
from unisono.bench.contenders import label
from unisono.bench.results import Line, Results, Workload
from unisono.console.tables import table

_MIB = 2**20

_HOW = """\
Training steps on the CPU: forward, loss, backward, SGD with momentum. All contenders of a table have the same
batch, the same start and the same allocator setting (unisono.keep_freed_memory), and take turns of about
{seconds_per_turn:g} s, {rounds} of each, while the others sleep. The time of a turn is the lower quartile of its steps;
that of a contender is the lower quartile of its turns, and its range reaches from the fastest turn to the upper
quartile. `plain` is the module by itself with all cores. `limit` is one process a replica, with its rows of the batch
and no communication, so nothing can be faster. `ddp` is torch's DistributedDataParallel over gloo, one process a
replica, with gradient_as_bucket_view. `unisono, threads` and `unisono, processes` are unisono.DataParallel, and
`unisono, torchrun` is the same line in one process a replica. Memory is the most that all processes of a contender take
together ({memory_kind})."""


def document(results: Results, advice: Sequence[str], notes: str = "", *, picture: bool) -> str:
    """Return results.md.

    Args:
        results: the measurements.
        advice: paragraphs.
        notes: the user's own text about these results, shown at the end.
        picture: whether there is a results.png.
    """
    how = _HOW.format(**results.settings, memory_kind=results.memory_kind)
    parts = ["# Benchmark", f"{machine.in_one_line(results.machine)}.", how]
    parts += ["![Speed of each contender](results.png)"] if picture else []
    for workload in results.workloads:
        parts += [f"## {workload.name}", *speed_tables(workload, results.memory_kind)]
    parts += ["## Advice", *advice] if advice else []
    return "\n\n".join([*parts, notes] if notes else parts).rstrip() + "\n"


def speed_tables(workload: Workload, memory_kind: str) -> Iterator[str]:
    """Yield the size of the model, a table for each number of replicas, and what must be known about the figures."""
    yield f"{workload.num_parameters:,} parameters, {workload.rows} rows a batch."
    for replicas in workload.replica_counts():
        lines = [line for line in workload.measured() if line.contender == "plain" or line.replicas == replicas]
        header = [
            f"{replicas} replicas" if replicas > 1 else "", "steps/s", "ms a step", "range",
            "of ddp's speed", "of the limit's", f"memory, MiB ({memory_kind})",
        ]  # fmt: skip
        if lines:
            yield table(header, [_row(line, workload, replicas) for line in lines])
    if workload.disturbance:
        yield f"**These figures are not to be relied on**: {workload.disturbance}. Measure again when they have ended."
    for line in workload.lines:
        what = label(line.contender) + ("" if line.contender == "plain" else f" on {line.replicas} replicas")
        if line.failure:
            yield f"Not measured: {what}: {line.failure}"
        if line.differs:
            yield f"The loss of {what} is not that of the others: {line.differs}."


def _row(line: Line, workload: Workload, replicas: int) -> list[str]:
    references = [workload.line("ddp", replicas), workload.line("limit", replicas)]
    return [
        label(line.contender),
        f"{1 / line.step_s:.2f}" if line.step_s > 0.02 else f"{1 / line.step_s:.1f}",
        milliseconds(line.step_s),
        " to ".join(map(milliseconds, line.range_s)),
        *("" if reference is None else f"{line.speed_of(reference):.2f}" for reference in references),
        "" if line.memory_bytes is None else f"{line.memory_bytes / _MIB:.0f}",
    ]


def milliseconds(seconds: float) -> str:
    """Return seconds in milliseconds, with about four digits."""
    return f"{1000 * seconds:.{2 if seconds < 0.1 else 1}f}"
