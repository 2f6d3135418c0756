"""The contract: what a program does on one device it does in every place, with any number of replicas.

A program of the contract is stated once, here: by layers of `blocks`, forms of `model` and actions of `actions`, from
which the random programs are drawn too. tests/contract/test_programs.py runs each in every place: outputs, gradients,
buffers, parameters after the step, errors, and what forward leaves have to be the plain module's, within 1e-12, and no
tensor may be left in a reference cycle. So a behaviour that every place has is stated here; a test of its own is for
what one place alone has, for messages, and for what is no number.

    a layer                  a class and an entry of FAMILIES: it runs with every form of a step
    a way to train           an action: it runs with layers that have hooks
    what both have together  an entry of PROGRAMS
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fuzz.actions import ACTIONS
from fuzz.blocks import FAMILIES
from fuzz.model import INPUTS, OUTPUTS
from fuzz.program import Program, Step
from fuzz.random_programs import LEFT_OUT, NOT_OF_RANKS

FORMS = ("train", "accumulate", "forwards_one_backward", "no_grad_between")  # of a step
_ASKED = ("backward_twice", "forwards_backwards", "backward_of_each_output", "backward_of_a_part", "gradients_of_some")
_TWICE = ("gradient_penalty", "hessian_product")
_HOOKED = ("linear/plain", "hooked/forward", "hooked/backward")
# How many replicas, of each rank if there are several, programs have in turn.
NUMS_OF_REPLICAS = {"one memory": (3, 2), "separate memory": (2, 3), "ranks": (2, 1)}


def _steps(*actions: str, rows: tuple[int, ...] = (7, 8)) -> tuple[Step, ...]:
    return tuple(Step(action, n, seed) for seed, (action, n) in enumerate(itertools.product(actions, rows)))


def _stated() -> Iterator[tuple[str, Program]]:
    every_form = _steps(*FORMS)
    for name, family in FAMILIES.items():
        for variant in family.variants if not family.said or "alike" in name else ():
            steps = every_form if "compiled" not in family.traits else _steps("train")  # which takes long
            yield f"{name}/{variant}", Program((f"{name}/{variant}",), steps)
    for name, action in ACTIONS.items():
        if action.weight >= 0.3 and not action.said and not action.only:
            steps = (*_steps(name, rows=(7, 8, 9, 5, 1)), Step("train", 6))  # the fifth batch leaves replicas idle
            yield name, Program(_HOOKED, steps, optimizer="Adam")
    for name in (name for name, form in INPUTS.items() if not form.said):
        yield f"inputs: {name}", Program(("linear/relu",), every_form, inputs=name)
    for name in (name for name, form in OUTPUTS.items() if not form.said):
        yield f"outputs: {name}", Program(("linear/relu",), every_form, outputs=name)
    yield "losses that leave forward", Program(("losses/plain", "losses/checkpoint"), _LEAVE)
    yield "losses that leave a checkpoint", Program(("reentrant losses/reentrant",), _LEAVE)


_LEAVE = _steps("losses_that_leave", rows=(7,) * 7)

PROGRAMS = {
    **dict(_stated()),
    "a shared layer in a mode": Program(("tied/weight, layer",), _steps("backward_in_a_mode")),
    "a wrapper in a wrapper's parts": Program(
        ("linear/no bias",), _steps("train", "backward_in_a_mode"), wraps="twice", parts=2
    ),
    "an attribute of a weight in a mode": Program(("read attributes/of a weight",), _steps("backward_in_a_mode")),
    "losses that leave two forwards with buffers": Program(  # the second of two ranks has no rows
        ("buffers/in place", "losses/plain"), (Step("losses_that_leave", 7, 81),)
    ),
    "losses that leave a wrapper in a wrapper": Program(("losses/plain",), _LEAVE, wraps="twice"),
    "batch norm, and how backward is asked for": Program(
        ("batch norm/1d", "linear/relu", "batch norm/2d, channels last"), _steps(*_ASKED), outputs="tuple"
    ),
    "batch norm without gradients": Program(
        ("batch norm/twice", "batch norm/not tracked"), _steps("no_grad", "inference_mode", "eval_between", "train")
    ),
    "second derivatives of batch norm": Program(
        ("batch norm/1d", "inner gradient/kept"), _steps(*_TWICE), optimizer="momentum", residual=True
    ),
    "second derivatives of batch norms, also in eval mode": Program(
        ("batch norm/2d, channels last", "linear/plain", "batch norm/twice"), _steps(*_TWICE, "eval_mode", *_TWICE)
    ),
    "second derivatives of weights that are computed or shared": Program(
        ("normed weight/parametrized spectral_norm", "inner gradient/kept", "tied/weight, layer"), _steps(*_TWICE)
    ),
    "maps between changes": Program(
        ("batch norm/1d", "linear/plain"),
        _steps("map_batches", "change_values", "map_batches", "replace_parameter", "evaluate", "change_buffers"),
    ),
}


def num_replicas(name: str, nums_of_replicas: Sequence[int]) -> int:
    """Return how many replicas the programs have that a name of PROGRAMS stands for."""
    return nums_of_replicas[[*PROGRAMS].index(name) % len(nums_of_replicas)]


def programs(name: str, place: str, nums_of_replicas: Sequence[int]) -> Iterator[Program]:
    """Yield the programs that a name of PROGRAMS stands for in a place."""
    number = num_replicas(name, nums_of_replicas)
    program = replace(PROGRAMS[name], place=place, num_replicas=number, input_gradients="ranks" not in place)
    families = {block.partition("/")[0] for block in program.blocks}
    is_left_out = not families.isdisjoint(LEFT_OUT.get(place, ()))
    if is_left_out or ("ranks" in program.traits and program.outputs in NOT_OF_RANKS):
        return
    steps = tuple(step for step in program.steps if ACTIONS[step.action].suits(program.traits))
    if "asynchronous" in program.traits:  # where waits matter, and not how many rows there are
        steps = steps[::2]
    if steps:
        yield replace(program, steps=steps)
    if steps and "asynchronous" in program.traits:  # what is compared is waited for
        yield replace(program, steps=steps * 2, first_compared=len(steps))
