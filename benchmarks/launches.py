"""How many operations of torch a training step runs in each process of a launcher, beside DDP's.

    torchrun --nproc-per-node 2 benchmarks/launches.py

On an accelerator an operation is about one launch of a kernel or of a copy; one on a list of tensors (`_foreach_...`)
is one or a few. What only describes memory anew (a view, say) is not counted. The step is that of host_calls.py, on
the CPU, with one device a process. The counts do not depend on the clock.
"""

import argparse
import os
from collections.abc import Callable

import torch.distributed as dist
from host_calls import layers, training_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import unisono
from unisono.console.tables import table

NUM_LAYERS = (20, 120)
_WARM_UP = 5
# Operations that queue no work themselves.
_QUEUE_NOTHING = {
    *("alias", "as_strided", "chunk", "contiguous", "detach", "detach_", "empty", "empty_like", "empty_strided"),
    *("expand", "flatten", "item", "lift_fresh", "linear", "matmul", "mean", "narrow", "permute", "reshape", "resize_"),
    *("resolve_conj", "resolve_neg", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t", "to"),
    *("_to_copy", "transpose", "unbind", "unsqueeze", "view", "view_as"),
}
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "unisono": lambda model: unisono.DataParallel(model, ["cpu"], sync_batch_norm=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with a launcher: torchrun --nproc-per-node 2 benchmarks/launches.py")
    dist.init_process_group("gloo")
    try:
        found = counts()
    finally:
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        rows = [[name, *map(str, row)] for name, row in found.items()]
        print(table(["", *(f"{n} layers" for n in NUM_LAYERS)], rows), flush=True)


def counts() -> dict[str, list[int]]:
    """Return the operations of each way to train in this process, one of a process group: for each of NUM_LAYERS."""
    return {name: [operations(wrap(layers(n, batch_norm=False))) for n in NUM_LAYERS] for name, wrap in WAYS.items()}


def operations(model: nn.Module) -> int:
    """Return the operations of a steady step of a model."""
    step = training_step(model)
    for _ in range(_WARM_UP):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return sum(
        _queues(event.name) and not any(_queues(e.name) for e in event.cpu_children) for event in profiler.events()
    )


def _queues(name: str) -> bool:
    return name.startswith("aten::") and name.removeprefix("aten::") not in _QUEUE_NOTHING


if __name__ == "__main__":
    main()
