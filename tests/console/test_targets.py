"""`package.module:name` on a command line: whatever the caller's code does is one line."""

import sys
from pathlib import Path

import pytest

from unisono.console.targets import TargetError, find

EXPECTED = "package.module:name"


@pytest.mark.parametrize(
    ("code", "target", "error"),
    [
        (
            "",
            "targeted.py:Tracker",
            "targeted.py:Tracker: expected package.module:name; for targeted.py write targeted:Tracker",
        ),
        (
            "",
            "./inside/targeted.py",
            "./inside/targeted.py: expected package.module:name; for ./inside/targeted.py write inside.targeted:build",
        ),
        ("", "targeted:Tracker", "targeted:Tracker: there is no Tracker in targeted ({folder}/targeted.py)"),
        ("class A: pass", "targeted:A.B", "targeted:A.B: there is no B in A"),
        (
            "",
            "targeted.inside:a",
            "targeted.inside:a: cannot find module targeted.inside, neither in {folder} nor installed",
        ),
        (
            "1 / 0",
            "targeted:a",
            "targeted:a: importing targeted raised ZeroDivisionError: division by zero ({folder}/targeted.py, line 1)",
        ),
        (
            "import a_library_that_is_missing",
            "targeted:a",
            "targeted:a: importing targeted raised ModuleNotFoundError: No module named 'a_library_that_is_missing' "
            "({folder}/targeted.py, line 1)",
        ),
        (
            "import asyncio\nraise asyncio.CancelledError('gone')",
            "targeted:Tracker",
            "targeted:Tracker: importing targeted raised CancelledError: gone ({folder}/targeted.py, line 2)",
        ),
        (
            "def __getattr__(name):\n    raise ImportError('install the extra')",
            "targeted:Tracker",
            "targeted:Tracker: looking up Tracker raised ImportError: install the extra ({folder}/targeted.py, line 2)",
        ),
    ],
    ids=["a file", "path", "a name", "an attribute", "a module inside", "an error", "an import", "cancelled", "extra"],
)
def test_a_target_that_cannot_be_had_is_one_line(
    code: str, target: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "targeted", raising=False)
    (tmp_path / "targeted.py").write_text(code)
    with pytest.raises(TargetError) as raised:
        find(target, EXPECTED)
    assert str(raised.value) == error.format(folder=tmp_path)
    sys.modules.pop("targeted", None)
