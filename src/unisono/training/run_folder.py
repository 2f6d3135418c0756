"""The output folder of a run: its files, which `unisono train --help` lists, and which process may write into it.

metrics.jsonl and event files are appended to; every other file is replaced whole, so that under its name there is
always a complete file, even after a power cut. The checkpoint is written first, before the first step too: where it is,
a run has begun and can be resumed. It is the only file that is read. A resumed run writes the other ones again.

One process at a time writes into a folder; of several that train together it is rank 0. It holds the lock of the file
`.lock`, which names it, and which the system releases however the process ends. File systems without locks do without.
"""

import os
import socket
import time
from pathlib import Path

from unisono.console import files
from unisono.console.errors import FolderError
from unisono.training import file_lock


class RunFolder:
    """The folder of one run, and the paths in it. Where it cannot be used, methods raise a FolderError."""

    EVENTS_SUFFIX = ".unisono"  # of the names of our event files

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.safetensors"
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.curves = path / "curves.png"
        self.trace = path / "timeline.json"
        self.timeline = path / "timeline.png"
        self.model = path / "model.safetensors"
        self.tensorboard = path / "tensorboard"
        self._lock = path / ".lock"
        self._claim: int | None = None  # the descriptor of the lock that this process holds

    def __str__(self) -> str:
        """Return the path as it is typed on a command line."""
        return files.as_typed(self.path)

    @classmethod
    def for_new_run(cls, path: Path | None, *, overwrite: bool = False) -> "RunFolder":
        """Choose the folder for a new run, by default `runs/` and the time. Nothing is created or deleted yet."""
        folder = cls(path or Path("runs") / time.strftime("%Y-%m-%d-%H-%M-%S"))
        if not overwrite and any(file.exists() for file in folder._files()):
            raise FolderError(
                f"{folder} already has a run: resume it (--resume {folder}), replace it (--overwrite), or "
                "give another folder (--output DIR)"
            )
        files.expect_writable(folder.path)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Return the folder of a run that can be resumed."""
        folder = cls(path)
        if not folder.has_begun:
            raise FolderError(
                f"--resume {folder}: found no {files.as_typed(folder.checkpoint)}; expected the --output of "
                f"an earlier run, or start one there (--output {folder} --overwrite)"
            )
        return folder

    @property
    def has_begun(self) -> bool:
        """Whether there is a run that can be resumed: it has a checkpoint before its first step."""
        return self.checkpoint.is_file()

    def claim(self) -> None:
        """Keep other runs out of the folder, until `close` is called or this process ends."""
        try:
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))  # no link
        except OSError as error:
            raise FolderError(f"cannot use {self}: {error.filename}: {error.strerror}") from error
        try:
            has_locks = file_lock.take(lock)
        except BlockingIOError:
            holder = os.read(lock, 1000).decode(errors="replace") or "it has just begun"
            os.close(lock)
            raise FolderError(
                f"another run is using {self} ({holder}): wait for it, stop it, or give another folder (--output DIR)"
            ) from None
        if not has_locks:
            os.close(lock)
            return
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._claim = lock

    def close(self) -> None:
        """Let other runs use the folder, also where a forked process still has the lock open."""
        if self._claim is not None:
            file_lock.release(self._claim)
            os.close(self._claim)
            self._claim = None

    def make_empty(self) -> None:
        """Create the folder, claim it, and delete the files of an earlier run in it, but no others."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.claim()
            for path in self._files():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise FolderError(f"--output {self}: {error}; give another folder (--output DIR)") from error

    def events(self) -> list[Path]:
        """Return the event files that runs in this folder have written; there may be files of other programs too."""
        return sorted(self.tensorboard.glob(f"events.out.tfevents.*{self.EVENTS_SUFFIX}"))

    def _files(self) -> tuple[Path, ...]:
        written = self.config, self.metrics, self.curves, self.trace, self.timeline, self.model, self.checkpoint
        return (*written, *self.events())
