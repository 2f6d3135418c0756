"""Look for races: run programs on the asynchronous device with other delays each time, until one of them fails.

    python -m async_device.races                                    # for ten minutes
    python -m async_device.races --minutes 120
    python -m async_device.races --only training --seeds 200        # a number of runs, of one program
    python -m async_device.races --only training --seed 17          # one run again, as a failure says
    python -m async_device.races --devices 4                        # replicas on four devices, in a chain

With make: make races OPTIONS="--minutes 120". By hand: PYTHONPATH=tests .venv/bin/python -m async_device.races.

A seed gives how late kernels may be at most, and which of them are late. With each seed run the training of
async_device/training.py, whose outputs, gradients and weights have to have the same bits as without delays, and one
file of the contract of the replicas (tests/contract), in turn. Each run is a process of its own; one that takes longer
than the limit is ended, with the stacks of its threads. Threads still start when the machine lets them: a seed that has
failed once may need several runs to fail again.

The exit status is 0 if nothing has failed, 1 after the first failure, and 130 after Ctrl-C. All that the run that has
failed has printed is in a file, which is named.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from async_device.faults import FAULTS
from helpers.docstring_parser import parser_for

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "runs" / "races"  # what runs that have failed have printed
TRAINING, NUM_TRAININGS = "training", 5  # of a process
CONTRACT = ("gradients", "map", "training_features", "inputs_outputs", "sync_batch_norm", "kept_replicas", "failures")
DELAYS_US = (100, 300, 1000, 3000)  # the longest, by seed
_DIFFERENCES_SHOWN, _LINES_SHOWN = 10, 60
_END_S = 30.0  # for a run to print its stacks


class Run(NamedTuple):
    """How a run of a program has ended."""

    failure: str | None  # None: it has not failed
    output: str  # what it has printed to standard output; after a failure, to standard error too


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    began, num_runs, num_seeds = time.monotonic(), 0, 0
    deadline = began + 60 * options.minutes
    found = None
    try:
        races = Races(options)
        for seed in seeds_of(options):
            if options.seed is None and options.seeds is None and time.monotonic() > deadline:
                break
            num_seeds += 1
            for program in programs_of(seed, options.only):
                found = races.run(program, seed)
                num_runs += 1
                if found is not None:
                    break
            if found is not None:
                break
    except KeyboardInterrupt:
        print()  # ends the line of the run
        status, end = 130, "interrupted"
    except Exception as error:  # noqa: BLE001 - of this program, or of the machine: what was run is told all the same
        print()
        traceback.print_exc()
        status, end = 1, f"ended by {type(error).__name__}: {error}"
    else:
        status, end = (0, "nothing has failed") if found is None else (1, found)
    print(f"{num_runs} runs with {num_seeds} seeds in {(time.monotonic() - began) / 60:.1f} minutes: {end}", flush=True)
    return status


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_for("races", __doc__)
    programs = (TRAINING, *CONTRACT)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="for how long; default: %(default)g")
    parser.add_argument("--seeds", type=int, metavar="N", help="run this many seeds instead, however long it takes")
    parser.add_argument("--first", type=int, metavar="N", help="the first seed; default: 1 with --seeds, else random")
    parser.add_argument("--seed", type=int, metavar="N", help="run this seed only")
    parser.add_argument(
        "--only", action="append", choices=programs, metavar="NAME", help=f"run this each time: {', '.join(programs)}"
    )
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="from 2 to 4; default: %(default)d")
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="seconds a run; default: %(default)g")
    parser.add_argument("--fault", metavar="NAME", help="plant a fault of async_device/faults.py in the training")
    options = parser.parse_args(arguments)
    if not all(each > 0 for each in (options.minutes, options.limit, 1 if options.seeds is None else options.seeds)):
        parser.error("--minutes, --seeds and --limit: expected more than 0")
    if not 2 <= options.devices <= 4:
        parser.error(f"--devices: expected 2, 3 or 4, but got {options.devices}")
    if options.seed is not None and options.seeds is not None:
        parser.error("--seed is one seed, and --seeds a number of them: give one of the two")
    if min(each for each in (options.seed, options.first, 0) if each is not None) < 0:
        parser.error("--seed and --first: expected 0 or more")
    if options.fault is not None and options.fault not in FAULTS:
        parser.error(f"--fault: expected one of {', '.join(map(repr, FAULTS))}")
    return options


def seeds_of(options: argparse.Namespace) -> Iterator[int]:
    if options.seed is not None:
        return iter([options.seed])
    first = options.first if options.first is not None else 1 if options.seeds else random.randrange(10**6)
    return iter(range(first, first + options.seeds)) if options.seeds else itertools.count(first)


def programs_of(seed: int, only: list[str] | None) -> list[str]:
    return only or [TRAINING, CONTRACT[seed % len(CONTRACT)]]


class Races:
    """Runs programs. The first run is the training without delays, whose bits are those that it has to have."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._expected: dict[str, str] | None = None
        number = options.devices
        named = ",".join(f"queued:{index}" for index in range(number))
        self._devices = {"QUEUED_DEVICES": str(number), "UNISONO_TEST_DEVICES": named}

    def run(self, program: str, seed: int) -> str | None:
        """Run a program with a seed, and say how it went; return how to repeat it if it has failed."""
        if program == TRAINING and self._expected is None:
            self._expected = self._bits_without_delays()
        began, delay_us = time.monotonic(), random.Random(seed).choice(DELAYS_US)
        print(f"seed {seed}, delays up to {delay_us} us: {program} ", end="", flush=True)
        ended = self._ended(program, seed, delay_us)
        failure, output = self._compared(ended.output) if program == TRAINING and ended.failure is None else ended
        seconds = time.monotonic() - began
        if failure is None:
            print(f"{output} ({seconds:.0f} s)", flush=True)
            return None
        again = ["--seed", str(seed), "--only", program, "--devices", str(self._options.devices)]
        if self._options.fault is not None:
            again += ["--fault", self._options.fault]
        KEPT.mkdir(parents=True, exist_ok=True)
        kept = KEPT / f"{program}-seed-{seed}.txt"
        kept.write_text(output, encoding="utf-8")
        print(f"failed ({seconds:.0f} s; all of its output: {kept})\n{failure}", flush=True)
        return f"to repeat it: PYTHONPATH=tests {sys.executable} -m async_device.races {shlex.join(again)}"

    def _bits_without_delays(self) -> dict[str, str]:
        env = {**self._devices, "QUEUED_DELAY_US": "0"}
        ended = _end([sys.executable, "-m", "async_device.training", "1"], env, self._options.limit)
        if ended.failure is not None:
            raise RuntimeError(f"the training fails without delays: {ended.failure}")
        bits: dict[str, str] = json.loads(ended.output)[0]
        return bits

    def _ended(self, program: str, seed: int, delay_us: int) -> Run:
        env = {**self._devices, "QUEUED_SEED": str(seed), "QUEUED_DELAY_US": str(delay_us)}
        if program == TRAINING:
            fault = [] if self._options.fault is None else [self._options.fault]
            command = [sys.executable, "-m", "async_device.training", str(NUM_TRAININGS), *fault]
            return _end(command, env, self._options.limit)
        limit = ["-o", f"faulthandler_timeout={self._options.limit / 2:.0f}"]
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            f"tests/contract/test_{program}.py",
            "-x",
            "-q",
            "--no-header",
            "-r",
            "fE",
        ]
        return _end([*pytest, "-p", "no:cacheprovider", "--tb=short", *limit], env, self._options.limit, last_line=True)

    def _compared(self, output: str) -> Run:
        assert self._expected is not None
        try:
            trainings = json.loads(output)
        except ValueError as error:
            return Run(f"it has printed no digests ({error})", output)
        different = [name for name, bits in self._expected.items() if {each[name] for each in trainings} != {bits}]
        if not different:
            return Run(None, f"has the same bits, {len(trainings)} times {len(self._expected)} tensors")
        shown = "\n".join(f"    {name}" for name in different[:_DIFFERENCES_SHOWN])
        return Run(
            f"{len(different)} of {len(self._expected)} tensors have other bits than without delays:\n{shown}", output
        )


def _end(command: list[str], env: dict[str, str], limit_s: float, *, last_line: bool = False) -> Run:
    """Run a command to its end, or to the limit; Ctrl-C ends it at once."""
    folders = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    common = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    common["PYTHONPATH"] = os.pathsep.join(folders)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **common, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C in the terminal is for this process alone
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _signal_group(process, signal.SIGABRT)  # faulthandler prints the stacks
            try:
                out, err = process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:  # such as one that has stopped, or has left its output to another
                _signal_group(process, signal.SIGKILL)
                out, err = process.communicate()
            return Run(f"it takes longer than {limit_s:.0f} s:\n{_last_lines(out + err)}", out + err)
        except BaseException:
            _signal_group(process, signal.SIGKILL)
            raise
    if process.returncode:
        return Run(f"exit status {process.returncode}:\n{_last_lines(out + err)}", out + err)
    return Run(None, out.strip().rpartition("\n")[2].strip("= ") if last_line else out)


def _signal_group(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.killpg(process.pid, number)


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-_LINES_SHOWN:])


if __name__ == "__main__":
    sys.exit(main())
