"""Train under injected faults, and compare every number with an undisturbed run's.

    python benchmarks/chaos.py                                  # 10,000 steps, 1,770 faults: some ten minutes
    python benchmarks/chaos.py --steps 200 --faults 40          # a short form
    python benchmarks/chaos.py --seed 7 --output /tmp/chaos.md  # other moments, and nothing written here

Three replicas in processes train a model with batch norm over all rows and dropout, once undisturbed and once with
faults. A seed decides in which steps, of which kind and at which replica they are; a signal that comes from outside
comes at a moment within the step that the seed decides too, as a part of the usual time of a step. A worker's death is
survived by the library itself (`on_worker_loss="retry"`). After an exception of a replica and after Ctrl-C the loop
here runs the step again, as a user's would: from the buffers and the random state with which the step began.

A step is lost if its loss is not the undisturbed run's, bit for bit; rows are counted in the outputs. A step that takes
longer than a minute counts as a hang, and ends the run with the stacks of all threads. The exit status is 0 if nothing
was lost and all final weights are equal bit for bit.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import logging
import os
import platform
import random
import resource
import secrets
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unisono
from unisono.console.progress import for_stderr
from unisono.console.tables import table
from unisono.engines.processes import fork_server
from unisono.engines.processes.engine import Processes

NUM_REPLICAS, ROWS, WIDTH = 3, 17, 200
HANG_S = 60.0
STUCK_S = 5.0  # without progress, a stopped worker is given up
TOKEN = "UNISONO_CHAOS"

# Kinds of faults, and how many of them there are in the full run.
KILLS = {
    "SIGKILL at any moment": 600,
    "SIGKILL in forward": 150,
    "SIGKILL in backward": 150,
    "SIGKILL at a batch norm": 100,
    "SIGKILL at a batch norm's backward": 100,
}
KINDS = {
    **KILLS,
    "segmentation fault": 100,
    "exit with a status": 100,
    "the fork server killed": 50,
    "SIGSTOP": 20,
    "an exception in a replica": 200,
    "Ctrl-C at any moment": 200,
}
PLACES = {  # where a replica does it to itself
    "SIGKILL in forward": "forward",
    "SIGKILL in backward": "backward",
    "SIGKILL at a batch norm": "batch norm",
    "SIGKILL at a batch norm's backward": "batch norm's backward",
    "segmentation fault": "forward",
    "exit with a status": "forward",
    "SIGSTOP": "forward",
    "an exception in a replica": "backward",
}


class AsAskedError(Exception):
    """The exception of a replica."""


class Faulty(nn.Module):
    """A classifier in which one replica in another process does what `fault` names, once, if there is a file `armed`.

    The first layer's gradient is large enough to be summed while backward runs.
    """

    def __init__(self, armed: Path) -> None:
        super().__init__()
        self.armed, self.fault, self.caller = armed, "", os.getpid()
        self.large, self.middle, self.last = nn.Linear(20, 400), nn.Linear(400, WIDTH), nn.Linear(WIDTH, 3)
        self.first, self.second = nn.BatchNorm1d(400), nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = PLACES.get(self.fault)
        h = self.first(self.large(x)).relu()
        if place == "batch norm":  # the other replicas wait at the second one
            self.strike()
        h = self.second(self.middle(self.dropout(h)))
        if place == "batch norm's backward":
            h.register_hook(self.strike)
        if place == "forward":
            self.strike()
        output: torch.Tensor = self.last(h)
        if place == "backward":
            output.register_hook(self.strike)
        return output

    def strike(self, _: object = None) -> None:
        if os.getpid() == self.caller:
            return
        try:
            self.armed.unlink()
        except FileNotFoundError:  # it was another replica's
            return
        if self.fault.startswith("SIGKILL"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "segmentation fault":
            ctypes.string_at(0)
        elif self.fault == "exit with a status":
            os._exit(3)
        elif self.fault == "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise AsAskedError


@dataclass
class Run:
    """One run of the training loop.

    Attributes:
        losses, seconds: of each step.
        rows: how many rows the outputs had, of steps that count.
        state: parameters, buffers, the optimizer's tensors and torch's random state, in the end.
        struck: the faults that happened, by kind.
        struck_in: the steps in which one has happened; in others of the schedule it came too late.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    struck: Counter[str] = field(default_factory=Counter)
    struck_in: set[int] = field(default_factory=set)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a segmentation fault would write gigabytes
    os.environ[TOKEN] = secrets.token_hex(8)
    torch.set_num_threads(1)
    logging.getLogger("unisono").setLevel(logging.ERROR)  # each fault that is survived is a warning
    schedule = schedule_of(options.steps, options.faults, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        calm = train(Path(folder), options.steps, {}, options.seed, "undisturbed")
        disturbed = train(Path(folder), options.steps, schedule, options.seed, "with faults", calm)
    orphans = remaining_processes()
    report, succeeded = described(options, schedule, calm, disturbed, orphans)
    print(report)
    if options.output is not None:
        options.output.write_text(report)
    return 0 if succeeded else 1


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0], epilog="\n".join(lines[1:]), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--faults", type=int, metavar="N", help=f"default: {sum(KINDS.values())}, or a fifth of the steps"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides all faults; default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a file for the report; default: none is written")
    options = parser.parse_args(arguments)
    if options.steps < 10:
        parser.error(f"--steps {options.steps}: expected 10 or more")
    if options.faults is None:
        options.faults = min(sum(KINDS.values()), options.steps // 5)
    if not 0 <= options.faults <= options.steps // 2:
        parser.error(f"--faults {options.faults}: expected 0 to {options.steps // 2}, half of the steps")
    return options


def schedule_of(num_steps: int, num_faults: int, seed: int) -> dict[int, tuple[str, float]]:
    """Return the faults: the step, the kind, and the moment within the step (0 to 1)."""
    choose = random.Random(seed)
    total = sum(KINDS.values())
    kinds = [kind for kind, number in KINDS.items() for _ in range(round(number * num_faults / total))]
    kinds = [*kinds, *KINDS][:num_faults] if len(kinds) < num_faults else choose.sample(kinds, num_faults)
    choose.shuffle(kinds)
    steps = choose.sample(range(3, num_steps), num_faults)
    return {step: (kind, choose.random()) for step, kind in zip(steps, kinds, strict=True)}


def train(
    folder: Path,
    num_steps: int,
    schedule: Mapping[int, tuple[str, float]],
    seed: int,
    title: str,
    calm: Run | None = None,
) -> Run:
    torch.manual_seed(seed)
    module = Faulty(folder / "armed")
    model = unisono.DataParallel(
        module,
        ["cpu"] * NUM_REPLICAS,
        engine=Processes(on_worker_loss="retry", timeout=STUCK_S),
        sync_batch_norm=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    usual_s = statistics.median(calm.seconds) if calm is not None else 0.0
    run = Run()
    progress = for_stderr()
    progress.begin(title, num_steps)
    for step in range(num_steps):
        kind, moment = schedule.get(step, ("", 0.0))
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        began = time.perf_counter()
        run.losses.append(step_with_fault(model, module, optimizer, run, kind, moment * usual_s))
        run.seconds.append(time.perf_counter() - began)
        progress.update(
            title, step + 1, num_steps, f"step {step + 1} of {num_steps}", f"{sum(run.struck.values())} faults"
        )
    faulthandler.cancel_dump_traceback_later()
    progress.close()
    run.state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run.state |= {f"momentum {k}": of["momentum_buffer"] for k, of in enumerate(optimizer.state.values())}
    run.state["random state"] = torch.get_rng_state()
    model.close()
    return run


def step_with_fault(
    model: nn.Module, module: Faulty, optimizer: torch.optim.Optimizer, run: Run, kind: str, after_s: float
) -> float:
    """Take one training step, in which a fault of a kind strikes; return its loss."""
    x, y = torch.randn(ROWS, 20), torch.randint(0, 3, (ROWS,))
    module.fault = kind if kind in PLACES else ""
    if module.fault:
        module.armed.touch()
    random_state, buffers = torch.get_rng_state(), [buffer.clone() for buffer in module.buffers()]
    strikes = from_outside(model, kind, after_s) if kind and not module.fault else contextlib.nullcontext()
    struck = bool(module.fault)
    while True:
        try:
            with strikes as has_struck:
                output = model(x)
                loss = nn.functional.cross_entropy(output, y)
                optimizer.zero_grad()
                loss.backward()
        except (AsAskedError, KeyboardInterrupt):
            struck = True
            torch.set_rng_state(random_state)
            for buffer, before in zip(module.buffers(), buffers, strict=True):
                buffer.data.copy_(before)
        else:
            break
        strikes = contextlib.nullcontext()
    optimizer.step()
    run.rows += len(output)
    if struck or (has_struck is not None and has_struck.is_set()):
        run.struck[kind] += 1
        run.struck_in.add(len(run.losses))
    return loss.item()


@contextlib.contextmanager
def from_outside(model: Any, kind: str, after_s: float) -> Iterator[threading.Event]:
    """Have another thread strike so many seconds after the beginning of the block; wait for it at the end."""
    has_struck = threading.Event()

    def strike() -> None:
        time.sleep(after_s)
        engine: Processes = model._engine
        group = engine._worker_group
        with contextlib.suppress(ProcessLookupError):
            if kind.startswith("Ctrl-C"):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            elif kind == "the fork server killed" and (process := fork_server.server._process) is not None:
                os.kill(process.pid, signal.SIGKILL)
            elif group is not None and group.workers:
                os.kill(group.workers[round(after_s * 1e6) % len(group.workers)].pid, signal.SIGKILL)
            else:
                return
            has_struck.set()

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield has_struck
        thread.join()  # inside, so that an interrupt that comes late is one of this step
    finally:
        thread.join()


def remaining_processes() -> list[int]:
    """Return the processes of this run that still exist, but for this one and what ends by itself within seconds."""
    fork_server.server.end()
    until = time.monotonic() + 5.0
    while (left := processes_with_token()) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def processes_with_token() -> list[int]:
    wanted = f"{TOKEN}={os.environ[TOKEN]}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = wanted in (folder / "environ").read_bytes().split(b"\0")
            if is_ours and int(folder.name) != os.getpid() and "\nState:\tZ" not in (folder / "status").read_text():
                found.append(int(folder.name))
    return found


def described(
    options: argparse.Namespace,
    schedule: Mapping[int, tuple[str, float]],
    calm: Run,
    disturbed: Run,
    orphans: list[int],
) -> tuple[str, bool]:
    """Return the report, and whether all is as it should be."""
    lost = sum(one != other for one, other in zip(calm.losses, disturbed.losses, strict=True))
    lost_rows = calm.rows - disturbed.rows
    hangs = sum(seconds > HANG_S for seconds in disturbed.seconds)
    unequal = [name for name in calm.state if not torch.equal(calm.state[name], disturbed.state[name])]
    usual_s = statistics.median(calm.seconds)
    delays: dict[str, list[float]] = {}
    survived: Counter[str] = Counter()
    for step, (kind, _) in schedule.items():
        if step in disturbed.struck_in:
            delays.setdefault(kind, []).append(disturbed.seconds[step] - usual_s)
            survived[kind] += calm.losses[step] == disturbed.losses[step]
    faults = [row_of(kind, disturbed.struck[kind], survived[kind], delays[kind]) for kind in KINDS if kind in delays]
    if every := [delay for of_kind in delays.values() for delay in of_kind]:
        faults.append(row_of("all", sum(disturbed.struck.values()), sum(survived.values()), every))
    equal = "final parameters, buffers, momentum and random state equal the undisturbed run's, bit for bit"
    facts = {
        "steps": options.steps,
        "SIGKILLs among the faults": sum(disturbed.struck[kind] for kind in KILLS),
        "faults for which their step was over too early": len(schedule) - len(disturbed.struck_in),
        f"hangs (a step of more than {HANG_S:.0f} s)": hangs,
        "lost steps (another loss than undisturbed)": lost,
        "lost rows": lost_rows,
        "orphans (processes that are left)": len(orphans),
        equal: "yes" if not unequal else f"no: {', '.join(unequal)}",
    }
    parts = [
        "# Training under faults",
        f"`python benchmarks/chaos.py --steps {options.steps} --faults {options.faults} --seed {options.seed}`: "
        f"{NUM_REPLICAS} replicas in processes, batch norm over all rows, dropout; torch {torch.__version__}, "
        f"{platform.system()}, {os.cpu_count()} cores. A step takes {usual_s * 1e3:.1f} ms undisturbed.",
        table(["fault", "injected", "survived", "median delay, s", "p99 delay, s"], faults),
        table(["", ""], [[name, str(value)] for name, value in facts.items()]),
    ]
    return "\n\n".join(parts) + "\n", not (lost or lost_rows or hangs or unequal or orphans)


def row_of(kind: str, injected: int, survived: int, delays: list[float]) -> list[str]:
    p99 = sorted(delays)[min(len(delays) - 1, int(0.99 * len(delays)))]
    return [kind, str(injected), str(survived), f"{statistics.median(delays):.2f}", f"{p99:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
