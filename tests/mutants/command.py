"""Change one line of the sources at a time, and see whether a test notices.

    python -m mutants                                             # 300 mutants of the core: an hour on two cores
    python -m mutants --count 600                                 # the next 300 of the same set
    python -m mutants --files 'src/unisono/autograd/*' --seed 2   # of some files, another set
    python -m mutants --list                                      # the mutants; none is tried
    python -m mutants --survivors --seconds 300                   # the survivors again, with more of the tests

With make: make mutants OPTIONS="--count 50". By hand: PYTHONPATH=tests .venv/bin/python -m mutants.

A mutant is a change of one place: a condition is turned, a call, an assignment, an argument or a context left out,
arguments are swapped, a bound is moved, another operator or constant, None returned. Lines are drawn with the seed, and
of each line one mutant: the same seed and the same sources are the same set. First it is recorded which tests run which
line, which takes longer than these tests. A recording is kept until the sources, or that file of tests, change. Then a
mutant is written into a copy of the tree, and the tests that run its line are run, the quickest first, until one fails
or takes too long. It survives if none does.

Ctrl-C stops it, and the same command continues: what is known is in runs/mutants. At the end, or when it is stopped, it
writes the table of all files, with each survivor. The exit status is 0 if all have been tried, 130 after Ctrl-C. A
survivor is either equivalent, which is to say that nothing a user can see has changed, or shows what no test guards.

Why not a library: mutmut 3.8 puts a wrapper around every function, which changes tracebacks and the calls that tests
count; it leaves out most decorated functions, chooses tests by function, and does not draw a set. cosmic-ray 8.7 has
one command of tests for all mutants. Neither leaves out a call. Which tests run a line is told by coverage.
"""

import argparse
import fnmatch
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from helpers.docstring_parser import parser_for
from mutants.mutations import Mutant, differs, mutants_of
from mutants.recording import RecordingError, Recordings
from mutants.table import summary, table
from mutants.trials import NOT_RUN, SURVIVED, TIMED_OUT, Outcome, Trials
from mutants.workers import Worker, Workers, files_of
from unisono.console.progress import Progress, for_stdout

