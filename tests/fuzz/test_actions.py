"""Each action of the random programs alone, five times, on batches of different sizes.

A random program does a few things one after the other with a deep model, and allows for its rounding. Here each is
done, and numbers agree within 1e-12 (row N9 of docs/behaviour.md).
"""

import pytest

from fuzz import compare
from fuzz.actions import ACTIONS
from fuzz.compare import Outcome
from fuzz.program import Program, Step

LIMIT_S = 60.0
SIZES = (7, 8, 9, 5, 1)  # shares are uneven, and the last batch leaves replicas idle
HOOKED: tuple[str, ...] = ("linear/plain", "hooked/forward", "hooked/backward")
TRAITS = Program(HOOKED, input_gradients=True).traits
CASES = [
    (name, HOOKED)
    for name, action in ACTIONS.items()
    if action.weight >= 0.3 and action.suits(TRAITS) and not action.said
]
CASES += [("train", ("complex/product",))]


@pytest.mark.parametrize("place", ["one memory", pytest.param("separate memory", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("action", "blocks"), CASES, ids=lambda value: value if isinstance(value, str) else value[0])
def test_an_action_alone(monkeypatch: pytest.MonkeyPatch, action: str, blocks: tuple[str, ...], place: str) -> None:
    """N1, N3, N7, N8, N9, R4, R8, R9, R13, R14, A14: and afterwards the training goes on."""
    monkeypatch.setattr(compare, "TOLERANCE", 1e-12)
    steps = (*(Step(action, rows, seed) for seed, rows in enumerate(SIZES)), Step("train", rows=6))
    program = Program(blocks, steps, place, num_replicas=3, optimizer="Adam", input_gradients=True)
    outcome = compare.run(program, LIMIT_S)
    assert outcome == Outcome(None, len(steps)), outcome.difference
