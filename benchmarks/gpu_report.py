"""The report of gpu_check.py in Markdown, from the results so far, and its lines on the terminal.

It begins with the most important: whether anything failed, and what was not run.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

REMEDY = """Install pytest for this Python, name another one (make gpu-check PYTHON=...), or bring it along:
`pip download -d wheels pytest` where there is a network, with the same Python version; then copy `wheels` here."""

DRY = """**Dry run on {devices}: not a measurement.** It shows that the checks can be run, and nothing about a GPU or
about speed."""
_FAILED = ("failed", "hung", "crashed")
_TESTED_WITH = "2.13"  # the torch that the test suite runs against


def render(machine: dict[str, Any], groups: Sequence[Any], state: str, seconds: float, *, dry: bool) -> str:
    """Return the report.

    Args:
        machine: as gpu_children.machine() returns it.
        groups: the outcome of each, as gpu_check.Done.
        state: "under way", "complete" or "interrupted".
        seconds: since the beginning.
        dry: whether it was a dry run, on simulated devices or on the CPU.
    """
    simulated = f"{len(machine['accelerators'])} devices simulated on the CPU" if machine["accelerators"] else "the CPU"
    parts = [
        "# gpu-check",
        *([DRY.format(devices=simulated)] if dry else []),
        f"**{verdict(groups, state)}** {seconds:.0f} s.",
        *left_out(groups),
        *([] if dry else goals(groups)),
        "## Machine",
        machine_table(machine),
        "## Checks",
        groups_table(groups),
        *failures(groups),
        *figures(groups, dry=dry),
        *not_run(groups),
        *seen_warnings(groups),
        *every_check(groups),
    ]
    return "\n\n".join(parts) + "\n"


def verdict(groups: Sequence[Any], state: str) -> str:
    """Return the outcome in a sentence."""
    count = Counter(check.outcome for done in groups for check in done.checks.values())
    bad = [f"{count[outcome]} {outcome}" for outcome in _FAILED if count[outcome]]
    broken = sum(bool(done.problem) for done in groups)
    bad += [f"{broken} {'group' if broken == 1 else 'groups'} not run to the end"] if broken else []
    others = [f"{count[o]} {word}" for o, word in (("skipped", "not run"), ("cut", "cut")) if count[o]]
    absent = sum(bool(done.not_run) for done in groups)
    others += [f"{absent} {'group' if absent == 1 else 'groups'} left out"] if absent else []
    ended = {"complete": "Complete", "interrupted": "Interrupted", "under way": "Under way"}[state]
    passed = f"{count['passed']} checks passed"
    return f"{ended}: {', '.join([passed, *bad, *others])}."


def in_one_line(done: Any) -> str:
    """Return the outcome of a group in one line."""
    outcomes = Counter(check.outcome for check in done.checks.values())
    words = [f"{outcomes[o]} {o}" for o in ("passed", *_FAILED, "skipped", "cut") if outcomes[o]]
    problem = [done.problem.splitlines()[0]] if done.problem else []
    return f"{', '.join([*words, *problem]) or 'nothing'} ({done.seconds:.0f} s)"


def left_out(groups: Sequence[Any]) -> Iterator[str]:
    """Yield what ran, where some groups could not be run at all, and the remedy."""
    names = [f'"{done.group.name}"' for done in groups if done.not_run]
    if names:
        ran = ", ".join(f'"{done.group.name}"' for done in groups if not done.not_run)
        reason = next(done.not_run for done in groups if done.not_run)
        yield f"**Only a part ran: {ran or 'nothing'}.** Left out: {', '.join(names)}: {reason}.\n{REMEDY}"


def goals(groups: Sequence[Any]) -> Iterator[str]:
    """Yield the goals of the figures, and whether they were met."""
    lines = [
        f"- {f['name']}: {f['value']:.4g} {f['unit']}; {goal[1]}"
        for done in groups
        for f in done.figures
        if f["value"] is not None and (goal := re.search(r"(goal.*, (?:met|missed))", f["note"]))
    ]
    if lines:
        lines.sort(key=lambda line: line.endswith("met"))
        yield f"Goals of speed and accuracy, {sum(line.endswith('missed') for line in lines)} missed:"
        yield "\n".join(lines)


def machine_table(machine: dict[str, Any]) -> str:
    """Return the table of the machine: kinds and numbers, without names of hosts or users."""
    found = Counter(
        f"{a['name']}, {a['memory_gib']} GiB, capability {a['capability']}" for a in machine["accelerators"]
    )
    devices = "; ".join(f"{count} x {name}" for name, count in found.items()) or "none"
    rows = [("accelerators", devices), ("system", f"{machine['system']}, {machine['cores']} cores")]
    rows += [(name, value) for name, value in machine["versions"].items()]
    torch = machine["versions"].get("torch", "")
    if not torch.startswith(_TESTED_WITH):
        rows.append(("note", f"the test suite of unisono runs against torch {_TESTED_WITH}, not {torch}"))
    return table(("", ""), rows)


def groups_table(groups: Sequence[Any]) -> str:
    """Return a row for each group."""
    outcomes = ("passed", *_FAILED, "skipped", "cut")
    rows = []
    for done in groups:
        counts = [str(done.count(outcome) or "") for outcome in outcomes]
        begun = f"{done.seconds:.0f} of {done.group.budget_s:.0f}" if done.seconds else "not begun"
        begun = "left out" if done.not_run else begun
        rows.append((done.group.name, *counts, begun))
    return table(("group", *outcomes, "seconds"), rows)


def failures(groups: Sequence[Any]) -> Iterator[str]:
    """Yield a section for each check that failed, hung or crashed, and for each group that could not be run."""
    bad = [(done, check) for done in groups for check in done.checks.values() if check.outcome in _FAILED]
    if bad or any(done.problem for done in groups):
        yield "## Failures"
    for done in groups:
        if done.problem:
            yield f"### {done.group.name}\n\n{fenced(done.problem)}"
    for done, check in bad:
        yield f"### {done.group.name}: {check.name}\n\n{check.outcome}\n\n{fenced(check.text)}"


def figures(groups: Sequence[Any], *, dry: bool) -> Iterator[str]:
    """Yield the section of figures."""
    taken = [figure for done in groups for figure in done.figures]
    if taken and dry:
        yield "## Figures (dry run, tiny sizes: no values)"
        rows = [(f["name"], f["note"] if f["value"] is None else "can be measured") for f in taken]
        yield table(("figure", ""), rows)
    elif taken:
        rows = [(f["name"], "" if f["value"] is None else f"{f['value']:.4g}", f["unit"], f["note"]) for f in taken]
        yield "## Figures"
        yield table(("figure", "value", "unit", ""), rows)


def not_run(groups: Sequence[Any]) -> Iterator[str]:
    """Yield the reasons why checks were not run, with the number of checks."""
    reasons = Counter(check.text for done in groups for check in done.checks.values() if check.outcome == "skipped")
    cut = {done.group.name: done.count("cut") for done in groups if done.count("cut")}
    lines = [
        f"- {count} x {reason.strip().splitlines()[0] if reason.strip() else 'no reason'}"
        for reason, count in reasons.most_common()
    ]
    lines += [f'- {count} checks of "{name}": cut, their time was over' for name, count in cut.items()]
    stopped = [check for done in groups for check in done.checks.values() if check.outcome == "cut" and check.text]
    lines += [f"- {check.name}: {check.text.splitlines()[0]}" for check in stopped]
    if lines:
        yield "## Not run"
        yield "\n".join(lines)


def seen_warnings(groups: Sequence[Any]) -> Iterator[str]:
    """Yield the warnings that were given."""
    seen = Counter(text for done in groups for text in set(done.warnings))
    if seen:
        yield "## Warnings"
        yield "\n".join(f"- {text}" for text in seen)


def every_check(groups: Sequence[Any]) -> Iterator[str]:
    """Yield all checks, group by group."""
    yield "## Every check"
    for done in groups:
        rows = [(check.name, check.outcome, f"{check.seconds:.2f}") for check in done.checks.values()]
        if rows:
            listed = table(("check", "outcome", "seconds"), rows)
            yield f"<details><summary>{done.group.name}: {len(rows)}</summary>\n\n{listed}\n\n</details>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|")


def fenced(text: str) -> str:
    """Return text in a code block, whose fence is longer than any fence in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{text.strip()}\n{fence}"
