"""The output folder of a run: which files it has, and which process may write into it.

    config.json              the options, and what they came to
    metrics.jsonl            a line for each step and for each epoch
    curves.png               loss and accuracy by epoch
    timeline.json, .png      with --profile: what each replica did when, in the steps of the last epoch
    model.safetensors        the weights of the last checkpoint
    checkpoint.safetensors   what resuming needs; checkpoint.previous.safetensors is the one before
    tensorboard/             event files, with --tensorboard
    .lock                    names the process that writes here, or the last one that did

metrics.jsonl and event files are appended to; every other file is replaced whole, so that under its name there is
always a complete file, even after a power cut. config.json is written first: where it is, a run has begun and can be
resumed, from its beginning if there is no checkpoint yet. The checkpoint is written before the files that follow from
it, weights and curves, which a resumed run writes again.

One process at a time writes into a folder; of several that train together it is rank 0. It holds a lock (flock) on
`.lock`, which the system releases however the process ends. Windows, and file systems without locks, do without.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.console import files
from unisono.console.errors import FolderError
from unisono.runtime.regular_files import open_regular

if sys.platform != "win32":
    import fcntl


class RunFolder:
    """The folder of one run, and the paths in it. Where it cannot be used, methods raise a FolderError."""

    EVENTS_SUFFIX = ".unisono"  # of the names of our event files

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.curves = path / "curves.png"
        self.trace = path / "timeline.json"
        self.timeline = path / "timeline.png"
        self.model = path / "model.safetensors"
        self.checkpoint = path / "checkpoint.safetensors"
        self.previous_checkpoint = path / "checkpoint.previous.safetensors"
        self.tensorboard = path / "tensorboard"
        self._lock = path / ".lock"
        self._claim: int | None = None  # the descriptor of the lock that this process holds

    def __str__(self) -> str:
        """Return the path as it is typed on a command line."""
        return files.as_typed(self.path)

    # ---- choosing --------------------------------------------------------------------------------

    @classmethod
    def for_new_run(cls, path: Path | None, *, overwrite: bool = False) -> "RunFolder":
        """Choose the folder for a new run, by default `runs/` and the time. Nothing is created or deleted yet."""
        folder = cls(path or Path("runs") / time.strftime("%Y-%m-%d-%H-%M-%S"))
        if not overwrite and any(file.exists() for file in folder._files()):
            raise FolderError(
                f"{folder} holds a run already: go on with it (--resume {folder}), replace it (--overwrite), or name "
                "another folder (--output DIR)"
            )
        files.expect_writable(folder.path)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Return the folder of a run that can be resumed; an error where weights have no checkpoint any more."""
        folder, problem = cls(path), None
        if not path.is_dir():
            problem = "there is no such folder; expected the --output of an earlier run"
        elif not folder.config.exists():
            problem = (
                "no config.json in it, so no run has begun there, or its file is lost; start it again (--output "
                f"{folder} --overwrite)"
            )
        elif folder.model.exists() and not folder.has_checkpoint():
            problem = (
                f"no {folder.checkpoint.name} in it, though there are weights: put it back, or start again (--output "
                f"{folder} --overwrite)"
            )
        if problem is not None:
            raise FolderError(f"--resume {folder}: {problem}")
        return folder

    @classmethod
    def of_launch(cls, launch: str | None, path: Path | None) -> "RunFolder | None":
        """Return the folder, or any in `runs/`, of the run that this launch began before it restarted its processes."""
        for place in [path] if path is not None else sorted(Path("runs").glob("*")):
            with contextlib.suppress(FolderError):
                if launch is not None and cls(place).saved_config().get("launch") == launch:
                    return cls(place)
        return None

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint."""
        return self.checkpoint.exists() or self.previous_checkpoint.exists()

    # ---- one process at a time -------------------------------------------------------------------

    def claim(self) -> None:
        """Keep other runs out of the folder, until `close` is called or this process ends."""
        if sys.platform == "win32":
            return
        try:
            lock = open_regular(self._lock, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise FolderError(f"{self} cannot be used: {error.filename}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 1000).decode(errors="replace") or "it has just begun"
            os.close(lock)
            raise FolderError(
                f"another run is using {self} ({holder}): wait until it has ended, stop it, or name another folder "
                "(--output DIR)"
            ) from None
        except OSError:  # no locks here
            os.close(lock)
            return
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._claim = lock

    def close(self) -> None:
        """Let other runs use the folder, also where a forked process still has the lock open."""
        if self._claim is not None:
            fcntl.flock(self._claim, fcntl.LOCK_UN)
            os.close(self._claim)
            self._claim = None

    # ---- the files -------------------------------------------------------------------------------

    def make_empty(self) -> None:
        """Create the folder, claim it, and delete the files of an earlier run in it, but no others."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.claim()
            for path in self._files():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise FolderError(f"--output {self}: {error}; name another folder (--output DIR)") from error

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json, with a digest of the rest at its end."""
        with replaced(self.config) as unfinished:
            unfinished.write_text(json.dumps({**config, "sha256": _digest(config)}, indent=2) + "\n")

    def saved_config(self) -> dict[str, Any]:
        """Return the contents of config.json; an error if it is missing, damaged, or was changed by other means."""
        try:
            config: dict[str, Any] = json.loads(files.contents(self.config))
            if config.pop("sha256") != _digest(config):
                raise ValueError("its contents do not have the digest that is in it")
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise FolderError(
                f"{self.config} cannot be used ({getattr(error, 'strerror', None) or error}); it is needed to resume "
                f"the run: put it back as it was, or start again (--output {self} --overwrite)"
            ) from error
        return config

    def events(self) -> list[Path]:
        """Return the event files that runs in this folder have written; there may be files of other programs too."""
        return sorted(self.tensorboard.glob(f"events.out.tfevents.*{self.EVENTS_SUFFIX}"))

    def _files(self) -> tuple[Path, ...]:
        written = self.config, self.metrics, self.curves, self.trace, self.timeline, self.model
        return (*written, self.checkpoint, self.previous_checkpoint, *self.events())


def _digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what is in a configuration, however it is written."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def replaced(path: Path, *, keep_as: Path | None = None) -> Iterator[Path]:
    """Replace a file of a run whole, as `console.files.replaced` does; an error says how to resume."""
    with errors_say_how_to_resume(path), files.replaced(path, keep_as=keep_as) as unfinished:
        yield unfinished


@contextlib.contextmanager
def errors_say_how_to_resume(path: Path) -> Iterator[None]:
    """Have an OSError of the block, which writes a file of a run, say what was saved and how to go on."""
    try:
        yield
    except OSError as error:
        saved, folder = "nothing had been saved before", RunFolder(path.parent)
        if folder.has_checkpoint():
            saved = f"what was saved before stays, and unisono train --resume {folder} goes on from there"
        raise OSError(f"{path} cannot be written ({error.strerror or error}); {saved}") from error
