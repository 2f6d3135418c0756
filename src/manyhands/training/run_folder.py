"""The output folder of a run: which files it has, who may write into it, and how a file is replaced.

    config.json              the options, and what they came to
    metrics.jsonl            a line for each step and for each epoch
    curves.png               loss and accuracy by epoch
    model.safetensors        the weights of the last checkpoint
    checkpoint.pt            what resuming needs
    checkpoint.previous.pt   the one before
    .lock                    the process that writes here, or was the last to

Everything but metrics.jsonl, which is appended to, is replaced whole: at every moment, and whatever stops the
program or the machine, a file under one of these names is a complete one. One process at a time writes into a folder;
of several that train together it is the first. It holds a lock of the system's on `.lock`, which goes with the process
however it ends. (Windows, and file systems that know no locks, do without.)
"""

import contextlib
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manyhands.console.errors import FolderError

if sys.platform != "win32":
    import fcntl


class RunFolder:
    """The folder of one run, and the paths in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.must_be_new = False
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.curves = path / "curves.png"
        self.model = path / "model.safetensors"
        self.checkpoint = path / "checkpoint.pt"
        self.previous_checkpoint = path / "checkpoint.previous.pt"
        self._lock = path / ".lock"
        self._claim: weakref.finalize[Any, Any] | None = None  # unlocks, at the latest when the folder is forgotten

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def for_new_run(cls, path: Path | None, *, overwrite: bool = False) -> "RunFolder":
        """Choose the folder for a new run, by default `runs/` and the time. Nothing is made or deleted yet.

        Raises:
            FolderError: the folder cannot be made, or holds a run and `overwrite` is false.
        """
        folder = cls(path or Path("runs") / time.strftime("%Y-%m-%d-%H-%M-%S"))
        folder.must_be_new = path is None  # two runs begun in one second must not share one
        if folder.holds_a_run() and not overwrite:
            if folder._lock.exists():  # nothing is left in a folder that is not ours
                folder.claim()  # raises where that run is going on; it could be neither gone on with nor replaced
                folder.release()
            raise FolderError(
                f"{folder} holds a run already: go on with it (--resume {folder}), replace it (--overwrite), or name "
                "another folder (--output DIR)"
            )
        there = next(parent for parent in (folder.path.absolute(), *folder.path.absolute().parents) if parent.exists())
        if not there.is_dir():
            raise FolderError(f"--output {folder}: {there} is not a folder; name another one (--output DIR)")
        if not os.access(there, os.W_OK):
            raise FolderError(f"--output {folder}: {there} cannot be written to; name another folder (--output DIR)")
        return folder

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Return the folder of a run that can be resumed.

        Raises:
            FolderError: there is no such folder, or no checkpoint in it.
        """
        folder = cls(path)
        if not path.is_dir():
            raise FolderError(f"--resume {folder}: there is no such folder; expected the --output of an earlier run")
        if not folder.can_be_resumed():
            raise FolderError(
                f"--resume {folder}: no checkpoint.pt in it; expected the --output of a run that has finished at least "
                f"one epoch or was stopped with Ctrl-C (start it again: --output {folder} --overwrite)"
            )
        return folder

    @classmethod
    def of_launch(cls, launch: str | None, path: Path | None) -> "RunFolder | None":
        """Return the folder of the run that this launch has begun, before it had to start its processes anew.

        Args:
            launch: its name; config.json has it. None: there is no launch.
            path: where the run is; None: anywhere in `runs/`.
        """
        if launch is None:
            return None
        for place in [path] if path is not None else sorted(Path("runs").glob("*")):
            with contextlib.suppress(FolderError):
                if cls(place).saved_config().get("launch") == launch:
                    return cls(place)
        return None

    def can_be_resumed(self) -> bool:
        """Return whether there is a checkpoint."""
        return self.checkpoint.exists() or self.previous_checkpoint.exists()

    def holds_a_run(self) -> bool:
        """Return whether there is anything to lose: weights, a checkpoint, or somebody else's files."""
        if any(path.exists() for path in (self.checkpoint, self.previous_checkpoint, self.model)):
            return True
        try:
            is_ours = "manyhands" in json.loads(self.config.read_text())
        except (OSError, ValueError, TypeError):
            is_ours = False
        return not is_ours and any(path.exists() for path in self._files())

    def claim(self) -> None:
        """Keep other runs out of the folder, until `release` is called or this process ends.

        Raises:
            FolderError: another run is using it.
        """
        if sys.platform == "win32":
            return
        try:
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # nothing can be written here, which is for others to say
            return
        claim = weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 1000).decode(errors="replace")
            claim()
            raise FolderError(
                f"another run is using {self} ({holder or 'it has just begun'}): wait until it has ended, stop it, or "
                "name another folder (--output DIR)"
            ) from None
        except OSError:  # no locks here
            claim()
            return
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._claim = claim

    def release(self) -> None:
        """Let other runs write into the folder again."""
        if self._claim is not None:
            self._claim()

    def make_empty(self) -> None:
        """Make the folder, claim it, and delete the run in it, but nothing else that may lie there.

        Raises:
            FolderError: another run is using it, or the system does not let us.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=not self.must_be_new)
            self.claim()
            for path in self._files():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise FolderError(f"--output {self}: {error}; name another folder (--output DIR)") from error

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json."""
        with replaced(self.config) as unfinished:
            unfinished.write_text(json.dumps(config, indent=2) + "\n")

    def saved_options(self) -> dict[str, Any]:
        """Return the options in config.json.

        Raises:
            FolderError: the file is missing or damaged.
        """
        try:
            return dict(self.saved_config()["options"])
        except (ValueError, KeyError, TypeError) as error:
            raise FolderError(f"{self.config} cannot be used ({error!r}); it is needed to resume the run") from None

    def saved_config(self) -> dict[str, Any]:
        """Return what is in config.json.

        Raises:
            FolderError: the file is missing or damaged.
        """
        try:
            return dict(json.loads(self.config.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise FolderError(f"{self.config} cannot be used ({error!r}); it is needed to resume the run") from None

    def _files(self) -> tuple[Path, ...]:
        return (
            self.config,
            self.metrics,
            self.curves,
            self.model,
            self.checkpoint,
            self.previous_checkpoint,
        )


@contextlib.contextmanager
def replaced(path: Path, *, keep_as: Path | None = None) -> Iterator[Path]:
    """Give a temporary path to write to, and put what was written in the place of `path` when the block ends well.

    The bytes are on the disk before the name is theirs; so after a power cut there is the old file or the new one.
    With `keep_as` the old one is kept under that name. Between its renaming and the new one's, there is no `path`:
    who reads must then turn to `keep_as`.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.touch()
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        if keep_as is not None and path.exists():
            path.replace(keep_as)
        unfinished.replace(path)
    except OSError as error:
        saved = "nothing had been saved before"
        if RunFolder(path.parent).can_be_resumed():
            saved = f"what was saved before stays, and manyhands train --resume {path.parent} goes on from there"
        raise OSError(f"{path} cannot be written ({error.strerror or error}); {saved}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    if sys.platform != "win32":  # the names themselves; Windows has no way to ask for it
        names = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(names)
        finally:
            os.close(names)
