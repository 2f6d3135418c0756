"""The programs of the contract (tests/fuzz/contract.py) in every place.

The processes in which they run serve all programs of a place, one after the other. `make test-device` runs this file on
two asynchronous devices, and on six for what two are too few for: ranks of two replicas, which every other program has.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from fuzz import compare
from fuzz.contract import NUMS_OF_REPLICAS, PROGRAMS, num_replicas, programs
from fuzz.program import ASYNCHRONOUS, ASYNCHRONOUS_RANKS, PLACES
from fuzz.servers import ProgramServer
from helpers.contract import KIND, ON_CPU

LIMIT_S = 120.0


def exactly() -> None:
    """Allow for the rounding of a few layers."""
    compare.TOLERANCE = 1e-12


NUM_DEVICES = torch.accelerator.device_count()


def nums_of_replicas(place: str) -> Sequence[int]:
    if place in NUMS_OF_REPLICAS:
        return NUMS_OF_REPLICAS[place]
    return (2,) if place == ASYNCHRONOUS else (1, 2) if KIND == "queued" else (1, 2)[: NUM_DEVICES // 2]


def in_places() -> Iterator[tuple[str, str]]:
    """Yield the programs and their places."""
    for place in PLACES if ON_CPU else (ASYNCHRONOUS, ASYNCHRONOUS_RANKS):
        for name in PROGRAMS:
            needs_more_than_two = place == ASYNCHRONOUS_RANKS and num_replicas(name, nums_of_replicas(place)) > 1
            if KIND != "queued" or needs_more_than_two == (NUM_DEVICES > 2):
                yield name, place


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[str], ProgramServer]]:
    servers: dict[str, ProgramServer] = {}
    yield lambda place: servers.setdefault(place, ProgramServer(place, LIMIT_S, exactly))
    for each in servers.values():
        each.end()


@pytest.mark.parametrize(("name", "place"), [*in_places()])
def test_a_program_is_the_plain_modules(server: Callable[[str], ProgramServer], name: str, place: str) -> None:
    """N1, N3, N5, N7, N8, N9, N10, N13, R4, R5, R8, R9, R10, R13, R14, A10, A14, C1, C2, C4, C6, C15, G1, G3, I4, S2"""
    for program in programs(name, place, nums_of_replicas(place)):
        outcome = server(place).run(program)
        assert outcome.difference is None, f"{program!r}: {outcome.difference.text}"
        assert not outcome.said
        assert outcome.raised or outcome.num_steps == len(program.steps)
