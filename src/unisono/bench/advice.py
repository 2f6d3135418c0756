"""Advice for a model on this machine, with reasons, from its measurements."""

from collections.abc import Iterator, Sequence

from unisono.bench.contenders import OURS
from unisono.bench.results import NOISE, Line, Workload
from unisono.bench.tables import milliseconds


def advice(workload: Workload, cores: int) -> list[str]:
    """Return the engine and number of replicas to use, and the reasons, as paragraphs.

    Of all that are within 3 % of the fastest, the simplest is recommended: the plain module, then threads, then
    processes, and fewer replicas first. There is no verdict where noise may be why one is faster.

    Args:
        workload: the measurements of the plain module and of ours; without both there is no advice.
        cores: how many this process may use.
    """
    plain = workload.line("plain")
    ours = [line for engine in OURS for line in workload.measured() if line.contender == engine]
    if plain is None or not ours:
        return []
    best = min(ours, key=lambda line: line.step_s)
    if workload.disturbance:
        return [f"**No verdict**: {workload.disturbance}. Measure again when they have ended."]
    if plain.is_lost_in_noise(best):
        return [
            f"**No verdict**: the plain module takes {_range(plain)} a step, and {_name(best)}, the best of ours, "
            f"{_range(best)}. These ranges overlap, so noise may be why one is faster. More rounds (--rounds), longer "
            "turns (--seconds-per-turn) or a quieter machine may tell them apart."
        ]
    fastest = min(plain, best, key=lambda line: line.step_s)
    chosen = next(line for line in [plain, *ours] if line.step_s <= (1 + NOISE) * fastest.step_s)
    if chosen is plain:
        return [*_why_one_device(workload, plain, best, cores)]
    return [*_why_several(workload, plain, chosen, ours)]


def _why_one_device(workload: Workload, plain: Line, best: Line, cores: int) -> Iterator[str]:
    yield (
        f"**One device is fastest here**: the plain module takes {_ms(plain)} a step; the best of ours is "
        f"{_name(best)} with {_ms(best)} a step."
    )
    limits = [line for line in workload.measured() if line.contender == "limit"]
    limit = min(limits, key=lambda line: line.step_s, default=None)
    if cores == 1:
        yield "There is one core, so replicas can only take turns on it."
    elif limit is None:
        yield "The contender `limit` would show how much replicas could gain at most."
    elif limit.step_s >= (1 - NOISE) * plain.step_s:
        yield (
            f"Even without any communication {limit.replicas} processes take {_ms(limit)} a step: either the "
            "operations of this model already keep all cores busy, or there is so little to compute that fewer rows do "
            "not make a step shorter; then a larger batch would help."
        )
    else:
        yield (
            f"Without any communication {limit.replicas} processes would take {_ms(limit)} a step, so "
            f"{milliseconds(plain.step_s - limit.step_s)} ms could be gained; splitting each step and combining the "
            f"results costs about {milliseconds(best.step_s - limit.step_s)} ms. A larger batch would change that."
        )


def _why_several(workload: Workload, plain: Line, chosen: Line, ours: Sequence[Line]) -> Iterator[str]:
    engine = "" if chosen.contender == "threads" else f', engine="{chosen.contender}"'
    yield (
        f'**`unisono.DataParallel(model, ["cpu"] * {chosen.replicas}{engine})` is fastest here**: {_ms(chosen)} a '
        f"step, {chosen.speed_of(plain):.2f} times as fast as the plain module with all cores ({_ms(plain)}), whose "
        "operations leave some of the cores idle some of the time."
    )
    others = [f"{_name(line)} {_ms(line)}" for line in ours if line is not chosen]
    ddp, limit = (workload.line(name, chosen.replicas) for name in ("ddp", "limit"))
    others += [] if ddp is None else [f"torch DDP on as many {_ms(ddp)}"]
    if others:
        yield f"The others: {', '.join(others)}."
    if limit is not None:
        yield (
            f"That is {100 * chosen.speed_of(limit):.0f} % of the speed of {limit.replicas} processes without "
            f"communication ({_ms(limit)}). The rest is the cost of splitting each step and combining the results, "
            "which matters less with a larger batch."
        )
    if workload.normalises_shards:
        yield (
            "The model has batch norm: each replica normalises over its own rows, unless it is given "
            "`sync_batch_norm=True`, which costs some of the speed."
        )


def _name(line: Line) -> str:
    return f"{line.contender} on {line.replicas} replicas"


def _ms(line: Line) -> str:
    return f"{milliseconds(line.step_s)} ms"


def _range(line: Line) -> str:
    return f"{' to '.join(map(milliseconds, line.range_s))} ms"
