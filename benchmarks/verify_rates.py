"""Two rates of `unisono.verify`: how often it says "same" of a faulty program, and "different" of a right one.

    python benchmarks/verify_rates.py                        # all programs, some minutes on two cores
    python benchmarks/verify_rates.py --only resnet          # programs whose names contain it
    python benchmarks/verify_rates.py --check                # first confirm each program's truth, without verify
    python benchmarks/verify_rates.py --large                # only time verify, on 100 million parameters
    python benchmarks/verify_rates.py --check --output benchmarks/verify_rates.md

verify_programs.py has 60 models whose numbers with replicas are one device's, and 60 with a planted fault. The truth
does not come from verify: `--check` takes the step on one device and through `DataParallel`, in double precision and
without random draws, and compares each parameter's gradient, relative to the largest value of that gradient. A right
program's differ by less than 1e-6, a fault's by 5 % or more, and in the program's own precision as well.

A fault that no row of the report shows as different counts as a false "same", also if its rows are merely not judged.
The exit status is 1 if a verdict is false, or with --check a truth is not confirmed.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from verify_models import Program, setting, tokens
from verify_programs import FAULTY, RIGHT

import unisono
from unisono.console.tables import table

RIGHT_BELOW, FAULT_ABOVE = 1e-6, 0.05
# A gradient that is zero in exact arithmetic, such as that of a bias on keys, is this small next to the largest one.
ZERO = 1e-13


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="programs whose names contain NAME, in any case")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and inputs (default: 0)")
    parser.add_argument("--check", action="store_true", help="confirm each program's truth, too")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table into this file, too")
    parser.add_argument("--large", action="store_true", help="time verify on a transformer of 100 million parameters")
    options = parser.parse_args()
    if options.output and (options.output.is_dir() or not options.output.parent.is_dir()):
        parser.error(f"--output {options.output}: expected a file, in a folder that exists")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.large:
        print(f"4 x 64 tokens: verify takes {large_s():.1f} s")
        return
    chosen = [
        (program, faulty)
        for programs, faulty in ((RIGHT, False), (FAULTY, True))
        for program in programs
        if options.only.lower() in program.name.lower()
    ]
    if not chosen:
        parser.error(f"--only {options.only}: no program has this in its name")
    outcomes = []
    for number, (program, faulty) in enumerate(chosen, 1):
        outcomes.append(outcome(program, faulty, options.seed, options.check))
        print(f"{number:3} of {len(chosen)}: {outcomes[-1]}", flush=True)
    text = page(outcomes, options.seed)
    print(f"\n{text}")
    if options.output:
        options.output.write_text(f"# How often verify is wrong\n\n{text}\n", encoding="utf-8")
    sys.exit(any(each.is_false or each.truth_fails for each in outcomes))


# ---- the truth -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """The largest difference of a gradient, relative to that gradient's own largest value.

    Gradients that are zero in exact arithmetic are left out: only rounding is left of them.
    """

    wide: float  # in double precision
    own: float  # in the precision of the program
    name: str  # of the parameter


def truth(program: Program, faulty: bool, seed: int) -> Truth:
    with setting(wide=True, draws=False):
        wide = differences(program, seed)
    with setting(wide=False, draws=False):
        own = differences(program, seed)
    if faulty:  # both of one gradient: one that underflows in the program's own precision does not count
        name = max(wide, key=lambda name: min(wide[name], own.get(name, 0.0)))
        return Truth(wide[name], own.get(name, 0.0), name)
    name = max(wide, key=lambda name: own.get(name, 0.0))
    return Truth(max(wide.values()), own.get(name, 0.0), name)


def differences(program: Program, seed: int) -> dict[str, float]:
    """Return each gradient's difference between one device and replicas, relative to its own size."""
    one, several = (gradients(program, seed, replicas) for replicas in (1, program.replicas))
    largest = max(float(grad.abs().max()) for grad in one.values())
    found = {}
    for name, grad in one.items():
        size, difference = (float(each.abs().max()) for each in (grad, grad - several[name]))
        if max(size, difference) > ZERO * largest:
            found[name] = difference / max(size, ZERO * largest)
    return found


def gradients(program: Program, seed: int, replicas: int) -> dict[str, Tensor]:
    model, inputs, target = program.build(seed)
    run = model if replicas == 1 else unisono.DataParallel(model, ["cpu"] * replicas, **program.options)
    args, kwargs = (
        ((), inputs) if isinstance(inputs, dict) else (inputs, {}) if isinstance(inputs, tuple) else ((inputs,), {})
    )
    output = run(*args, **kwargs)
    program.task.loss(output, target).backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: (grad.to_dense() if grad.is_sparse else grad).double() for name, grad in found.items()}


