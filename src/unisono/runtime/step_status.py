"""What a wrapper says about its steps to `unisono watch`: a small file for each, which only its user can read.

    a wrapper   once a second, at the beginning of a forward: the step before it, in one write of some hundred bytes
    a reader    all files of this user's processes that still run; it removes those of processes that have ended

The folder is `$XDG_RUNTIME_DIR/unisono`, or `unisono-UID` in the folder for temporary files. One that belongs to
someone else, or that others may enter, is not used.

Guarantees
    - A step costs a comparison with the clock, and once a second one system call. The file is written, not mapped: a
      write into a mapping ends the process if the disk is full, or if something has cut the file short.
    - Nothing that goes wrong here reaches the training. The wrapper then says nothing more.
    - A reader sees the whole of one publication or nothing: each has a checksum, and a name that tells whose it is.
      So a process that ends in the middle of a write leaves a file that is ignored, and removed.

`UNISONO_PUBLISH=0` switches it off.
"""

import contextlib
import itertools
import os
import re
import stat
import struct
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time

import torch

from unisono.runtime import devices as _devices
from unisono.runtime.regular_files import open_regular
from unisono.runtime.thread_pool import inside_replica
from unisono.runtime.timeline import ReplicaTiming

_SWITCH = "UNISONO_PUBLISH"
_SECONDS_BETWEEN = 1.0
_MAGIC = b"manyhs01"  # the two digits count the layouts
_HEAD = struct.Struct("<8sI")  # magic, checksum of all that follows
_STEP = struct.Struct("<QddH64s32s")  # steps, time of publication, seconds a step, replicas, module, engine
_REPLICA = struct.Struct("<QQdd?16s16s")  # number, rows, forward_s, backward_s, on_host, device, PCI address
_MOST_BYTES = 1 << 20
_TRIES = 5
_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)\.status")  # process, its start, its namespace, number of the wrapper

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
        self._file: tuple[int, int] | None = None  # process, file descriptor

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
            timings = timings or [ReplicaTiming(device, 0) for device in devices]
            body = _packed(self.steps, step_s, module, engine, timings)
            os.pwrite(self._file[1], _HEAD.pack(_MAGIC, zlib.crc32(body)) + body, 0)
        except (OSError, RuntimeError):  # no folder, a full disk; torch does not know a device
            self.due = float("inf")

    def _open(self) -> tuple[int, int]:
        """Make the file; it goes with the wrapper, or with the process.

        Raises:
            OSError: it cannot be made, or is not wanted.
        """
        if os.environ.get(_SWITCH, "1") == "0" or not hasattr(os, "pwrite"):
            raise OSError("nothing is published")
        pid = os.getpid()
        folder = folders()[0]
        folder.mkdir(mode=0o700, exist_ok=True)
        expect_private(folder)
        path = folder / f"{pid}-{_start_of(pid)}-{_namespace()}-{next(_numbers)}.status"
        file = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        weakref.finalize(self, _remove, path, file, pid)
        return pid, file

    def __reduce__(self) -> tuple[type["StepStatus"], tuple[()]]:
        return type(self), ()


def _remove(path: Path, file: int, pid: int) -> None:
    with contextlib.suppress(OSError):
        os.close(file)
    if os.getpid() == pid:  # not in a process that was forked from it
        with contextlib.suppress(OSError):
            path.unlink()


def _packed(steps: int, step_s: float, module: str, engine: str, timings: Sequence[ReplicaTiming]) -> bytes:
    parts = [_STEP.pack(steps, time(), step_s, len(timings), module.encode(), engine.encode())]
    for number, timing in enumerate(timings):
        device = timing.device
        parts.append(
            _REPLICA.pack(
                number,
                timing.rows,
                timing.forward_s,
                timing.backward_s,
                _devices.computes_on_host(device),
                str(device).encode(),
                (_devices.pci_address(device) or "").encode(),
            )
        )
    return b"".join(parts)


def folders() -> list[Path]:
    """Return the folders where wrappers of this user publish: the one that this process uses, then those of others."""
    temporary = Path(tempfile.gettempdir()) / f"unisono-{os.getuid()}"
    runtime = [os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"]
    named = [Path(name) / "unisono" for name in runtime if os.path.isabs(name) and os.path.isdir(name)]
    if not (os.path.isabs(runtime[0]) and os.path.isdir(runtime[0])):  # no session: what others have comes second
        return list(dict.fromkeys([temporary, *named]))
    return list(dict.fromkeys([*named, temporary]))


def expect_private(folder: Path) -> None:
    """Check that a folder is this user's, and that nobody else may enter it.

    Raises:
        OSError: it is not, or there is none.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is no private folder of this user: expected a folder with mode 700")


def read_all() -> tuple[list[Published], list[str]]:
    """Return what this user's wrappers have published, in order of their processes, and what could not be read.

    Files of processes that have ended are removed.
    """
    found: list[Published] = []
    problems: list[str] = []
    if not hasattr(os, "getuid"):
        return [], ["wrappers publish nothing on this system"]
    for folder in folders():
        try:
            expect_private(folder)
            paths = list(folder.iterdir())
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(str(error))
            continue
        for path in paths:
            found += _read(path)
    return sorted(found, key=lambda each: (each.pid, each.name)), problems


def _read(path: Path) -> Iterator[Published]:
    parts = _NAME.fullmatch(path.name)
    if parts is None:
        return
    pid, start, namespace, _ = map(int, parts.groups())
    if namespace != _namespace():  # of a container: its numbers of processes mean others here
        return
    if _start_of(pid) != start:
        with contextlib.suppress(OSError):
            path.unlink()
        return
    with contextlib.suppress(OSError):
        for _ in range(_TRIES):  # it may be written meanwhile
            if status := _parsed(path.name, pid, _content(path)):
                yield status
                return


def _content(path: Path) -> bytes:
    """Return the bytes of a file of this user's; those of pipes, links and other users' files are refused."""
    file = open_regular(path, os.O_RDONLY)
    try:
        if os.fstat(file).st_uid != os.getuid():
            raise PermissionError(f"{path} is no file of this user")
        return os.read(file, _MOST_BYTES)
    finally:
        os.close(file)


def _parsed(name: str, pid: int, content: bytes) -> Published | None:
    """Return what a file says; None if it is not whole."""
    try:
        magic, checksum = _HEAD.unpack_from(content)
        steps, published_at, step_s, num_replicas, module, engine = _STEP.unpack_from(content, _HEAD.size)
        start = _HEAD.size + _STEP.size
        replicas = [_REPLICA.unpack_from(content, start + i * _REPLICA.size) for i in range(num_replicas)]
    except struct.error:
        return None
    if magic != _MAGIC or zlib.crc32(content[_HEAD.size : start + num_replicas * _REPLICA.size]) != checksum:
        return None
    return Published(
        name,
        pid,
        steps,
        published_at,
        step_s,
        _text(module),
        _text(engine),
        tuple(_replica(*of) for of in replicas),
    )


def _replica(
    number: int, rows: int, forward_s: float, backward_s: float, on_host: bool, device: bytes, pci: bytes
) -> ReplicaStatus:
    return ReplicaStatus(number, rows, forward_s, backward_s, on_host, _text(device), _text(pci))


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


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
