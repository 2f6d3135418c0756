"""results.md: the measurements as tables."""

from collections.abc import Iterator, Sequence

from unisono.bench import goals, machine
from unisono.bench.results import Line, Results, Workload
from unisono.console.tables import table

_MIB = 2**20

_HOW = """\
Training steps on the CPU: forward, loss, backward, SGD with momentum. All contenders of a table have the same
batch, the same start and the same allocator setting (unisono.keep_freed_memory), and take turns of about
{seconds_per_turn:g} s, {rounds} of each, while the others sleep. Times are medians over turns, with the lowest
and the highest; ratios of speed are medians over rounds. `plain` is the module by itself with all cores.
`limit` is one process a replica, with its rows of the batch and no communication, so nothing can be faster.
`ddp` is torch's DistributedDataParallel over gloo, one process a replica, with gradient_as_bucket_view;
`accelerate` and `fabric` are Hugging Face Accelerate and Lightning Fabric with the same. `threads` and
`processes` are unisono.DataParallel, `torchrun` is the same line in one process a replica. Memory is the most
that all processes of a contender take together ({memory_kind})."""


def document(results: Results, advice: Sequence[str], notes: str = "") -> str:
    """Return results.md.

    Args:
        results: the measurements.
        advice: paragraphs.
        notes: the user's own text about these results, shown at the end.
    """
    parts = ["# Benchmark", preface(results)]
    if results.workloads:
        parts.append("![Speed of each contender](results.png)")
    for workload in results.workloads:
        parts += [f"## {workload.name}", *speed_tables(workload, results.memory_kind)]
    if advice:
        parts += ["## Advice", *advice]
    if any(verdict.met is not None for verdict in goals.verdicts(results)):
        parts += ["## Goals", goals_table(results)]
    if results.one_device_us:
        parts += ["## One device", one_device_table(results)]
    if results.added_replicas is not None:
        parts += ["## Each added replica", added_replicas_table(results.added_replicas)]
        parts += remarks(results.added_replicas)
    return "\n\n".join([*parts, notes] if notes else parts).rstrip() + "\n"


def preface(results: Results) -> str:
    """Return the description of the machine and of the measurement."""
    how = _HOW.format(**results.settings, memory_kind=results.memory_kind)
    return f"{machine.in_one_line(results.machine)}.\n\n{how}"


def speed_tables(workload: Workload, memory_kind: str) -> Iterator[str]:
    """Yield the size of the model, a table for each number of replicas, and remarks."""
    yield f"{workload.num_parameters:,} parameters, {workload.rows} rows a batch."
    for replicas in workload.replica_counts() or [1]:
        lines = [line for line in workload.measured() if line.contender == "plain" or line.replicas == replicas]
        if not lines:
            continue
        header = [
            f"{replicas} replicas" if replicas > 1 else "", "steps/s", "ms a step", "lowest", "highest",
            "of ddp's speed", "of the limit's", f"memory, MiB ({memory_kind})",
        ]  # fmt: skip
        yield table(header, [_row(line, workload, replicas) for line in lines])
    yield from remarks(workload)


def remarks(workload: Workload) -> Iterator[str]:
    """Yield a sentence for each contender that failed, or whose losses differ."""
    for line in workload.lines:
        what = line.contender if line.contender == "plain" else f"{line.contender}, {line.replicas} replicas"
        if line.failure:
            yield f"Not measured: {what}: {line.failure}"
        if line.differs:
            yield f"The loss of {what} is not that of the others: {line.differs}."


def _row(line: Line, workload: Workload, replicas: int) -> list[str]:
    references = [workload.line("ddp", replicas), workload.line("limit", replicas)]
    return [
        line.contender,
        f"{1 / line.step_s:.2f}" if line.step_s > 0.02 else f"{1 / line.step_s:.1f}",
        *(_milliseconds(value) for value in (line.step_s, min(line.turns_s), max(line.turns_s))),
        *("" if reference is None else f"{line.speed_of(reference):.2f}" for reference in references),
        "" if line.memory_bytes is None else f"{line.memory_bytes / _MIB:.0f}",
    ]


def goals_table(results: Results) -> str:
    """Return every goal, with the measurement."""
    judged = goals.verdicts(results)
    cores = results.machine["cores"]
    remark = "" if cores == goals.CORES else f"\n\n(The goals are for {goals.CORES} cores; this machine has {cores}.)"
    return table(["goal", "measured", ""], [[v.goal, v.measured, v.word] for v in judged], text_columns=1) + remark


def one_device_table(results: Results) -> str:
    """Return the cost of the wrapper on one device."""
    rows = [[name, f"{cost:.1f}"] for name, cost in results.one_device_us.items()]
    return 'The time that `DataParallel(model, ["cpu"])` adds to a forward.\n\n' + table(["model", "µs"], rows)


def added_replicas_table(workload: Workload) -> str:
    """Return milliseconds a step by number of replicas, and the cost of each added replica."""
    engines = sorted({line.contender for line in workload.measured()}, reverse=True)
    rows = []
    before: dict[str, Line] = {}
    for replicas in workload.replica_counts():
        cells = [str(replicas)]
        for engine in engines:
            line = workload.line(engine, replicas)
            cells.append("" if line is None else _milliseconds(line.step_s))
            last = before.get(engine)
            known = line is not None and last is not None
            cells.append(_milliseconds((line.step_s - last.step_s) / (replicas - last.replicas)) if known else "")  # type: ignore[union-attr]
            if line is not None:
                before[engine] = line
        rows.append(cells)
    header = ["replicas", *(cell for engine in engines for cell in (f"{engine}, ms a step", "for each added replica"))]
    said = f"{workload.name}, {workload.rows} rows a batch, however many replicas share them.\n\n"
    return said + table(header, rows)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.{2 if abs(seconds) < 0.1 else 1}f}"
