"""Random programs: everything about one follows from its seed and its place."""

import random
from collections.abc import Mapping
from typing import Any

from fuzz.actions import ACTIONS
from fuzz.blocks import FAMILIES
from fuzz.model import INPUTS, OUTPUTS, InputForm, OutputForm
from fuzz.program import ASYNCHRONOUS, ASYNCHRONOUS_RANKS, Program, Step

# It runs batch norms one replica after the other, leaves losses of hooks to the caller, and frees no cycles.
_NOT_COMPOSED = ("batch norm", "written in backward", "losses", "containers", "compiled", "ranks")
_ERRORS_IN_PARTS = ("batch norm", "buffers", "writes_input", "torch.func", "outputs: folded")
_ROWS = (0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 11, 17)
_WRAPS = {  # over ranks, layers around a "part" are not synchronised; a wrapper in a replica needs its device
    "ranks": ("model", "model", "two", "twice", "both"),
    ASYNCHRONOUS: ("model", "model", "part", "two"),
    ASYNCHRONOUS_RANKS: ("model", "model", "two"),
}
_ALL_WRAPS = ("model", "model", "part", "two", "twice", "both")
_NUM_REPLICAS = {"ranks": (1, 2), ASYNCHRONOUS: (2, 2, 2, 1), ASYNCHRONOUS_RANKS: (1, 2)}
_STRICT = ("ranks", ASYNCHRONOUS, ASYNCHRONOUS_RANKS)  # without what a message names
# Each rank has a list of its own; some kernels and tensors are for CPUs only.
_OF_ONE_PROCESS, _OF_CPUS = ("lists", "outside"), ("complex", "containers")
LEFT_OUT = {"ranks": _OF_ONE_PROCESS, ASYNCHRONOUS: _OF_CPUS, ASYNCHRONOUS_RANKS: _OF_ONE_PROCESS + _OF_CPUS}
_WEIGHTS = (0, 1, 2, 3, 1.5)


# Under a launcher each process has its own of these.
NOT_OF_RANKS = ("0-dim", "number", "a parameter", "folded", "sample list")


def _drawn_form(draw: random.Random, forms: Mapping[str, InputForm | OutputForm], place: str) -> str:
    """Return the name of a form, seldom of one with which a message may end the program."""
    left_out = NOT_OF_RANKS if "ranks" in place else ()
    strict = [name for name, form in forms.items() if not form.said and name not in left_out]
    said = [name for name, form in forms.items() if form.said]
    return draw.choice(said) if place not in _STRICT and draw.random() < 0.08 else draw.choice(("tensor", *strict))


def random_program(seed: int, place: str) -> Program:
    """Return the program that a seed stands for."""
    draw = random.Random(seed)
    families = list(FAMILIES)
    rare = [name for name in families if "compiled" in FAMILIES[name].traits]
    blocks = []
    for _ in range(draw.choice((0, 1, 1, 2, 3, 4))):
        family = draw.choice(families)
        if family in rare and draw.random() < 0.9:  # takes a hundred times as long
            family = "linear"
        can_be_said = bool(FAMILIES[family].said)  # a message may end the program
        is_left_out = family in LEFT_OUT.get(place, ()) or (can_be_said and place in _STRICT)
        if is_left_out or (can_be_said and draw.random() < 0.4):
            family = "linear"
        blocks.append(f"{family}/{draw.choice(list(FAMILIES[family].variants))}")
    num_replicas = draw.choice(_NUM_REPLICAS.get(place, (2, 2, 2, 2, 3, 3, 5, 1)))
    shares: Any = draw.choice(("chunk", "even", "weights", "measured"))
    if shares == "weights":
        shares = tuple(draw.choice(_WEIGHTS) for _ in range(num_replicas))
        shares = shares if any(shares) else (1,) * num_replicas
    options: dict[str, Any] = {
        "blocks": tuple(blocks),
        "place": place,
        "num_replicas": num_replicas,
        "shares": shares,
        "wraps": draw.choice(_WRAPS.get(place, _ALL_WRAPS)),
        "inputs": _drawn_form(draw, INPUTS, place),
        "outputs": _drawn_form(draw, OUTPUTS, place),
        "optimizer": draw.choice(("SGD", "momentum", "groups", "Adam")),
        "loss": draw.choice(("sum", "mean")),
        "input_gradients": draw.random() < 0.4,
        "residual": draw.random() < 0.5,
        "writes_input": draw.random() < 0.1,
        "profile": draw.random() < 0.15,
        "rescue": draw.random() < 0.1,
        "own_gather": draw.random() < 0.08,
        "seed": draw.randrange(1000),
    }
    if options["outputs"] == "numbers" and options["wraps"] in ("twice", "both"):
        options["outputs"] = (
            "sample list"  # a replica of one row returns one number, which is no sign of a list of rows
        )
    if options["own_gather"] and not Program(**options).traits.isdisjoint(_NOT_COMPOSED):
        options["own_gather"] = False
    traits = Program(**options).traits
    if "weights" in traits and options["wraps"] in ("twice", "both"):
        options["wraps"] = "model"  # in there, graphs do not see what a later forward writes through `.data`
    allowed = [name for name, action in ACTIONS.items() if action.suits(traits)]
    weights = [ACTIONS[name].weight for name in allowed]
    fewest = 8 if options["outputs"] == "numbers" else 2 if "ranks" in place else 0
    rows = [n for n in _ROWS if n >= fewest]
    steps = [
        Step(draw.choices(allowed, weights)[0], draw.choice(rows), draw.randrange(1000))
        for _ in range(draw.choice((1, 2, 3, 5)))
    ]
    # A replica after the other in one part: what the later one differentiates runs the part, and its hooks, once more.
    # They are the plain composition there, whose outputs have no gradients by each other.
    # Its replicas have the reference cycles that a module has by functions of its own, until the collector runs.
    needs_whole = not traits.isdisjoint(("inner gradient", "containers", "compiled"))
    needs_whole |= any(step.action == "gradients_between_outputs" for step in steps)
    runs_twice = needs_whole and options["wraps"] in ("twice", "both")
    can_have_parts = traits.isdisjoint((*_ERRORS_IN_PARTS, "own_gather")) and not runs_twice
    parts = draw.choice((1, 1, 1, 2, 3)) if can_have_parts else 1
    can_be_rescued = all(ACTIONS[step.action].suits(traits | {"out_of_memory"}) for step in steps)
    if options["rescue"] and num_replicas > 1 and can_have_parts and can_be_rescued:  # with one device it does nothing
        options["out_of_memory"] = draw.choice(("", "forward", "backward"))
    has_devices = place in (ASYNCHRONOUS, ASYNCHRONOUS_RANKS)
    graphs = has_devices and draw.random() < 0.3 and not options["own_gather"]
    if has_devices and options["wraps"] == "model":
        options["from_host"] = draw.random() < 0.3
        # A parameter's copy needs no gradient where gradients are off. On one device outputs are copies, none of which
        # lies on the way to another.
        may_move = options["outputs"] != "a parameter" and (num_replicas > 1 or not needs_whole)
        options["output_device"] = draw.choice(("", "", "cpu", "last")) if may_move else ""
    return Program(steps=tuple(steps) * (3 if graphs else 1), parts=parts, graphs=graphs, **options)
