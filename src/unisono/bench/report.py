"""results.md: the measurements as tables, and advice."""

from collections.abc import Iterator

from unisono.bench import machine
from unisono.bench.contenders import label, wait_policy
from unisono.bench.results import NOISE, Line, Results, Workload
from unisono.console.tables import table

_HOW = """\
Training steps on the CPU: forward, loss, backward, SGD with momentum. All contenders of a table start with the same
batch, weights and allocator setting (unisono.keep_freed_memory). They take turns of about {seconds_per_turn:g} s,
{rounds} each, while the others sleep. The time of a turn is the lower quartile of its steps; the time of a contender is
the lower quartile of its turns; its range is from the fastest turn to the upper quartile. `plain` is the module alone
on all cores. `limit` is one process for each replica, with its rows (samples) of the batch and no communication:
no other contender with a process for each replica can be faster. `ddp` is torch's DistributedDataParallel over gloo,
one process for each replica, with gradient_as_bucket_view. `unisono, threads` is unisono.DataParallel, started with
OMP_WAIT_POLICY={wait_policy}; `unisono, torchrun` is the same line with one process for each replica.
Memory is the peak of all processes of a contender together ({memory_kind}), while those of the others exist."""


def document(results: Results, *, picture: bool) -> str:
    """Return results.md; `picture` is whether there is a results.png."""
    how = _HOW.format(**results.settings, memory_kind=results.memory_kind, wait_policy=wait_policy())
    parts = ["# Benchmark", f"{machine.in_one_line(results.machine)}.", how]
    parts += ["![Speed of each contender](results.png)"] if picture else []
    for workload in results.workloads:
        parts += [f"## {workload.name}", *speed_tables(workload, results.memory_kind)]
        parts += advice(workload, results.machine["cores"])
    return "\n\n".join(parts) + "\n"


def speed_tables(workload: Workload, memory_kind: str) -> Iterator[str]:
    """Yield the size of the model, a table for each number of replicas, and what must be known about the figures."""
    yield f"{workload.num_parameters:,} parameters, {workload.rows} rows in a batch."
    for replicas in workload.replica_counts():
        lines = [line for line in workload.measured() if line.contender == "plain" or line.replicas == replicas]
        header = [
            f"{replicas} replicas" if replicas > 1 else "", "steps/s", "ms a step", "range",
            "of ddp's speed", "of the limit's", f"memory, MiB ({memory_kind})",
        ]  # fmt: skip
        if lines:
            yield table(header, [_row(line, workload, replicas) for line in lines])
    for line in workload.lines:
        if line.failure:
            what = label(line.contender) + ("" if line.contender == "plain" else f" on {line.replicas} replicas")
            yield f"Not measured: {what}: {line.failure}"


def _row(line: Line, workload: Workload, replicas: int) -> list[str]:
    references = [workload.line("ddp", replicas), workload.line("limit", replicas)]
    return [
        label(line.contender),
        f"{1 / line.step_s:.2f}" if line.step_s > 0.02 else f"{1 / line.step_s:.1f}",
        _ms(line.step_s),
        _range(line),
        *("" if reference is None else f"{line.speed_of(reference):.2f}" for reference in references),
        "" if line.memory_bytes is None else f"{line.memory_bytes / 2**20:.0f}",
    ]


def advice(workload: Workload, cores: int) -> Iterator[str]:
    """Yield the number of replicas to use on this machine, and the reasons, as paragraphs.

    Of all that are within 3 % of the fastest, the simplest is recommended: the plain module, then the fewest replicas.
    There is no verdict where noise may be why one is faster, and no advice without the measurements of the plain module
    and of ours.
    """
    plain = workload.line("plain")
    ours = [line for line in workload.measured() if line.contender == "threads"]
    if workload.disturbance:
        yield machine.no_verdict(workload.disturbance)
    if workload.disturbance or plain is None or not ours:
        return
    best = min(ours, key=lambda line: line.step_s)
    fastest = min(plain, best, key=lambda line: line.step_s)
    chosen = next(line for line in [plain, *ours] if line.step_s <= (1 + NOISE) * fastest.step_s)
    best_of_ours = f"{best.contender} on {best.replicas} replicas"
    if plain.is_lost_in_noise(best):
        yield (
            f"**No verdict**: the plain module takes {_range(plain)} ms a step, and {best_of_ours}, the best "
            f"of ours, {_range(best)} ms. The ranges overlap, so the difference may be noise. Use longer "
            "turns (--seconds-per-turn) or a quieter machine."
        )
    elif chosen is plain:
        yield (
            f"**One device is fastest here**: the plain module takes {_ms(plain.step_s)} ms a step; the best of ours, "
            f"{best_of_ours}, takes {_ms(best.step_s)} ms."
        )
        yield _why_one_device(workload, plain, best, cores)
    else:
        yield (
            f'**`unisono.DataParallel(model, ["cpu"] * {chosen.replicas})` is fastest here**: '
            f"{_ms(chosen.step_s)} ms a step, {chosen.speed_of(plain):.2f} times as fast as the plain module "
            f"with all cores ({_ms(plain.step_s)} ms), whose operations do not keep all cores busy. Start your script "
            f"with OMP_WAIT_POLICY={wait_policy()}, as here."
        )
        if limit := workload.line("limit", chosen.replicas):
            yield (
                f"That is {100 * chosen.speed_of(limit):.0f} % of the speed of {limit.replicas} processes without "
                "communication. The rest is the cost of splitting each step and combining the results, which matters "
                "less with a larger batch."
            )
        if workload.normalises_shards:
            yield (
                "The model has batch norm: each replica normalises its own rows, unless you pass "
                "`sync_batch_norm=True`, which costs some speed."
            )


def _why_one_device(workload: Workload, plain: Line, best: Line, cores: int) -> str:
    limits = [line for line in workload.measured() if line.contender == "limit"]
    limit = min(limits, key=lambda line: line.step_s, default=None)
    if cores == 1:
        return "The machine has one core, so replicas can only take turns."
    if limit is None:
        return "The contender `limit` would show how much replicas could gain at most."
    if limit.step_s >= (1 - NOISE) * plain.step_s:
        return (
            f"Even without communication {limit.replicas} processes take {_ms(limit.step_s)} ms a step. "
            "Either the operations of this model already keep all cores busy, or fewer rows do not make a "
            "step shorter; then use a larger batch."
        )
    return (
        f"Without any communication {limit.replicas} processes would take {_ms(limit.step_s)} ms a step, so "
        f"{_ms(plain.step_s - limit.step_s)} ms could be gained; splitting each step and combining the results "
        f"costs about {_ms(best.step_s - limit.step_s)} ms. A larger batch would change that."
    )


def _ms(seconds: float) -> str:
    """Return seconds as a number of milliseconds, with about four digits."""
    return f"{1000 * seconds:.{2 if seconds < 0.1 else 1}f}"


def _range(line: Line) -> str:
    return " to ".join(map(_ms, line.range_s))
