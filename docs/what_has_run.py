"""Write what has run: the table of docs/what-has-run.md, and its first lines, the status of the README and home page.

    python docs/what_has_run.py

The results are recorded elsewhere: in docs/records.toml, and in the tables that `make compat`, `make clusters` and
`make clients` write into pages. tests/test_docs.py compares the pages with what this would write. Needs Python alone.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.page_tables import read_table, write_table  # noqa: E402 - the tests' own reading of tables

COMMAND = "python docs/what_has_run.py"
PAGE = "docs/what-has-run.md"
_HEAD = (
    "| run on | command | Python | torch | passed | failed | not run | commit |\n|---|---|---|---|---|---|---|---|\n"
)
_STATUS = "| run on | passed | failed | not run |\n|---|---|---|---|\n"
_ZH_STATUS = "| 在哪里运行过 | 通过 | 失败 | 未运行 |\n|---|---|---|---|\n"
_RUN = re.compile(r"^Run: (?P<date>[\d-]+), commit (?P<commit>.+), Python (?P<python>.+), torch (?P<torch>.+)\.$", re.M)


class Run(NamedTuple):
    """A row of the table."""

    on: str
    command: str
    python: str
    torch: str
    passed: str
    failed: str
    not_run: str
    commit: str


def runs() -> list[Run]:
    """Return all runs that are recorded."""
    return [*_of_suites(), *(_of_record(each) for each in _records()["run"]), _of_launchers(), _of_libraries()]


def table(folder: str) -> str:
    """Return the table of all runs, as it stands in a page of a folder of the repository."""
    rows = [f"| {' | '.join(each._replace(command=f'`{each.command}`'))} |\n" for each in runs()]
    absent = [f"| {each['on']} | | | | {each['why']} | | | |\n" for each in _records()["not_run"]]
    return _from(folder, _HEAD + "".join(rows + absent))


def status(folder: str) -> str:
    """Return the table of the README, or of a page of docs/, in English."""
    return _from(folder, _STATUS + "".join(_status_rows("status", "status_why", "absent")))


def chinese_status() -> str:
    """Return the table of the Chinese README."""
    return _ZH_STATUS + "".join(_status_rows("zh", "zh_why", "zh_absent"))


def _status_rows(name: str, why: str, absent: str) -> list[str]:
    """Return the rows: the suite with the torch that the tests are for, and the runs and gaps that have a name."""
    records = _records()
    suite = next(each for each in _of_suites() if each.python.startswith("3.11") and each.torch == "2.13.0")
    rows = [f"| {records['suite'][name]} | {suite.passed} | {suite.failed} | {suite.not_run} |\n"]
    for run in [each for each in records["run"] if each[name]]:
        not_run = f"{run['not_run']:,}{run[why]}"
        rows.append(f"| {run[name]} | {run['passed']:,} | {run['failed']:,} | {not_run} |\n")
    rows[2:2] = [f"| {each[name]} | {records['suite'][absent]} | | |\n" for each in records["not_run"] if each[name]]
    return rows


def _records() -> dict[str, Any]:
    return tomllib.loads((ROOT / "docs" / "records.toml").read_text(encoding="utf-8"))


def _of_record(run: dict[str, Any]) -> Run:
    failed, not_run = (
        f"{run[key]:,}" + (f": {run[f'{key}_why']}" if run[f"{key}_why"] else "") for key in ("failed", "not_run")
    )
    record, _, date = run["record"].partition(", ")
    commit = f"{run['commit'] or f'not recorded (record: {record})'}, {date}"
    return Run(run["on"], run["command"], run["python"], run["torch"], f"{run['passed']:,}", failed, not_run, commit)


def _of_suites() -> list[Run]:
    """Return the rows of `make compat`."""
    lines = read_table(ROOT / "docs" / "compatibility.md", "make compat").splitlines()[2:]
    found = []
    for line in lines:
        python, torch, passed, failed, skipped, date, commit = (cell.strip() for cell in line.strip("| ").split(" | "))
        found.append(Run("Linux, CPU", "make compat", python, torch, passed, failed, skipped, _with_date(commit, date)))
    return found


def _of_launchers() -> Run:
    """Return the sum of the table of `make clusters`."""
    text = read_table(ROOT / "docs" / "launchers.md", "make clusters")
    outcomes = re.findall(r"^\| .+? \| .+? \| (.+?) \| [\d-]+ \|$", text, re.MULTILINE)
    failed = sum(each.startswith("FAILED") for each in outcomes)
    absent = sum(each.startswith("not run") for each in outcomes)
    on = "[launchers](docs/launchers.md), one machine, CPUs"
    return _sum(on, "make clusters", text, len(outcomes) - failed - absent, failed, absent)


def _of_libraries() -> Run:
    """Return the sum of the table of `make clients`: a row passed, if nothing of it is an exception."""
    text = read_table(ROOT / "docs" / "libraries.md", "make clients")
    outcomes = re.findall(r"^\| .+? \| .+? \| (.+) \|$", text, re.MULTILINE)[1:]
    absent = sum(each.startswith("not run") for each in outcomes)
    passed = sum(re.match(r"(\d+ x )?passed(;.*)?$", each) is not None for each in outcomes)
    failed = len(outcomes) - passed - absent
    run = _sum(
        "other people's [libraries](docs/libraries.md), two CPU replicas", "make clients", text, passed, failed, absent
    )
    return run._replace(failed=f"{failed}, in part") if failed else run


def _sum(on: str, command: str, text: str, passed: int, failed: int, absent: int) -> Run:
    run = _RUN.search(text)
    if run is None:
        raise ValueError(f"the table of {command} has no line of its run")
    commit = _with_date(run["commit"], run["date"])
    return Run(on, command, run["python"], run["torch"], str(passed), str(failed), str(absent), commit)


def _with_date(commit: str, date: str) -> str:
    return f"{commit}, {date}"


def _from(folder: str, text: str) -> str:
    """Return a text of links from the root as one of links from docs/, if that is the folder."""
    return text.replace("](docs/", "](") if folder == "docs" else text


def pages() -> dict[str, str]:
    """Return the table of each page that has one; of docs/what-has-run.md the two."""
    return {
        "README.md": status(""),
        "README.zh-CN.md": chinese_status(),
        "docs/index.md": status("docs"),
        PAGE: f"{status('docs')}\nAll runs:\n\n{table('docs')}",
    }


if __name__ == "__main__":
    for path, text in pages().items():
        write_table(ROOT / path, COMMAND, text)
