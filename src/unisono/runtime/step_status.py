"""What a wrapper says about its steps to `unisono watch`: a small file for each, which only its user can read.

    a wrapper   once a second, at the beginning of a forward: the step before it, as JSON
    a reader    all files of this user's processes; it removes those of processes that have ended

The folder is `$XDG_RUNTIME_DIR/unisono`, or `unisono-UID` in the folder for temporary files. One that belongs to
someone else, or that others may enter, is not used.

Guarantees
    - A step costs a comparison with the clock, and once a second one small file.
    - Nothing that goes wrong here reaches the training. The wrapper then says nothing more.
    - A reader sees the whole of one publication: it is written under another name, and renamed. Its name tells whose it
      is. A process removes its own when it exits; a killed one leaves it to the next reader, who tells of it.

`UNISONO_PUBLISH=0` switches it off.
"""

import contextlib
import itertools
import json
import os
import re
import stat
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, time

import torch

from unisono.runtime import devices as _devices
from unisono.runtime.regular_files import open_regular
from unisono.runtime.thread_pool import inside_replica
from unisono.runtime.timeline import ReplicaTiming

_SWITCH = "UNISONO_PUBLISH"
_SECONDS_BETWEEN = 1.0
_UNFINISHED = ".unfinished"
_MOST_BYTES = 1 << 20
_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-\d+\.(status|unfinished)")  # process, its start, its namespace, a number

_numbers = itertools.count()


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica in the last step.

    Attributes:
        number: its place among the replicas that had rows.
        rows: its rows; 0 if not known.
        forward_s, backward_s: as in `ReplicaTiming`; 0 if not known.
        on_host: whether these are the times in which it computed; on an accelerator they are for queuing the work.
        device, pci: its name in its process, and its address on the PCI bus ("" if it has none).
    """

    number: int
    rows: int
    forward_s: float
    backward_s: float
    on_host: bool
    device: str
    pci: str


@dataclass(frozen=True)
class Published:
    """What a wrapper has published.

    Attributes:
        name: of the file; unique.
        pid: of its process.
        steps: forwards so far.
        published_at: when, in seconds since 1970.
        step_s: the mean seconds from one forward to the next since the publication before.
        module, engine: names of classes.
    """

    name: str
    pid: int
    steps: int
    published_at: float
    step_s: float
    module: str
    engine: str
    replicas: tuple[ReplicaStatus, ...]


class StepStatus:
    """A wrapper's own status. A copy of the wrapper has one of its own.

    Attributes:
        steps: forwards so far; the wrapper counts.
        due: when `publish` is to be called next, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.due = 0.0
        self._before: tuple[float, int] | None = None
        self._file: tuple[int, Path] | None = None  # of this process

    def publish(
        self, module: str, engine: str, devices: Sequence[torch.device], timings: Sequence[ReplicaTiming]
    ) -> None:
        """Publish the step that has ended; the first call only notes the time.

        Args:
            timings: of each replica; empty if they are not known.
            devices: the replicas', where there are no timings.
        """
        now = monotonic()
        before, self._before, self.due = self._before, (now, self.steps), now + _SECONDS_BETWEEN
        if before is None or inside_replica() or self.steps == before[1]:
            return
        step_s = (now - before[0]) / (self.steps - before[1])
        try:
            if self._file is None or self._file[0] != os.getpid():  # forked since: the file is the other process's
                self._file = self._open()
            pid, path = self._file
            timings = timings or [ReplicaTiming(device, 0) for device in devices]
            replicas = tuple(_status_of(number, timing) for number, timing in enumerate(timings))
            _write(path, Published(path.name, pid, self.steps, time(), step_s, module, engine, replicas))
        except (OSError, RuntimeError):  # no folder, a full disk; torch does not know a device
            self.due = float("inf")

    def _open(self) -> tuple[int, Path]:
        """Choose the file; it goes with the wrapper, or with the process.

        Raises:
            OSError: there is no place for it, or it is not wanted.
        """
        if os.environ.get(_SWITCH, "1") == "0" or not hasattr(os, "getuid"):
            raise OSError("nothing is published")
        pid = os.getpid()
        folder = folders()[0]
        folder.mkdir(mode=0o700, exist_ok=True)
        expect_private(folder)
        path = folder / f"{pid}-{_start_of(pid)}-{_namespace()}-{next(_numbers)}.status"
        weakref.finalize(self, _remove, path, pid)
        return pid, path

    def __reduce__(self) -> tuple[type["StepStatus"], tuple[()]]:
        return type(self), ()


