"""How fast a training step under a launcher is beside torch's DistributedDataParallel, in the same two processes.

    python benchmarks/ddp.py                                        # all workloads, two minutes
    python benchmarks/ddp.py --workloads tiny --rounds 20           # one of them, more turns
    python benchmarks/ddp.py --workloads mlp,gpt --seconds-per-turn 3

The workloads are those of `unisono bench`: two processes over gloo, each with half of the batch and one core. Each
process has the model three times: as it is, wrapped by DDP, and by unisono.DataParallel. The three take short turns,
so that what else the machine does meets all alike. The module as it is sums no gradients: nothing can be faster.

The time of a turn is the lower quartile of its steps, in rank 0, and that of a way the lower quartile of its turns, as
in `unisono bench`; so is the range of a speed. A step is that of `unisono bench`; forward is with the loss.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.bench.results import Line, in_turn
from unisono.bench.tasks import Step, Task
from unisono.console import progress
from unisono.console.tables import table
from unisono.primitives.measured_shares import lower_quartile

GOALS = {"tiny": 0.85, "mlp": 0.97, "gpt": 0.97, "resnet": 0.97}
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda model: model,
    "ddp": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "unisono": lambda model: unisono.DataParallel(model, ["cpu"], sync_batch_norm=False),
}
PARTS = ("whole_s", "forward_s", "backward_s")
WORLD_SIZE = 2
_WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(GOALS), help=f"some of {', '.join(GOALS)}")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each way (default: %(default)s)")
    parser.add_argument("--seconds-per-turn", type=float, default=1.0, help="length of a turn (default: %(default)s)")
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
    shown = progress.for_stdout() if rank == 0 else progress.Progress()
    try:
        rows = [rows_of(name, measure(rank, name, rounds, seconds, shown)) for name in workloads]
    finally:
        shown.close()
    if rank == 0:
        header = ["workload", "ms", *WAYS, "unisono's speed of ddp's", "goal"]
        print(table(header, [cells for row in rows for cells in row], text_columns=2), flush=True)
    dist.destroy_process_group()


def rows_of(name: str, lines: dict[str, dict[str, Line]]) -> list[list[str]]:
    """Return the rows of one workload: the step, forward, backward."""
    rows = []
    for part, of_part in lines.items():
        ours, theirs = of_part["unisono"], of_part["ddp"]
        low, high = ours.speed_range_of(theirs)
        speed = f"{ours.speed_of(theirs):.3f} ({low:.2f} to {high:.2f})"
        first, goal = (name, f"{GOALS[name]:.2f}") if part == "whole_s" else ("", "")
        shown = [f"{1e3 * line.step_s:.2f}" for line in of_part.values()]
        rows.append([first, part.removesuffix("_s"), *shown, speed, goal])
    return rows


def measure(rank: int, name: str, rounds: int, seconds: float, shown: progress.Progress) -> dict[str, dict[str, Line]]:
    """Return the measurements by part of the step and way."""
    steps = {way: stepper(name, rank, wrap) for way, wrap in WAYS.items()}
    longest = torch.tensor(max(lower_quartile([step().whole_s for _ in range(_WARM_UP)]) for step in steps.values()))
    dist.all_reduce(longest, dist.ReduceOp.MAX)  # every process takes as many steps
    num_steps = max(1, round(seconds / longest.item()))
    task = progress.Task(shown, name, rounds * len(steps) * seconds)
    lines = {part: {way: Line(way, WORLD_SIZE) for way in steps} for part in PARTS}
    for way in in_turn([*steps], rounds):
        dist.barrier()
        steps[way]()  # the caches are another way's
        taken = [steps[way]() for _ in range(num_steps)]
        for part in PARTS:
            lines[part][way].turns_s.append(lower_quartile([getattr(step, part) for step in taken]))
        task.advance(f"{way}: {1e3 * lines['whole_s'][way].turns_s[-1]:.1f} ms a step", seconds)
    return lines


def stepper(name: str, rank: int, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], Step]:
    """Return what takes a training step of a workload, on this process's rows."""
    task = Task.of_target(f"unisono.bench.workloads:{name}").shard(rank, WORLD_SIZE)
    task.model = wrap(task.model)
    return task.stepper()


if __name__ == "__main__":
    main()
