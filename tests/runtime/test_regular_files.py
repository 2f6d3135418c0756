import os
from pathlib import Path

import pytest

from unisono.runtime.regular_files import NotRegularFileError, make_anew, open_regular

PIPE = pytest.param("pipe", marks=pytest.mark.only_on("linux", "macos", because="no such pipes"))


def test_an_ordinary_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_anew(path)
    assert not path.stat().st_mode & 0o111, "no program"
    path.write_bytes(b"before")
    file = open_regular(path, os.O_RDONLY)
    try:
        assert os.read(file, 10) == b"before"
    finally:
        os.close(file)
    make_anew(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize("laid", ["link", "dangling link", PIPE, "folder"])
def test_what_is_none_is_refused_and_stays(tmp_path: Path, laid: str, flags: int) -> None:
    """T10: nothing is followed, and nothing waits for the other end of a pipe."""
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    if laid == "link":
        elsewhere.write_bytes(b"precious")
    if "link" in laid:
        path.symlink_to(elsewhere)
    elif laid == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    for attempt in (lambda: open_regular(path, flags), lambda: make_anew(path)):
        with pytest.raises(NotRegularFileError, match="expected an ordinary file"):
            attempt()
    assert path.is_symlink() == ("link" in laid)
    assert elsewhere.exists() == (laid == "link")


@pytest.mark.only_on("linux", "macos", because="elsewhere a link is refused by the check only")
@pytest.mark.parametrize("laid", ["link", "pipe"])
def test_what_comes_after_the_check_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, laid: str) -> None:
    """T10"""
    path = tmp_path / "file"
    monkeypatch.setattr("unisono.runtime.regular_files.expect_regular", lambda path: None)
    path.symlink_to(tmp_path / "elsewhere") if laid == "link" else os.mkfifo(path)
    with pytest.raises(OSError):
        open_regular(path, os.O_RDWR | os.O_CREAT)
    assert not (tmp_path / "elsewhere").exists()
