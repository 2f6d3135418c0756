"""The notes of an error are seen in an IPython that does not show them."""

import sys
import traceback
from types import SimpleNamespace

import pytest

from unisono.runtime import tracebacks


def failing(number: int) -> float:
    return (
        1
        / number
    )  # fmt: skip


def raised() -> ZeroDivisionError:
    try:
        failing(0)
    except ZeroDivisionError as error:
        error.add_note("raised in replica 1")
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("version", "shell", "printed"),
    [
        ((8, 12, 3, ""), object(), "raised in replica 1\n"),
        ((7, 34, 0, ""), object(), "raised in replica 1\n"),
        ((8, 14, 0, ""), object(), ""),
        ((8, 12, 3, ""), None, ""),  # imported by a program that does not run in it
    ],
)
def test_notes_are_printed_in_an_ipython_that_does_not_show_them(
    version: tuple[object, ...],
    shell: object,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """F13"""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(version_info=version, get_ipython=lambda: shell))
    tracebacks.leave_out_own_frames(raised())
    assert capsys.readouterr() == ("", printed)


def test_an_error_may_be_of_any_class() -> None:
    """F13: one that is false, and one whose attributes cannot be set."""

    class EmptyError(Exception):
        def __len__(self) -> int:
            return 0

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    def fail() -> None:
        try:
            raise EmptyError
        except EmptyError as cause:
            raise EmptyError from cause

    with pytest.raises(EmptyError) as caught:
        fail()
    tracebacks.leave_out_own_frames(caught.value)
    assert caught.value.__cause__ is not None
    assert len(traceback.extract_tb(caught.value.__cause__.__traceback__)) == 1
