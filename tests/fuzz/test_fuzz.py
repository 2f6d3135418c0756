"""The fuzzer itself, and a few of its programs in each place; `make fuzz` runs many."""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import unisono
from fuzz.__main__ import main
from fuzz.actions import ACTIONS, Action
from fuzz.blocks import FAMILIES, WIDTH, make_block
from fuzz.compare import Difference, Outcome
from fuzz.model import INPUTS, OUTPUTS, tensors_in
from fuzz.program import PLACES, Program, Step
from fuzz.random_programs import random_program
from fuzz.servers import ProgramServer, repeat
from fuzz.shrink import shrink
from fuzz.side import Side
from unisono.runtime import model_warnings

LIMIT_S = 120.0
SEEDS = {"one memory": range(40), "separate memory": range(20), "ranks": range(20)}
NAMES = [f"{name}/{how}" for name, family in FAMILIES.items() for how in family.variants]


@contextlib.contextmanager
def server(place: str, limit_s: float = LIMIT_S, prepare: Callable[[], None] | None = None) -> Iterator[ProgramServer]:
    programs = ProgramServer(place, limit_s, prepare)
    try:
        yield programs
    finally:
        programs.end()


def found_in(programs: ProgramServer, program: Program) -> Difference:
    found = programs.run(program).difference
    assert found is not None
    return found


@pytest.mark.parametrize("place", PLACES)
def test_random_programs_have_the_plain_module_s_numbers(place):
    """N1, N2, N3, N7, N8, R4, R8, R9, R13, G1, G3, S2, C1: the form of `make fuzz` that every test run has."""
    with server(place) as programs:
        for seed in SEEDS[place]:
            program = random_program(seed, place)
            found = programs.run(program).difference
            assert found is None, f"seed {seed}: {program!r}: {found.text}"


def test_a_seed_is_a_program():
    for place in PLACES:
        assert random_program(17, place) == random_program(17, place)
        assert random_program(17, place) != random_program(18, place)


def test_a_program_is_printed_as_python():
    for seed in range(20):
        program = random_program(seed, "one memory")
        assert eval(repr(program)) == program
    assert repr(Program()) == "Program()"


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", NAMES)
def test_blocks_keep_the_width(name):
    x = torch.randn(3, WIDTH).requires_grad_("reentrant" in name)  # torch warns where nothing needs a gradient
    assert make_block(name)(x * 1).shape == (3, WIDTH)


# ---- planted defects -----------------------------------------------------------------------------

_forward, _backward = unisono.DataParallel.forward, Side.backward


def plant(forward: Callable[..., Any]) -> None:
    """Put a function in the place of the wrapper's forward."""
    unisono.DataParallel.forward = forward  # type: ignore[method-assign]


def one_millionth_off() -> None:
    """Gradients of batches of odd length, where there is a layer norm."""

    def forward(self: unisono.DataParallel, x: Tensor) -> Tensor:
        output = _forward(self, x)
        if len(x) % 2 and any(isinstance(module, torch.nn.LayerNorm) for module in self.modules()):
            for tensor in tensors_in(output):
                tensor.register_hook(lambda grad: grad * (1 + 1e-6))
        return output

    plant(forward)


def zeros_for_none() -> None:
    """Let parameters that were not used have zeros for gradients."""

    def backward(self: Side, *args: Any, **options: Any) -> None:
        _backward(self, *args, **options)
        for parameter in self.trained():
            if parameter.grad is None and not self.is_plain:
                parameter.grad = torch.zeros_like(parameter)

    Side.backward = backward  # type: ignore[method-assign]


def raises() -> None:
    def forward(self: unisono.DataParallel, *args: object, **kwargs: object) -> object:
        if self.shares == "even":
            raise KeyError("planted")
        return _forward(self, *args, **kwargs)

    plant(forward)


def hangs() -> None:
    plant(lambda *_: time.sleep(1000))


def crashes() -> None:
    def forward(self: unisono.DataParallel, x: Tensor) -> Tensor:
        if len(x) == 6:
            ctypes.string_at(0)
        return _forward(self, x)

    plant(forward)


def second_rank_off() -> None:
    def forward(self: unisono.DataParallel, x: Tensor) -> Tensor:
        output = _forward(self, x)
        return output * 2 if torch.distributed.get_rank() == 1 else output

    plant(forward)


def leaves_cycles() -> None:
    """Each forward leaves its batch in a reference cycle."""

    def forward(self: unisono.DataParallel, *args: object, **kwargs: object) -> object:
        held: list[object] = [args, kwargs]
        held.append(held)
        return _forward(self, *args, **kwargs)

    plant(forward)


def says_nothing() -> None:
    vars(model_warnings)["warn"] = lambda message: None


BLOCKS = ("linear/relu", "norm/layer", "unused/parameters", "views/strided")
STEPS = (Step(rows=6, seed=1), Step("accumulate", 7, 2), Step("freeze", 3, 3), Step("deepcopy", 8, 4))
PROGRAM = Program(BLOCKS, STEPS, num_replicas=3, shares="even", optimizer="Adam", residual=True, seed=5)


