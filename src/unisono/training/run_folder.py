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
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.console import files
from unisono.console.errors import FolderError
from unisono.runtime.regular_files import NotRegularFileError, expect_regular, open_regular

if sys.platform != "win32":
    import fcntl


_MAX_CONFIG_BYTES = 1 << 20
_LAID = "remove it if you know who has put it there, or name another folder (--output DIR)"


class RunFolder:
    """The folder of one run, and the paths in it."""

    EVENTS_SUFFIX = ".unisono"  # of the names of our event files

    def __init__(self, path: Path) -> None:
        self.path = path
        self.must_be_new = False
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
        self._claim: weakref.finalize[Any, Any] | None = None  # unlocks, at the latest when this object is collected

    def __str__(self) -> str:
        """Return the path as it is typed on a command line."""
        return files.as_typed(self.path)

    @classmethod
    def for_new_run(cls, path: Path | None, *, overwrite: bool = False) -> "RunFolder":
        """Choose the folder for a new run, by default `runs/` and the time. Nothing is created or deleted yet.

        Raises:
            FolderError: the folder cannot be created, or holds a run and `overwrite` is false.
        """
        folder = cls(path or Path("runs") / time.strftime("%Y-%m-%d-%H-%M-%S"))
        folder.must_be_new = path is None  # two runs begun in one second must not share one
        if folder.holds_a_run() and not overwrite:
            if folder._lock.exists():  # no lock file is left in a folder that is not ours
                folder.claim()  # raises if that run is still going on: it can be neither resumed nor replaced
                folder.release()
            raise FolderError(
                f"{folder} holds a run already: go on with it (--resume {folder}), replace it (--overwrite), or name "
                "another folder (--output DIR)"
            )
        files.expect_writable(folder.path)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Return the folder of a run that can be resumed.

        Raises:
            FolderError: there is no such folder, no run in it, or weights of a run that has no checkpoint any more.
        """
        folder = cls(path)
        if not path.is_dir():
            raise FolderError(f"--resume {folder}: there is no such folder; expected the --output of an earlier run")
        if not folder.config.exists():
            raise FolderError(
                f"--resume {folder}: no config.json in it, so no run has begun there, or its file is lost; start it "
                f"again (--output {folder})"
            )
        if folder.model.exists() and not folder.has_checkpoint():
            raise FolderError(
                f"--resume {folder}: no {folder.checkpoint.name} in it, though there are weights: put it back, or "
                f"start again (--output {folder} --overwrite)"
            )
        return folder

    @classmethod
    def of_launch(cls, launch: str | None, path: Path | None) -> "RunFolder | None":
        """Return the folder of the run that this launch began before it restarted its processes.

        Args:
            launch: its name, which config.json has. None: there is no launch.
            path: the folder; None: anywhere in `runs/`.
        """
        if launch is None:
            return None
        for place in [path] if path is not None else sorted(Path("runs").glob("*")):
            with contextlib.suppress(FolderError):
                if cls(place).saved_config().get("launch") == launch:
                    return cls(place)
        return None

    def events(self) -> list[Path]:
        """Return the event files that runs in this folder have written; there may be files of other programs too."""
        return sorted(self.tensorboard.glob(f"events.out.tfevents.*{self.EVENTS_SUFFIX}"))

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint."""
        return self.checkpoint.exists() or self.previous_checkpoint.exists()

    def holds_a_run(self) -> bool:
        """Return whether there is anything to lose: weights, a checkpoint, or files that are not ours."""
        if any(path.exists() for path in (self.checkpoint, self.previous_checkpoint, self.model)):
            return True
        is_ours = False
        with contextlib.suppress(FolderError):
            is_ours = "unisono" in self.saved_config()
        return not is_ours and any(path.exists() for path in self._files())

    def claim(self) -> None:
        """Keep other runs out of the folder, until `release` is called or this process ends.

        Raises:
            FolderError: another run is using it; or a link or a pipe is where the run would write.
        """
        try:
            for path in (self._lock, *map(files.unfinished_name, self._replaced())):
                expect_regular(path)
        except NotRegularFileError as error:
            raise FolderError(f"{self} cannot be used: {error.filename}: {error.strerror}; {_LAID}") from error
        if sys.platform == "win32":
            return
        try:
            lock = open_regular(self._lock, os.O_RDWR | os.O_CREAT)
        except OSError:  # nothing can be written here: the next write will say so
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
        """Release the lock, also where a process that an observer has forked in the meantime still has it open."""
        if self._claim is not None and (claim := self._claim.peek()):
            (lock,) = claim[2]
            fcntl.flock(lock, fcntl.LOCK_UN)
            self._claim()

    def make_empty(self) -> None:
        """Create the folder, claim it, and delete the files of an earlier run in it, but no others.

        Raises:
            FolderError: another run is using it, or the system refuses.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=not self.must_be_new)
            self.claim()
            for path in self._files():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise FolderError(f"--output {self}: {error}; name another folder (--output DIR)") from error

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json, with a digest of the rest at its end."""
        with replaced(self.config) as unfinished:
            unfinished.write_text(json.dumps({**config, "sha256": _digest(config)}, indent=2) + "\n")

    def saved_options(self) -> dict[str, Any]:
        """Return the options in config.json.

        Raises:
            FolderError: the file is missing or damaged.
        """
        options = self.saved_config().get("options")
        if not isinstance(options, dict):
            raise self._unusable_config("it has no options")
        return options

    def saved_config(self) -> dict[str, Any]:
        """Return the contents of config.json.

        Raises:
            FolderError: the file is missing or damaged, or was changed by other means.
        """
        try:
            config = json.loads(files.contents(self.config, max_bytes=_MAX_CONFIG_BYTES))
        except OSError as error:
            raise self._unusable_config(error.strerror or error) from error
        except (ValueError, RecursionError) as error:
            raise self._unusable_config("it is not JSON") from error
        if not isinstance(config, dict) or config.pop("sha256", None) != _digest(config):
            raise self._unusable_config("its contents do not have the digest that is in it")
        return config

    def _unusable_config(self, reason: object) -> FolderError:
        return FolderError(
            f"{self.config} cannot be used ({reason}); it is needed to resume the run: put it back as it was, or start "
            f"again (--output {self} --overwrite)"
        )

    def _files(self) -> tuple[Path, ...]:
        return (*self._replaced(), self.previous_checkpoint, *self.events())

    def _replaced(self) -> tuple[Path, ...]:
        """Return the files that are replaced whole."""
        return self.config, self.metrics, self.curves, self.trace, self.timeline, self.model, self.checkpoint


def _digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what is in a configuration, however it is written."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def replaced(path: Path, *, keep_as: Path | None = None) -> Iterator[Path]:
    """Replace a file of a run whole, as `console.files.replaced` does; an error says how to resume."""
    try:
        with files.replaced(path, keep_as=keep_as) as unfinished:
            yield unfinished
    except OSError as error:
        saved, folder = "nothing had been saved before", RunFolder(path.parent)
        if folder.has_checkpoint():
            saved = f"what was saved before stays, and unisono train --resume {folder} goes on from there"
        raise OSError(f"{path} cannot be written ({error.strerror or error}); {saved}") from error
