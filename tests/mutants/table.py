"""What is written at the end: how many mutants of each file were killed, and each that was not."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from mutants.mutations import Mutant
from mutants.trials import KILLED, NOT_RUN, SURVIVED, TIMED_OUT, Outcome


def summary(outcomes: Mapping[Mutant, Outcome]) -> str:
    """Return the numbers in a line."""
    counts = Counter(outcome.outcome for outcome in outcomes.values())
    killed, tried = counts[KILLED] + counts[TIMED_OUT], len(outcomes) - counts[NOT_RUN]
    rate = f" ({100 * killed / tried:.0f} %)" if tried else ""
    late = f", {counts[TIMED_OUT]} of them by time" if counts[TIMED_OUT] else ""
    not_run = f", {counts[NOT_RUN]} run by no recorded test" if counts[NOT_RUN] else ""
    return f"{len(outcomes)} mutants: {killed} killed{rate}{late}, {counts[SURVIVED]} survived{not_run}"


def table(outcomes: Mapping[Mutant, Outcome]) -> str:
    """Return a page: a row for each file, then each mutant that survived or was not run."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, outcome in outcomes.items():
        counts[mutant.path][outcome.outcome] += 1
    lines = ["# Mutants", "", f"{summary(outcomes)}.", ""]
    lines += ["| file | mutants | killed | by time | survived | run by no recorded test |", "|---|---|---|---|---|---|"]
    for path, of_file in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        numbers = (of_file.total(), of_file[KILLED], of_file[TIMED_OUT], of_file[SURVIVED], of_file[NOT_RUN])
        lines.append(f"| {path} | {' | '.join(map(str, numbers))} |")
    lines += ["", "## Survivors", "", "| change | tests run | tests that run the line |", "|---|---|---|"]
    for mutant, outcome in sorted(outcomes.items(), key=lambda item: (item[0].path, item[0].line)):
        if outcome.outcome in {SURVIVED, NOT_RUN}:
            lines.append(f"| {str(mutant).replace('|', '&#124;')} | {outcome.num_tests} | {outcome.num_covering} |")
    return "\n".join(lines) + "\n"
