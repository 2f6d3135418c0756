"""Which setting of the memory allocator gives each way of training its best, in one run. Writes allocators.md.

    python benchmarks/allocators.py                          # ten minutes
    python benchmarks/allocators.py --models mlp lstm_cell
    sudo apt-get install libjemalloc2 libmimalloc2.0         # on Debian; what is missing is left out

A row of a table is a setting, as a user would write it: environment variables before the command, or a call of
`unisono.keep_freed_memory()` in the first line of the script. A column is a contender of `unisono bench`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unisono.bench import machine
from unisono.bench.contenders import Contender
from unisono.bench.measure import expected_s, measure
from unisono.bench.results import Line, Workload
from unisono.console.progress import Task, for_stdout
from unisono.console.tables import table

HERE = Path(__file__).resolve().parent
REPLICAS = 2
ROUNDS, SECONDS = 3, 0.7
WORKLOADS = "unisono.bench.workloads"
MODELS = {
    "mlp": WORKLOADS,
    "gpt": WORKLOADS,
    "resnet": WORKLOADS,
    "thin_blocks": "small_operations",
    "lstm_cell": "small_operations",
    "large_blocks": "allocators",
}
CONTENDERS = (("plain", 1), ("threads", REPLICAS), ("ddp", REPLICAS))


class Setting(NamedTuple):
    """A setting of the allocator: its name, its environment variables, the library that must be there, and our call."""

    name: str
    environment: dict[str, str]
    library: str = ""
    keeps_freed_memory: bool = False


# Sources: glibc's manual, "Memory Allocation Tunables"; jemalloc's manual, "Tuning"; mimalloc's, "Environment Options".
_ONE_ARENA = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=1073741824:glibc.malloc.arena_max=1"
_KEPT = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1"  # freed pages stay, those of large blocks, too
SETTINGS = (
    Setting("as the system has it", {}),
    Setting("one arena, thresholds", {"GLIBC_TUNABLES": _ONE_ARENA}),
    Setting("keep_freed_memory()", {}, keeps_freed_memory=True),
    Setting("the same, huge pages", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, keeps_freed_memory=True),
    Setting("jemalloc, pages kept", {"MALLOC_CONF": _KEPT}, "libjemalloc.so.2"),
    Setting("mimalloc", {}, "libmimalloc.so.2"),
)
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/lib")


def large_blocks() -> dict[str, object]:
    """Layers whose weights have 128 MiB: more than one heap of a thread's arena can hold."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 4096), nn.ReLU(), nn.Linear(4096, 10))
    labels = torch.randint(10, (64,))
    return {"model": model, "inputs": torch.randn(64, 1024), "target": labels, "criterion": nn.CrossEntropyLoss()}


def installed() -> Iterator[Setting]:
    """Yield the settings whose library is there, with its place in their environment."""
    for setting in SETTINGS:
        places = [Path(folder, setting.library) for folder in FOLDERS if setting.library]
        place = next((place for place in places if place.exists()), None)
        if place is not None:
            yield setting._replace(environment={"LD_PRELOAD": str(place), **setting.environment})
        elif not setting.library:
            yield setting
        else:
            print(f"{setting.library} is not installed: left out")


def contenders(settings: list[Setting]) -> list[Contender]:
    """Return the contenders of every setting, setting by setting."""
    return [
        Contender(
            name,
            replicas,
            environment=tuple(setting.environment.items()),
            keeps_freed_memory=setting.keeps_freed_memory,
        )
        for setting in settings
        for name, replicas in CONTENDERS
    ]


def page(workloads: list[Workload], settings: list[Setting]) -> str:
    """Return the page with a table for each workload."""
    text = f"# Allocators\n\n{machine.in_one_line(machine.describe())}.\n\n"
    text += (
        f"Written by `python benchmarks/allocators.py`. Milliseconds a step, the lower quartile of {ROUNDS} turns, and "
        "MiB (PSS) of all processes of a contender. `one arena, thresholds` is what `keep_freed_memory()` set before. "
        "**Bold**: the best of its column, and what is within 3 % of it.\n"
    )
    for workload in workloads:
        text += f"\n## {workload.name}\n\n" + (f"({workload.disturbance})\n\n" if workload.disturbance else "")
        text += _table(workload, settings) + "\n"
    return text


def _table(workload: Workload, settings: list[Setting]) -> str:
    each = len(CONTENDERS)
    by_setting = [workload.lines[i * each : (i + 1) * each] for i in range(len(settings))]
    best = [
        min((line.step_s for line in column if line.turns_s), default=0.0) for column in zip(*by_setting, strict=True)
    ]
    rows = [
        [setting.name, *map(_time, lines, best), *map(_memory, lines)]
        for setting, lines in zip(settings, by_setting, strict=True)
    ]
    names = [name for name, _ in CONTENDERS]
    return table(["setting", *(f"{name}, ms" for name in names), *(f"{name}, MiB" for name in names)], rows)


def _time(line: Line, best_s: float) -> str:
    if not line.turns_s:
        return "failed"
    text = f"{1000 * line.step_s:.1f}"
    return f"**{text}**" if line.step_s <= 1.03 * best_s else text


def _memory(line: Line) -> str:
    return f"{(line.memory_bytes or 0) / 2**20:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument(
        "--output", type=Path, default=HERE / "allocators.md", help="default: allocators.md, beside this file"
    )
    given = parser.parse_args()
    if given.output.is_dir() or not given.output.parent.is_dir():
        parser.error(f"--output {given.output}: expected a file, in a folder that exists")
    settings = [*installed()]
    taking_part = contenders(settings)
    seconds = len(given.models) * expected_s(taking_part, ROUNDS, SECONDS)
    task = Task(for_stdout(), "allocators", seconds)
    workloads = [measure(name, f"{MODELS[name]}:{name}", taking_part, ROUNDS, SECONDS, task) for name in given.models]
    text = page(workloads, settings)
    given.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