ROOT = Path(__file__).parents[2]
FOLDER = Path("runs", "mutants")
_FILE_LIMIT_S = 1200.0  # to record a file of tests
_MOST_TESTS = 500  # of a mutant that is tried for the first time
CORE = ("autograd", "engines", "primitives", "leftovers", "runtime", "distributed")
_OTHERS = (
    "contract",
    "inference",
    "sync_batch_norm",
    "verification",
    "test_bugs.py",
    "test_data_parallel.py",
    "test_outside.py",
)
TESTS = tuple(f"tests/{name}" for name in (*CORE, *_OTHERS) if name != "leftovers")  # whose tests are the contract's


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    options = parsed(arguments)
    folder = root / FOLDER
    mutants = drawn(root, options.files, options.seed, options.count)
    if options.list:
        print(*mutants, sep="\n")
        return 0
    recordings = Recordings(root, folder / "recorded", options.tests)
    results = folder / f"{recordings.sources}.jsonl"
    output = folder / "table.md"
    progress = for_stdout()
    workers = Workers(root, folder, options.jobs)
    try:
        record(recordings, workers, progress, _FILE_LIMIT_S)
        outcomes = read(results, mutants)
        waiting = [mutant for mutant in mutants if not is_done(outcomes.get(mutant), options)]
        trials = Trials(root, recordings, options.seconds, sys.maxsize if options.survivors else _MOST_TESTS)
        hunt(trials, workers, waiting, outcomes, results, progress)
        status = 0
    except KeyboardInterrupt:
        status = 130
    except RecordingError as error:
        raise SystemExit(f"mutants: error: {error}") from None
    finally:
        workers.end()
        progress.close()
    outcomes = read(results, mutants)
    output.write_text(table(outcomes), encoding="utf-8")
    stopped = "; the same command continues" if status else ""
    print(f"{summary(outcomes)}: {output}{stopped}")
    return status


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_for("mutants", __doc__)
    core = [f"src/unisono/{name}/*" for name in CORE]
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the set; default: %(default)s")
    parser.add_argument("--count", type=int, default=300, metavar="N", help="how many mutants; default: %(default)s")
    parser.add_argument("--files", action="append", metavar="GLOB", help=f"to change; default: {', '.join(core)}")
    parser.add_argument(
        "--tests", action="append", metavar="PATH", help=f"to record, and run; default: {', '.join(TESTS)}"
    )
    parser.add_argument(
        "--seconds", type=float, default=45.0, metavar="S", help="of tests a mutant, as recorded; default: %(default)g"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants at once; default: %(default)s")
    parser.add_argument(
        "--survivors", action="store_true", help="try survivors again that have not met all their tests"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, and try none")
    options = parser.parse_args(arguments)
    if min(options.count, options.seconds, options.jobs) <= 0:
        parser.error("--count, --seconds and --jobs: expected more than 0")
    options.files, options.tests = options.files or core, options.tests or TESTS
    return options


def drawn(root: Path, globs: Iterable[str], seed: int, count: int) -> list[Mutant]:
    """Draw lines, and of each a mutant. A larger count is the same mutants, and more."""
    names = [name for name in files_of(root) if name.endswith(".py")]
    sources = {name: (root / name).read_bytes() for glob in globs for name in fnmatch.filter(names, glob)}
    by_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for name in sorted(sources):
        for mutant in mutants_of(name, sources[name]):
            by_line[name, mutant.line].append(mutant)
    if not by_line:
        raise SystemExit(f"mutants: error: --files: no lines to change in {', '.join(globs)}")
    random_numbers = random.Random(seed)
    lines, found = sorted(by_line), list[Mutant]()
    random_numbers.shuffle(lines)
    for line in lines:
        mutants = by_line[line]
        random_numbers.shuffle(mutants)
        found += [mutant for mutant in mutants if differs(mutant, sources[mutant.path])][:1]
        if len(found) == count:
            break
    return found


def record(recordings: Recordings, workers: Workers, progress: Progress, limit_s: float) -> None:
    """Record which tests run which lines, where this is not known."""
    missing = recordings.missing()
    task = "recording"
    if not recordings.files:
        raise SystemExit("mutants: error: --tests: no files of tests there")
    if not missing:
        return
    progress.begin(task, len(missing))

    def recorded(worker: Worker, file: str) -> str:
        return recordings.record(worker, file, limit_s)

    for num, (file, how) in enumerate(workers.map(recorded, missing), 1):
        progress.say(f"recorded {file}: {how}")
        progress.update(task, num, len(missing), f"{num}/{len(missing)} files of tests")


def hunt(
    trials: Trials,
    workers: Workers,
    mutants: list[Mutant],
    outcomes: dict[Mutant, Outcome],
    results: Path,
    progress: Progress,
) -> None:
    """Try mutants; write what becomes of each to a file at once."""
    task, began, total = "mutants", time.monotonic(), len(mutants)
    progress.begin(task, total)

    covering = {mutant: trials.covering(mutant) for mutant in sorted(mutants)}  # one file after the other

    def tried(worker: Worker, mutant: Mutant) -> Outcome:
        return trials.try_mutant(worker, mutant, covering[mutant])

    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8", buffering=1) as file:
        for num, (mutant, outcome) in enumerate(workers.map(tried, mutants), 1):
            outcomes[mutant] = outcome
            file.write(json.dumps({**mutant._replace(lines=())._asdict(), **outcome._asdict()}) + "\n")
            if outcome.outcome in {SURVIVED, TIMED_OUT}:
                of = f"{outcome.num_tests} of {outcome.num_covering} tests"
                progress.say(f"{outcome.outcome}: {mutant} ({of}, {outcome.seconds:.0f} s)")
            left_s = (time.monotonic() - began) / num * (total - num)
            progress.update(task, num, total, f"{num}/{total}, {left_s / 60:.0f} min left; {summary(outcomes)}")


def read(results: Path, mutants: list[Mutant]) -> dict[Mutant, Outcome]:
    """Return what has become of mutants so far; of one that has been tried several times, the last."""
    outcomes = dict[tuple[str, int, str, str], Outcome]()
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else []:
        fields = json.loads(line)
        key = (fields["path"], fields["start"], fields["before"], fields["after"])
        outcomes[key] = Outcome(*(fields[name] for name in Outcome._fields if name in fields))
    keys = {mutant: (mutant.path, mutant.start, mutant.before, mutant.after) for mutant in mutants}
    return {mutant: outcomes[key] for mutant, key in keys.items() if key in outcomes}


def is_done(outcome: Outcome | None, options: argparse.Namespace) -> bool:
    if outcome is None or outcome.outcome == NOT_RUN:  # which takes no time, and may have been recorded meanwhile
        return False
    met_all = outcome.num_tests == outcome.num_covering or outcome.most_seconds >= options.seconds
    return not options.survivors or outcome.outcome != SURVIVED or met_all