@pytest.mark.parametrize(
    ("prepare", "kind", "smallest"),
    [
        (one_millionth_off, "gradient of", Program(("norm/layer",), (Step(rows=3),))),
        (zeros_for_none, "form of the gradient of", Program(("unused/parameters",))),
        (leaves_cycles, "garbage", Program()),
        (raises, "wrapped raises KeyError: 'planted'", Program(shares="even")),
    ],
)
def test_a_defect_is_found_and_made_small(prepare, kind, smallest):
    with server("one memory", prepare=prepare) as programs:
        found = found_in(programs, PROGRAM)
        assert found.kind == kind
        small, found = shrink(PROGRAM, found, lambda program: programs.run(program).difference, LIMIT_S)
        assert small == smallest
        assert found.kind == kind


def test_other_numbers_are_a_difference_where_no_message_names_the_cause():
    program = Program(("left attributes/tensor",), (Step(), Step()))
    with server("one memory") as programs:
        assert programs.run(program) == Outcome(None, 0, said=True)
    with server("one memory", prepare=says_nothing) as programs:
        assert found_in(programs, program).kind == "what forward leaves in"


def test_a_message_about_something_else_names_no_cause():
    """The block's attributes are left behind, with a warning, and the gradients are wrong."""
    with server("one memory", prepare=one_millionth_off) as programs:
        found = found_in(programs, Program(("attributes/assigned", "norm/layer"), (Step(rows=3),)))
    assert found.kind == "gradient of"


def inputs_for(action: Action) -> str:
    """Return the name of a form of the inputs with which an action can be done."""
    return next((name for name in INPUTS if f"inputs: {name}" in action.only), "tensor")


KINDS = [
    *[Program((name,)) for name in NAMES if FAMILIES[name.partition("/")[0]].said and "alike" not in name],
    *[Program(inputs=name) for name, form in INPUTS.items() if form.said],
    *[Program(outputs=name) for name, form in OUTPUTS.items() if form.said],
    *[Program(steps=(Step(name),), inputs=inputs_for(action)) for name, action in ACTIONS.items() if action.said],
]


@pytest.mark.parametrize("place", ["one memory", "separate memory"])
def test_each_cause_of_other_numbers_is_named(place):
    """R6, R9, R22, N6, S17, S18, G12: in a program that does nothing else, by the first steps."""
    with server(place) as programs:
        for kind in KINDS:
            program = replace(kind, place=place, steps=kind.steps * 3, num_replicas=2)
            outcome = programs.run(program)
            assert outcome.said, f"{program!r}: {outcome}"


def test_a_program_that_hangs_is_ended_with_its_stacks():
    with server("one memory", 2.0, hangs) as programs:
        found = found_in(programs, PROGRAM)
    assert found.kind == "hangs"
    assert "in train" in found.text


def test_a_program_that_crashes_is_a_difference_and_the_next_one_runs():
    with server("one memory", prepare=crashes) as programs:
        found = found_in(programs, PROGRAM)
        assert found.kind == "crashes"
        assert "in forward" in found.text
        assert programs.run(Program()) == Outcome(None, 1)


def test_ranks_agree_on_a_difference():
    with server("ranks", prepare=second_rank_off) as programs:
        found = found_in(programs, Program(steps=(Step(rows=17),), place="ranks"))
    assert found.kind == "gradient of"  # of the first rank: the sum is wrong


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_counts_and_prints_what_it_finds(monkeypatch, capsys):
    monkeypatch.setattr("fuzz.__main__.described", lambda seed, program, found, limit_s: f"{seed}: {found.text}")
    monkeypatch.setattr(ProgramServer, "outcome", lambda self: Outcome(Difference("kind", "text"), 1))
    monkeypatch.setattr("fuzz.__main__.wait", lambda connections: connections)
    monkeypatch.setattr(ProgramServer, "begin", lambda self, program: None)
    monkeypatch.setattr(ProgramServer, "connection", None)
    assert main(["--place", "one memory", "--programs", "4", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "1: text" in out
    assert "2: text" not in out  # two of a kind are enough
    assert "4 programs in one memory" in out
    assert "4 x kind: seeds 0, 1, 2, 3" in out


def test_the_command_runs_one_seed(capsys):
    assert main(["--place", "one memory", "--seed", "1", "--jobs", "1"]) == 0
    assert "1 programs in one memory" in capsys.readouterr().out


def test_a_program_is_repeated_in_this_process(capsys):
    repeat(Program())
    assert capsys.readouterr().out == "no difference\n"


def test_every_action_and_every_block_is_drawn():
    programs = [random_program(seed, place) for place in PLACES for seed in range(900)]
    actions = {step.action for program in programs for step in program.steps}
    assert actions >= {name for name, action in ACTIONS.items() if action.weight >= 0.3}
    blocks = {block for program in programs for block in program.blocks}
    assert blocks >= {name for name in NAMES if not name.startswith("compiled")}
