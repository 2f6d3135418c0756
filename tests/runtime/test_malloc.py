"""`keep_freed_memory`: it takes effect when it is asked for, and not before."""

import json

import pytest

import unisono
from helpers.programs import run_script
from unisono.runtime import malloc

# Prints the MiB that are resident after many large blocks have been freed, less those before they were made: before the
# call, and after it, in another thread, too; and what the call returned.
MEASURE = """
import json, os
from concurrent.futures import ThreadPoolExecutor
import torch, unisono

def kept(mib=4):
    before = resident()
    blocks = [torch.ones(mib * 2**18) for _ in range(256 // mib)]
    del blocks
    return resident() - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

with ThreadPoolExecutor(1) as pool:
    in_thread = lambda: pool.submit(kept, 40).result()
    print(json.dumps([kept(), in_thread(), unisono.keep_freed_memory(), kept(), in_thread()]))
"""

glibc = pytest.mark.skipif(malloc._mallopt() is None, reason="needs glibc")


@glibc
def test_freed_blocks_are_kept_when_asked_for_and_not_before():
    run = run_script(MEASURE)
    assert run.returncode == 0, run.stderr
    before, before_in_thread, done, after, after_in_thread = json.loads(run.stdout)
    assert done is True
    assert before < 128 < after
    assert before_in_thread < 128 < after_in_thread


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
