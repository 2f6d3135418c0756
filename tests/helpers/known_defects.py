"""Defects on several accelerators that are known and not mended yet: cases of the contract that fail there."""

import pytest

from helpers.contract import DEVICES

KNOWN = {
    "7": "a reentrant checkpoint around the wrapper: torch restores the random state of the inputs' device only",
    "E": "a checkpoint around the wrapper: the threads of two devices recompute it at once, a fault of torch's",
}


# Shows where the threads of two devices meet, so not in each run of a short test. Its strict test, which tries many
# times, is in tests/async_device/test_known_defects.py.
RACES = ("E",)


def known_defect(name: str) -> pytest.MarkDecorator:
    """Expect a case to fail on several accelerators. If it passes, it fails: the defect is mended, and this can go."""
    reason = f"known defect {name}: {KNOWN[name]}"
    return pytest.mark.xfail(len(set(DEVICES)) > 1, reason=reason, strict=name not in RACES)
