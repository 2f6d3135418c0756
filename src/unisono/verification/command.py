"""The command `unisono verify package.module:build`: from the words of the command line to a report.

Every error is one line: in the arguments, in finding and calling `build`, and in running the model.
"""

import argparse
from typing import Any

from unisono.console.device_option import NAMED, choose_devices
from unisono.console.errors import DONE, FAILED, MISUSED, CommandError
from unisono.console.options import TARGET, add_options_of_wrappers, expect_weights
from unisono.console.targets import TargetError, current_folder_first, module_of, one_line
from unisono.runtime.devices import accelerators
from unisono.verification.targets import build_arguments
from unisono.verification.verify import verify

SUMMARY = "compare your model on one device and on several"

DESCRIPTION = """\
Run your model on one device and on several, from the same state, in training and in eval mode, and compare outputs,
loss, gradients and buffers. Where they differ, name the first submodule that does, the cause, and the line to write.
Random draws are switched off meanwhile: dropout drops nothing. A row is one sample of the batch.

package.module:build is a function without arguments, found from the current folder. It returns (model, inputs), or a
dict with arguments of unisono.verify: model, inputs, target, criterion, step, out_dims, and so on. Options given here
replace those in the dict.
"""

EXAMPLES = """\
examples:
  unisono verify train:build
  unisono verify train:build --shares 2,1
  unisono verify train:build --shares 2,1 --sync-batch-norm
  unisono verify package.module:build --devices cuda:0,cuda:1 --in-dims 1 --out-dims 1

where train.py has, for instance:
  def build():
      return model, torch.randn(30, 1, 28, 28)

exit status:
  0  the same, or the differences follow from an option that was given (--no-sync-batch-norm, --scalars stack)
  1  something differs
  2  not compared, or not judged: a wrong argument; the model failed, has nothing to compare, or draws random numbers
     that cannot be switched off; rounding decides a value; or one device had all rows
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar=TARGET, help="your function that returns the model and a batch")
    parser.add_argument(
        "--devices",
        metavar="WHICH",
        help=(
            "auto: all accelerators (two replicas on it if there is only one), or two CPU replicas if there is none; "
            f"{NAMED} (default: auto)"
        ),
    )
    add_options_of_wrappers(parser)


def run(given: dict[str, Any]) -> int:
    """Find the model, compare, print the report, and return the exit status."""
    target, which = given.pop("target"), given.pop("devices", "auto")
    if target.endswith(".py"):
        raise TargetError(
            f"{target}: expected {TARGET}, such as {module_of(target)}:build; or compare the first step of the script "
            f"as it is: unisono run --verify {target}"
        )
    if which != "auto":
        given["device_ids"] = choose_devices(which)

    try:
        with current_folder_first():
            arguments = build_arguments(target) | given
            expect_weights(given, len(arguments.get("device_ids") or ()) or max(2, len(accelerators())))
            report = verify(**arguments, show=False)
    except CommandError:
        raise
    except Exception as error:
        raise TargetError(f"{target} could not be compared: {one_line(error)}") from error
    if report.num_replicas == 1:
        raise TargetError(
            f"{target}: nothing was compared, because one device had all rows (samples): give two devices or "
            "more (--devices cpu,cpu), and a batch with at least one row for each"
        )
    if not report.rows and report.compared:
        raise TargetError(f"{target}: nothing was compared, because the model has no output, gradients or buffers")
    print(report)
    if report.differs:
        return FAILED
    return DONE if report.compared and not report.not_judged else MISUSED
