"""Run the code of the pages of launchers with Slurm, Open MPI, Ray, Monarch and others on this machine, into a table.

    python -m clusters                      # all that is installed; writes the table of docs/launchers.md
    python -m clusters --only slurm         # one launcher; several: --only slurm --only mpi
    python -m clusters --list               # the launchers, and what is missing here
    python -m clusters --no-install         # install no Debian packages, also where it may

With make: make clusters OPTIONS="--only slurm". By hand, in the environment that make sets up:
PYTHONPATH=tests .venv-clusters/bin/python -m clusters.

Debian packages that are missing are installed with apt-get where this runs as root; elsewhere the command to type is
printed. A launcher that is not there is skipped, and the table says so. Daemons are started for these checks only, from
a temporary folder, and end with them, also after Ctrl-C. Nothing of the system's own Slurm is touched.

clusters-results.md gets the table and the log of every command. The table in docs/launchers.md is written by a run
of everything, so not with --only. The exit status is 0 if nothing has failed, 1 otherwise, and 130 after Ctrl-C.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from clusters import mpi, others, ray_train, slurm, torchrun
from clusters.page import RECORDS, ROOT
from clusters.part import Check, Part
from clusters.report import FAILED, Row, table, write_into_page, write_results
from clusters.site import site
from helpers.docstring_parser import parser_for

PARTS = (torchrun.PART, slurm.PART, mpi.PART, ray_train.PART, *others.PARTS)
RESULTS = ROOT / "clusters-results.md"


def main(arguments: list[str] | None = None) -> int:
    options = _parsed(arguments)
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    if options.list:
        for part in parts:
            print(f"{part.name:12}{part.title}: {part.why_not() or part.version()}")
        return 0
    _install(parts, may_install=options.install)
    rows, logs = list[Row](), dict[str, list[str]]()
    try:
        for number, part in enumerate(parts, 1):
            log = logs[part.title] = []
            rows.extend(_run(part, log, f"[{number}/{len(parts)}] "))
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if rows:
            write_results(RESULTS, rows, logs)
    if not options.only:
        write_into_page(RECORDS, rows)
    num_failed = sum(row.outcome.startswith(FAILED) for row in rows)
    print(f"\n{table(rows)}\n{len(rows)} rows, {num_failed} failed; the log is in {RESULTS.name}")
    return 1 if num_failed else 0


def _run(part: Part, log: list[str], number: str) -> Iterator[Row]:
    """Run the checks of a launcher, and say so; yield their rows."""
    if reason := part.why_not():
        print(f"{number}{part.title}: not run: {reason}", flush=True)
        yield Row(part.title, "-", f"not run: {reason}", None)
        return
    title = f"{part.title} {part.version()}"
    print(f"{number}{title}: starts", flush=True)
    num_run, began = 0, time.monotonic()
    try:
        with site(log) as opened, part.open(opened) as checks:
            for check in checks:
                num_run += 1
                print(f"{number}{title}, {num_run}/{len(checks)}: {check.what} ...", flush=True)
                log.append(f"==== {check.what}")
                row = _row(title, check)
                log.append(f"==== {row.outcome}")
                print(f"{number}    {row.outcome} ({row.seconds:.0f} s)", flush=True)
                yield row
    except (AssertionError, OSError) as error:
        log.append(f"==== it did not start: {error}")
        print(f"{number}{title}: {FAILED}{error}", flush=True)
        yield Row(title, "to start it", f"{FAILED}{error}", time.monotonic() - began)


def _row(title: str, check: Check) -> Row:
    began = time.monotonic()
    try:
        outcome = check.run()
    except Exception as error:  # noqa: BLE001  whatever it is, the other checks are run
        outcome = f"{FAILED}{error if isinstance(error, AssertionError) else f'{type(error).__name__}: {error}'}"
    return Row(title, check.what, outcome, time.monotonic() - began)


def _install(parts: Sequence[Part], *, may_install: bool) -> None:
    """Install the Debian packages that are missing, or say how."""
    missing = sorted({package for part in parts for package in part.missing_debian_packages()})
    if not missing:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if not may_install or os.geteuid() != 0 or not shutil.which("apt-get"):
        print(f"not installed: {', '.join(missing)}. On Debian or Ubuntu: sudo {' '.join(command)}", flush=True)
        return
    print(f"installing: {' '.join(command)}", flush=True)
    for each in (["apt-get", "update", "--quiet=2"], command):
        done = subprocess.run(
            each, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{' '.join(each)}: {done.stderr.strip()[-500:]}", flush=True)


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_for("clusters", __doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=[part.name for part in PARTS],
        help="run the checks of this launcher; may be given several times",
    )
    parser.add_argument("--list", action="store_true", help="list the launchers and what is missing; run nothing")
    parser.add_argument(
        "--install",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="install Debian packages that are missing, where this runs as root (default: yes)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
