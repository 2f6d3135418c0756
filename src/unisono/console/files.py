"""Output folders and the files in them: checked before anything is written, and replaced whole."""

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from unisono.console.errors import FolderError
from unisono.runtime.contexts import contextmanager


def expect_writable(folder: Path) -> None:
    """Check that a folder can be made and written into; nothing of it is left.

    Raises:
        FolderError: it cannot.
    """
    # Where a link leads nowhere, no folder can be made.
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise FolderError(f"--output {folder}: {existing} is not a folder; give another one (--output DIR)")
    new = [path for path in (folder.absolute(), *folder.absolute().parents) if not os.path.lexists(path)]
    made: list[str] = []
    try:  # what is made tells: /proc seems to be writable, and a name may be too long for one of the folders
        for path in reversed(new):
            path.mkdir()
            made.append(str(path))
        made.append(tempfile.mkdtemp(prefix=".unisono-", dir=folder.absolute()))
    except OSError as error:
        raise FolderError(
            f"--output {folder}: cannot write to {existing} ({error.strerror}); give another folder (--output DIR)"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # another program has put something there meanwhile
            while made:
                os.rmdir(made.pop())


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; when the block ends well, move the file to `path`.

    The bytes are on the disk before the file is renamed; so after a power cut there is the old file or the new one.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)  # what is left of a killed run, or a link that someone has laid
        try:
            yield unfinished
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a full disk names none
        raise
    if sys.platform != "win32":  # the directory entries themselves; Windows has no way to ask for it
        entries = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(entries)
        finally:
            os.close(entries)


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, which is made where there is none; each is replaced whole.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with replaced(folder / name) as unfinished:
            unfinished.write_bytes(content)


def as_typed(path: Path | str) -> str:
    """Return a path or a word as it is typed on a command line: in quotes, where a shell needs them."""
    word = str(path)
    if sys.platform == "win32":
        return subprocess.list2cmdline([word])
    in_double_quotes = "'" in word and not {*'"$`\\!'} & {*word}  # shlex.quote writes each single one as '"'"'
    return f'"{word}"' if in_double_quotes else shlex.quote(word)
