"""A few random programs on these devices, on streams drawn at random: `make fuzz` runs many."""

from fuzz.program import ASYNCHRONOUS
from fuzz.random_programs import random_program
from fuzz.servers import ProgramServer

LIMIT_S = 120.0


def test_random_programs_have_the_plain_module_s_numbers() -> None:
    """N1, N7, N9, I1: what one stream makes and another reads is waited for."""
    server = ProgramServer(ASYNCHRONOUS, LIMIT_S)
    try:
        for seed in range(30):
            program = random_program(seed, ASYNCHRONOUS)
            found = server.run(program).difference
            assert found is None, f"seed {seed}: {program!r}: {found.text}"
    finally:
        server.end()
