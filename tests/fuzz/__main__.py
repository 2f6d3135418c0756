"""Run random programs with the plain module and with the wrapped one, and compare every number.

    python -m fuzz                                       # 200 programs in each place: some minutes
    python -m fuzz --place ranks --programs 10000        # more in one place
    python -m fuzz --place ranks --seed 123              # one program again, as a finding says

Replicas are in one memory, in separate memory as on devices of their own, in two ranks, or, if asked for, on the
asynchronous devices of tests/async_device, also in two ranks (QUEUED_DEVICES=4 gives each devices of its own):
forwards, backwards, steps of the optimizer and outputs of a map are then on streams drawn at random, each of which
waits for the one before, and kernels are late at random. With make: make fuzz OPTIONS="--place ranks --programs 10000".
By hand: PYTHONPATH=tests .venv/bin/python -m fuzz.

A program builds a model of random blocks and does random things with it: training of every kind, copies, checkpoints,
hooks, interrupts. Outputs, gradients, buffers, parameters and the types of errors have to be those of the plain module,
in double precision; where replicas do something else than one device, a warning or an error may name the cause instead.
The same seed is the same program. A program that takes longer than the limit is ended, and counts as a difference, with
the stacks of its threads.

Of each difference the program is made smaller while it still differs, and printed as a script that runs. The exit
status is 0 if there was no difference.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait

from fuzz.compare import Difference, Outcome
from fuzz.program import ASYNCHRONOUS, ASYNCHRONOUS_RANKS, PLACES, Program
from fuzz.random_programs import random_program
from fuzz.servers import ProgramServer
from fuzz.shrink import shrink
from helpers.docstring_parser import parser_for
from unisono.console.progress import Progress, for_stdout

_SHRUNK_OF_A_KIND = 2  # how many differences of one kind are made smaller
# With -c, because processes that a script on stdin starts look for a file of its name.
_SCRIPT = """PYTHONPATH=tests .venv/bin/python -c "$(cat <<'END'
from fuzz.program import Program, Step
from fuzz.servers import repeat

repeat({program!r})
END
)\""""


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    progress = for_stdout()
    try:
        num_found = sum([hunt(place, options, progress) for place in options.place])
    except KeyboardInterrupt:
        return 130
    finally:
        progress.close()
    return 1 if num_found else 0


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_for("fuzz", __doc__)
    parser.add_argument(
        "--place",
        action="append",
        choices=(*PLACES, ASYNCHRONOUS, ASYNCHRONOUS_RANKS),
        help="of the replicas; may be given several times; default: all but the last two",
    )
    parser.add_argument("--programs", type=int, default=200, metavar="N", help="in each place; default: %(default)s")
    parser.add_argument("--seed", type=int, metavar="N", help="run the program of this seed only")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed; default: %(default)s")
    parser.add_argument("--limit", type=float, default=60.0, metavar="S", help="seconds a program; default: 60")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="programs at once; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    if min(options.programs, options.jobs, options.limit) <= 0:
        parser.error("--programs, --jobs and --limit: expected more than 0")
    options.place = options.place or list(PLACES)
    return options


def hunt(place: str, options: argparse.Namespace, progress: Progress) -> int:
    """Run programs in one place; return how many have shown a difference."""
    task, began = f"programs in {place}", time.monotonic()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.programs)
    seeds_of: dict[str, list[int]] = defaultdict(list)  # by kind of difference
    num_programs = num_steps = num_raised = num_said = num_found = 0
    progress.begin(task, len(seeds))
    for seed, program, outcome in run_all(place, seeds, options):
        num_programs += 1
        num_steps += outcome.num_steps
        num_raised += outcome.raised
        num_said += outcome.said
        found = outcome.difference
        if found is not None:
            num_found += 1
            seeds_of[found.kind].append(seed)
            if len(seeds_of[found.kind]) <= _SHRUNK_OF_A_KIND:
                progress.say(described(seed, program, found, options.limit))
        text = f"{num_programs}/{len(seeds)}: {num_found} differences, seed {seed}"
        progress.update(task, num_programs, len(seeds), text)
    seconds = time.monotonic() - began
    progress.say(
        f"{num_programs} programs in {place}, {num_steps} steps, {seconds:.0f} s: {num_found} differences"
        f" (in {num_raised} programs both sides raised the same error, in {num_said} a message named the cause)"
    )
    for kind, found_by in sorted(seeds_of.items(), key=lambda item: -len(item[1])):
        progress.say(f"  {len(found_by)} x {kind}: seeds {', '.join(map(str, found_by[:12]))}")
    return num_found


def run_all(place: str, seeds: Iterable[int], options: argparse.Namespace) -> Iterator[tuple[int, Program, Outcome]]:
    """Run programs, several at once; yield each with its outcome as it ends."""
    waiting = ((seed, random_program(seed, place)) for seed in seeds)
    idle = [ProgramServer(place, options.limit) for _ in range(options.jobs)]
    busy: dict[ProgramServer, tuple[int, Program]] = {}
    try:
        while True:
            while idle and (job := next(waiting, None)) is not None:
                server = idle.pop()
                busy[server] = job
                server.begin(job[1])
            if not busy:
                return
            ready = wait([server.connection for server in busy])
            for server in [server for server in busy if server.connection in ready]:
                outcome = server.outcome()
                if outcome.difference is not None:
                    server.end()  # the next program begins with a clean process
                idle.append(server)
                yield *busy.pop(server), outcome
    finally:
        for server in (*idle, *busy):
            server.end()


def described(seed: int, program: Program, found: Difference, limit_s: float) -> str:
    """Return what was found, the command that repeats it, and the smallest program that shows it."""
    said, command = found.text.rstrip(), f"make fuzz OPTIONS=\"--place '{program.place}' --seed {seed}\""
    server = ProgramServer(program.place, limit_s)
    try:
        again = server.run(program).difference
        if again is None:
            return f"\n{said}\n\n{command}\nAlone it does not differ: what ran before it matters, or timing.\n"
        small, found = shrink(program, again, lambda candidate: server.run(candidate).difference, 2 * limit_s)
    finally:
        server.end()
    return f"\n{found.text.rstrip()}\n\n{command}\n{_SCRIPT.format(program=small)}\n"


if __name__ == "__main__":
    sys.exit(main())