# ---- the verdict -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    program: Program
    faulty: bool
    verdict: str  # "same", "different" or "not judged"
    by_gradient: bool  # whether a gradient is among what differs
    seconds: float
    truth: Truth | None
    detail: str = ""

    @property
    def is_false(self) -> bool:
        return self.verdict != "different" if self.faulty else self.verdict == "different"

    @property
    def truth_fails(self) -> bool:
        if self.truth is None:
            return False
        if self.faulty:
            return min(self.truth.wide, self.truth.own) < FAULT_ABOVE
        return not self.truth.wide < RIGHT_BELOW

    def __str__(self) -> str:
        kind = "fault" if self.faulty else "right"
        checked = ""
        if self.truth is not None:
            what = "NOT CONFIRMED" if self.truth_fails else "confirmed"
            checked = f", {what} ({self.truth.wide:.1e}, {self.truth.own:.1e} at {self.truth.name})"
        shown = f"FALSE {self.verdict}" if self.is_false else self.verdict
        return f"{kind}: {self.program.name}: {shown} in {self.seconds:.1f} s{checked}{self.detail}"


def outcome(program: Program, faulty: bool, seed: int, check: bool) -> Outcome:
    known = truth(program, faulty, seed) if check else None
    model, inputs, target = program.build(seed)
    begun = time.perf_counter()
    report = unisono.verify(
        model,
        inputs,
        target,
        program.task.criterion,
        device_ids=["cpu"] * program.replicas,
        show=False,
        **program.options,
    )
    seconds = time.perf_counter() - begun
    verdict = "different" if report.differences else "same" if report.same else "not judged"
    by_gradient = any(row.kind == "gradient" for row in report.differences)
    detail = ""
    if report.differences and not faulty:
        worst = max(report.differences, key=lambda row: row.badness)
        by = f"{worst.kind} {worst.name} by {worst.difference:.1e} of {worst.scale:.1e}"
        detail = f"; {len(report.differences)} rows, {by}"
    elif verdict == "not judged":
        not_judged = [f"{row.kind} {row.name}" for row in report.not_judged] or map(str, report.findings)
        detail = f"; {', '.join(list(not_judged)[:3])}"
    return Outcome(program, faulty, verdict, by_gradient, seconds, known, detail)


def page(outcomes: Sequence[Outcome], seed: int) -> str:
    """Return the table, and the rates as its last line."""
    rows = [
        [
            each.program.name,
            "fault" if each.faulty else "right",
            f"{each.program.dtype}".removeprefix("torch."),
            f"**{each.verdict}**" if each.is_false else each.verdict,
            ("yes" if each.by_gradient else "no") if each.verdict == "different" else "",
            *([f"{each.truth.wide:.0e}", f"{each.truth.own:.0e}"] if each.truth else ["", ""]),
            f"{each.seconds:.1f}",
        ]
        for each in outcomes
    ]
    header = ["program", "truth", "type", "verdict", "a gradient", "in float64", "in its own type", "s"]
    right, faulty = ([each for each in outcomes if each.faulty is kind] for kind in (False, True))
    return "\n".join(
        [
            f"torch {torch.__version__}, seed {seed}, replicas on the CPU. **Bold**: a false verdict. `a gradient`: "
            "whether one is among what differs. `in float64`, `in its own type`: the largest difference of a gradient, "
            "relative to that gradient's own size.",
            "",
            table(header, rows, text_columns=5),
            "",
            f"false same: {sum(each.is_false for each in faulty)} of {len(faulty)}; "
            f"false different: {sum(each.is_false for each in right)} of {len(right)}; "
            f"right models with values not judged: {sum(each.verdict == 'not judged' for each in right)}",
        ]
    )


def large_s() -> float:
    """Return how many seconds verify takes on a transformer of 100 million parameters, 4 x 64 tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(16384, 896),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(896, 14, 3584, batch_first=True), 9),
    )
    print(f"{sum(each.numel() for each in model.parameters()) / 1e6:.0f} million parameters", flush=True)
    inputs = tokens(4, 64, vocab=16384)()
    begun = time.perf_counter()
    unisono.verify(model, inputs, device_ids=["cpu", "cpu"], show=False)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
