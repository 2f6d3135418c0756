"""Advice for a model on this machine, with reasons, from its measurements."""

from collections.abc import Sequence

from unisono.bench.contenders import OURS
from unisono.bench.results import Line, Workload

_NOISE = 0.03  # a smaller gain is not worth a more complex setup


def advice(workload: Workload, cores: int) -> list[str]:
    """Return the engine and number of replicas to use, and the reasons, as paragraphs.

    Of all that are within 3 % of the fastest, the simplest is recommended: the plain module, then threads, then
    processes, and fewer replicas first.

    Args:
        workload: the measurements of the plain module and of ours; without both there is no advice.
        cores: how many this process may use.
    """
    plain = workload.line("plain")
    ours = [line for engine in OURS for line in workload.measured() if line.contender == engine]
    if plain is None or not ours:
        return []
    fastest = min([plain, *ours], key=lambda line: line.step_s)
    chosen = next(line for line in [plain, *ours] if line.step_s <= (1 + _NOISE) * fastest.step_s)
    if chosen is plain:
        said = [*_why_one_device(workload, plain, min(ours, key=lambda line: line.step_s), cores)]
    else:
        said = [*_why_several(workload, plain, chosen, ours)]
    if workload.normalises_shards and chosen is not plain:
        said.append(
            "The model has batch norm: each replica normalises over its own rows, unless it is given "
            "`sync_batch_norm=True`, which costs some of the speed."
        )
    return said


def _why_one_device(workload: Workload, plain: Line, best: Line, cores: int) -> list[str]:
    slower = f"the best of ours is {_name(best)} with {_ms(best)} a step"
    said = [f"**One device is fastest here**: the plain module takes {_ms(plain)} a step; {slower}."]
    limit = _fastest(workload, "limit")
    if cores == 1:
        said.append("There is one core, so replicas can only take turns on it.")
    elif limit is None:
        said.append("The contender `limit` would show how much replicas could gain at most.")
    elif limit.step_s >= (1 - _NOISE) * plain.step_s:
        said.append(
            f"Even without any communication {limit.replicas} processes take {_ms(limit)} a step: either the "
            "operations of this model already keep all cores busy, or there is so little to compute that fewer rows do "
            "not make a step shorter; then a larger batch would help."
        )
    else:
        gain, cost = plain.step_s - limit.step_s, best.step_s - limit.step_s
        said.append(
            f"Without any communication {limit.replicas} processes would take {_ms(limit)} a step, so "
            f"{1000 * gain:.2f} ms could be gained; splitting each step and combining the results costs about "
            f"{1000 * cost:.2f} ms. A larger batch would change that."
        )
    return said


def _why_several(workload: Workload, plain: Line, chosen: Line, ours: Sequence[Line]) -> list[str]:
    engine = "" if chosen.contender == "threads" else f', engine="{chosen.contender}"'
    said = [
        f'**`unisono.DataParallel(model, ["cpu"] * {chosen.replicas}{engine})` is fastest here**: {_ms(chosen)} a '
        f"step, {chosen.speed_of(plain):.2f} times as fast as the plain module with all cores ({_ms(plain)}), whose "
        "operations leave some of the cores idle some of the time."
    ]
    others = [line for line in ours if line.contender != chosen.contender]
    other = next((line for line in others if line.replicas == chosen.replicas), None)
    if other is not None and chosen.contender == "processes":
        said.append(
            f"Threads take {_ms(other)}: the replicas of one process share Python's interpreter lock and one memory "
            "allocator, and processes do not."
        )
    elif other is not None:
        compared = "are no faster" if other.step_s > chosen.step_s else "are hardly faster"
        said.append(f"Processes {compared} ({_ms(other)}): this model spends little time in Python.")
    same_engine = [line for line in ours if line.contender == chosen.contender and line is not chosen]
    if same_engine:
        counts = ", ".join(f"{line.replicas} replicas {_ms(line)}" for line in same_engine)
        said.append(f"Other numbers of replicas, with {chosen.contender}: {counts}.")
    limit = workload.line("limit", chosen.replicas)
    if limit is not None:
        said.append(
            f"That is {100 * chosen.speed_of(limit):.0f} % of the speed of {limit.replicas} processes that do not "
            f"communicate at all ({_ms(limit)}), so there is little left to gain."
            if chosen.speed_of(limit) >= 0.9
            else f"{limit.replicas} processes that do not communicate at all take {_ms(limit)}: the rest is the "
            "cost of splitting each step and combining the results, which matters less with a larger batch."
        )
    ddp = workload.line("ddp", chosen.replicas)
    if ddp is not None:
        said.append(f"torch DDP, on as many replicas, takes {_ms(ddp)}.")
    return said


def _fastest(workload: Workload, contender: str) -> Line | None:
    lines = [line for line in workload.measured() if line.contender == contender]
    return min(lines, key=lambda line: line.step_s, default=None)


def _name(line: Line) -> str:
    return f"{line.contender} on {line.replicas} replicas"


def _ms(line: Line) -> str:
    return f"{1000 * line.step_s:.{2 if line.step_s < 0.1 else 1}f} ms"