def _status_of(number: int, timing: ReplicaTiming) -> ReplicaStatus:
    device = timing.device
    on_host, pci = _devices.computes_on_host(device), _devices.pci_address(device) or ""
    return ReplicaStatus(number, timing.rows, timing.forward_s, timing.backward_s, on_host, str(device), pci)


def _write(path: Path, published: Published) -> None:
    unfinished = path.with_suffix(_UNFINISHED)
    with open(open_regular(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(json.dumps(asdict(published)))
    os.replace(unfinished, path)


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a process that was forked from it
        for each in (path, path.with_suffix(_UNFINISHED)):
            with contextlib.suppress(OSError):
                each.unlink()


def folders() -> list[Path]:
    """Return the folders where wrappers of this user publish: the one that this process uses, then those of others."""
    temporary = Path(tempfile.gettempdir()) / f"unisono-{os.getuid()}"
    runtime = [os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"]
    named = [Path(name) / "unisono" for name in runtime if os.path.isabs(name) and os.path.isdir(name)]
    if not (os.path.isabs(runtime[0]) and os.path.isdir(runtime[0])):  # no session: what others have comes second
        return list(dict.fromkeys([temporary, *named]))
    return list(dict.fromkeys([*named, temporary]))


def expect_private(folder: Path) -> None:
    """Check that a folder is this user's, and that no other user may enter it.

    Raises:
        OSError: it is not, or there is none.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is no private folder of this user: expected a folder with mode 700")


def read_all() -> tuple[list[Published], list[str]]:
    """Return what this user's running processes have published, in order of their numbers, and notes for the user.

    The notes name folders that cannot be read, and processes that have left files, which are removed.
    """
    found: list[Published] = []
    notes: list[str] = []
    if not hasattr(os, "getuid"):
        return [], ["wrappers publish nothing on this system"]
    for folder in folders():
        try:
            expect_private(folder)
            paths = list(folder.iterdir())
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"not read: {error}")
            continue
        for path in paths:
            with contextlib.suppress(OSError):
                _read(path, found, notes)
    return sorted(found, key=lambda each: (each.pid, each.name)), notes


def _read(path: Path, found: list[Published], notes: list[str]) -> None:
    parts = _NAME.fullmatch(path.name)
    if parts is None:
        return
    pid, start, namespace = map(int, parts.groups()[:3])
    if namespace != _namespace():  # of a container: its numbers of processes mean others here
        return
    has_ended, published = _start_of(pid) != start, None
    with contextlib.suppress(OSError):  # a link or a pipe, say: of a process that has ended it is removed all the same
        published = _parsed(_content(path)) if path.suffix != _UNFINISHED else None
    if has_ended:
        path.unlink()
        if published:
            notes.append(
                f"process {pid} has ended without Python's usual exit, as a killed one does: {published.module}, "
                f"{published.steps:,} steps, the last {time() - published.published_at:.0f} s ago"
            )
    elif published:
        found.append(published)


def _content(path: Path) -> bytes:
    """Return the bytes of a file of this user's; those of pipes, links and other users' files are refused."""
    file = open_regular(path, os.O_RDONLY)
    try:
        if os.fstat(file).st_uid != os.getuid():
            raise PermissionError(f"{path} is no file of this user")
        return os.read(file, _MOST_BYTES)
    finally:
        os.close(file)


def _parsed(content: bytes) -> Published | None:
    """Return what a file says; None if a wrapper of this release has not written it, or not all of it."""
    try:
        found = json.loads(content)
        found["replicas"] = tuple(ReplicaStatus(**each) for each in found["replicas"])
        return Published(**found)
    except (ValueError, TypeError, KeyError):
        return None


def _start_of(pid: int) -> int | None:
    """Return when a process was started, in the kernel's ticks; None if it has ended. 0 where that is not known."""
    try:
        if not os.path.isdir("/proc/self"):
            os.kill(pid, 0)
            return 0
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _namespace() -> int:
    """Return which processes the numbers of processes mean: a container has its own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
