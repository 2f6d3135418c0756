"""`keep_freed_memory`: it takes effect when it is asked for, and not before."""

import json

import pytest

import unisono
from helpers.programs import run_script
from unisono.runtime import malloc

# Prints the MiB that are resident after many large blocks have been freed, less those before they were made: before the
# call, and after it; and what the call returned.
MEASURE = """
import json, os
import torch, unisono

def kept():
    before = resident()
    blocks = [torch.ones(2**20) for _ in range(64)]  # 4 MiB each
    del blocks
    return resident() - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

print(json.dumps([kept(), unisono.keep_freed_memory(), kept()]))
"""

glibc = pytest.mark.skipif(malloc._mallopt() is None, reason="needs glibc")


@glibc
def test_freed_blocks_are_kept_when_asked_for_and_not_before():
    run = run_script(MEASURE)
    assert run.returncode == 0, run.stderr
    before, done, after = json.loads(run.stdout)
    assert done is True
    assert before < 128 < after


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(malloc.sys, "platform", "darwin")
    malloc._mallopt.cache_clear()
    try:
        assert unisono.keep_freed_memory() is False
    finally:
        malloc._mallopt.cache_clear()


@glibc
@pytest.mark.parametrize("refused", [{(-3, 2**30)}, {(-3, 2**30), (-3, 2**25)}])
def test_what_an_older_glibc_refuses(refused, monkeypatch: pytest.MonkeyPatch):
    """A large threshold: then a smaller one; if all is refused, it says so."""
    given = []

    def mallopt(parameter: int, value: int) -> int:
        given.append((parameter, value))
        return int((parameter, value) not in refused)

    monkeypatch.setattr(malloc, "_mallopt", lambda: mallopt)
    assert unisono.keep_freed_memory() is (len(refused) == 1)
    assert given[:2] == [(-3, 2**30), (-3, 2**25)]
