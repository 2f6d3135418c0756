"""How fast a training step under a launcher is beside torch's DistributedDataParallel, in the same two processes.

    python benchmarks/ddp.py                                        # all workloads, two minutes
    python benchmarks/ddp.py --workloads tiny --rounds 20           # one of them, more turns
    python benchmarks/ddp.py --workloads mlp,gpt --seconds-per-turn 3

The workloads are those of `unisono bench`: two processes over gloo, each with half of the batch and one core. Each
process has the model three times: as it is, wrapped by DDP, and by unisono.DataParallel. The three take short turns,
so that what else the machine does meets all alike. The module as it is sums no gradients: nothing can be faster.

A time is the median of a turn's steps, in rank 0, and then of all turns; a speed is DDP's time divided by ours within a
round, and then the median of all rounds. A step is forward and loss, backward, foreach SGD with momentum.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.bench.contenders import Task
from unisono.bench.turns import in_turn
from unisono.console import progress
from unisono.console.tables import table

GOALS = {"tiny": 0.85, "mlp": 0.97, "gpt": 0.97, "resnet": 0.97}
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda model: model,
    "ddp": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "unisono": lambda model: unisono.DataParallel(model, ["cpu"]),
}
WORLD_SIZE = 2
_WARM_UP = 4


class Step(NamedTuple):
    """The seconds of one step, or medians of several."""

    forward: float
    backward: float
    whole: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(GOALS), help=f"some of {', '.join(GOALS)}")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each way (default: %(default)s)")
    parser.add_argument("--seconds-per-turn", type=float, default=1.0, help="about (default: %(default)s)")
    options = parser.parse_args()
    workloads = list(filter(None, options.workloads.split(",")))
    if unknown := set(workloads) - GOALS.keys():
        parser.error(f"--workloads: {', '.join(sorted(unknown))}: expected some of {', '.join(GOALS)}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (workloads, options.rounds, options.seconds_per_turn, Path(folder))
        spawn(rank_main, arguments, nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]


def rank_main(rank: int, workloads: Sequence[str], rounds: int, seconds: float, folder: Path) -> None:
    """Measure in one of the processes; print in the first one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, torch.get_num_threads() // WORLD_SIZE))
    unisono.keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    shown = progress.for_stdout() if rank == 0 else progress.Silent()
    try:
        rows = [row_of(name, measure(rank, name, rounds, seconds, shown)) for name in workloads]
    finally:
        shown.close()
    if rank == 0:
        header = ["workload", "ms", *WAYS, "unisono's speed of ddp's", "goal"]
        print(table(header, [cells for row in rows for cells in row], text_columns=2), flush=True)
    dist.destroy_process_group()


def row_of(name: str, turns: dict[str, list[Step]]) -> list[list[str]]:
    """Return the lines of one workload: the step, forward, backward."""
    lines = []
    for part in ("whole", "forward", "backward"):
        times = {way: [getattr(turn, part) for turn in of_way] for way, of_way in turns.items()}
        shown = [f"{1e3 * statistics.median(of_way):.2f}" for of_way in times.values()]
        speeds = [theirs / own for own, theirs in zip(times["unisono"], times["ddp"], strict=True)]
        quartiles = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else speeds * 3
        speed = f"{statistics.median(speeds):.3f} ({quartiles[0]:.2f} to {quartiles[2]:.2f})"
        is_whole = part == "whole"
        lines.append([name if is_whole else "", part, *shown, speed, f"{GOALS[name]:.2f}" if is_whole else ""])
    return lines


def measure(rank: int, name: str, rounds: int, seconds: float, shown: progress.Progress) -> dict[str, list[Step]]:
    """Return the median step of each turn, by way."""
    steps = {way: step_of(name, rank, wrap) for way, wrap in WAYS.items()}
    estimates = [statistics.median(step().whole for _ in range(_WARM_UP)) for step in steps.values()]
    longest = torch.tensor(max(estimates))
    dist.all_reduce(longest, dist.ReduceOp.MAX)  # every process takes as many steps
    num_steps = max(1, round(seconds / longest.item()))
    task = progress.Task(shown, name, rounds * len(steps) * seconds)
    turns: dict[str, list[Step]] = {way: [] for way in steps}
    for way in in_turn([*steps], rounds):
        dist.barrier()
        steps[way]()  # the caches are another way's
        taken = [steps[way]() for _ in range(num_steps)]
        turns[way].append(Step(*map(statistics.median, zip(*taken, strict=True))))
        task.advance(f"{way}: {1e3 * turns[way][-1].whole:.1f} ms a step", seconds)
    return turns


def step_of(name: str, rank: int, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], Step]:
    """Return a training step of a workload, on this process's rows."""
    task = Task.of_target(f"unisono.bench.workloads:{name}").shard(rank, WORLD_SIZE)
    model = wrap(task.model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)

    def step() -> Step:
        began = time.perf_counter()
        loss = task.loss(model(*task.args, **task.kwargs))
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Step(forward - began, backward - forward, time.perf_counter() - began)

    return step


if __name__ == "__main__":
    main()
