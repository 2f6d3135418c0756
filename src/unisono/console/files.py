"""Output folders and the files in them: checked before anything is written, replaced whole, and read with care."""

import contextlib
import errno
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from unisono.console.errors import FolderError
from unisono.runtime.regular_files import make_anew


def expect_writable(folder: Path) -> None:
    """Raise a FolderError if a folder cannot be made and written into; nothing of it is left."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise FolderError(f"--output {folder}: {existing} is not a folder; name another one (--output DIR)")
    try:  # permissions do not tell: /proc seems to be writable
        os.rmdir(tempfile.mkdtemp(prefix=".unisono-", dir=existing))
    except OSError as error:
        raise FolderError(
            f"--output {folder}: {existing} cannot be written to ({error.strerror}); name another folder (--output DIR)"
        ) from error


@contextlib.contextmanager
def replaced(path: Path, *, keep_as: Path | None = None) -> Iterator[Path]:
    """Give a temporary path to write to; when the block ends well, move the file to `path`.

    The bytes are on the disk before the file is renamed; so after a power cut there is the old file or the new one.
    With `keep_as` the old file is kept under that name. Between the two renamings there is no `path`: a reader must
    then use `keep_as`.
    A link or a pipe that someone has laid under the temporary name is an OSError.
    """
    unfinished = unfinished_name(path)
    make_anew(unfinished)
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        if keep_as is not None and path.exists():
            path.replace(keep_as)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    if sys.platform != "win32":  # the directory entries themselves; Windows has no way to ask for it
        entries = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(entries)
        finally:
            os.close(entries)


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, which is made where there is none; each is replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with replaced(folder / name) as unfinished:
            unfinished.write_bytes(content)


def unfinished_name(path: Path) -> Path:
    """Return the temporary path to which `replaced` has a file written."""
    return path.with_name(f".{path.name}.unfinished")


def as_typed(path: Path) -> str:
    """Return a path as it is typed on a command line: in quotes, where a shell needs them."""
    return subprocess.list2cmdline([path]) if sys.platform == "win32" else shlex.quote(str(path))


def contents(path: Path) -> bytes:
    """Return the bytes of a file. Pipes and devices, whose bytes may never come or never end, are an OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return path.read_bytes()
