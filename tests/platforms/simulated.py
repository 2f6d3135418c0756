"""What macOS or Windows lacks is taken away from unisono and its tests, on Linux, in every process of a run.

    UNISONO_TEST_PLATFORM=windows python -m pytest tests/training      # or macos; `make test-platforms` runs all

Modules of Python that differ between systems (os, signal, ...) are replaced, in the modules of this checkout and in
scripts, by views of them: `sys.platform` and `os.name` are the other system's, and what it lacks is an AttributeError
or an ImportError. torch, pytest, psutil and Python's own library keep the real modules: they have code of their own for
each system, and that for another system does not run here. So a run shows what unisono and its tests ask for. It does
not show how another system does what it is asked for: files that are open and cannot be removed, encodings, paths, its
torch.

Taken away
    - macOS: /proc and /sys; binding threads to cores; memfd, eventfd, pidfd, epoll and the like; `fork` as the way in
      which multiprocessing starts processes by default.
    - Windows, moreover: os.fork, process groups, users, terminals, sysconf, pipes and sockets with a name; fcntl, grp,
      pwd, resource, termios; all signals but six, and what Python has to send them or to time them. `os.kill` ends a
      process whatever the signal, and signal 0 is refused: there it is Ctrl-C for a whole group. Of multiprocessing's
      ways to start a process only `spawn` is left.

A child process is begun by sitecustomize.py in entry_point/, which PYTHONPATH names.
"""

import builtins
import enum
import fcntl
import functools
import importlib
import multiprocessing.context
import os
import re
import signal
import struct
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "UNISONO_TEST_PLATFORM"
ENTRY_POINT = str(Path(__file__).with_name("entry_point"))
LINUX, MACOS, WINDOWS = "linux", "macos", "windows"
_REAL = {"linux": LINUX, "darwin": MACOS, "win32": WINDOWS}.get(sys.platform, sys.platform)
SYSTEM = os.environ.get(VARIABLE) or _REAL  # whose rules hold in this process

# Regular expressions for the names that a module lacks there.
_MACOS_LACKS = {
    "os": r"sched_(?!get_priority|yield).*|SCHED_(BATCH|IDLE|RESET.*)|memfd_create|MFD_.*|eventfd.*|EFD_.*|pidfd_open|"
    r"P_PIDFD|getrandom|GRND_.*|posix_fadvise|POSIX_FADV_.*|posix_fallocate|copy_file_range|splice|SPLICE_.*|setns|"
    r"unshare|CLONE_.*|O_(TMPFILE|DIRECT|NOATIME|PATH|LARGEFILE|RSYNC)|fdatasync|.*xattr|XATTR_.*|.*res[ug]id|RWF_.*|"
    r"RTLD_DEEPBIND|timerfd.*|TFD_.*|process_cpu_count",
    "select": r"epoll|EPOLL.*",
    "signal": r"SIG(POLL|PWR|STKFLT|RTMIN|RTMAX|CLD)|sigwaitinfo|sigtimedwait|struct_siginfo|pidfd_send_signal",
    "socket": r"AF_(NETLINK|PACKET|ALG|VSOCK|CAN|BLUETOOTH|TIPC|QIPCRTR|RDS)|SOCK_(CLOEXEC|NONBLOCK)|SO_BINDTODEVICE",
    "time": r"CLOCK_(BOOTTIME|TAI)|pthread_getcpuclockid",
}
_WINDOWS_LACKS = {
    "os": _MACOS_LACKS["os"] + r"|sched_.*|SCHED_.*|fork|forkpty|register_at_fork|posix_.*|POSIX_.*|spawn[lv]pe?|"
    r"[gs]ete?[ug]id|[gs]etre[ug]id|[gs]etgroups|initgroups|getgrouplist|[gs]etp?gid|[gs]etpgrp|[gs]etsid|killpg|nice|"
    r"[gs]etpriority|PRIO_.*|uname|ctermid|ttyname|tc[gs]etpgrp|openpty|login_tty|wait[34]?|waitid|CLD_.*|getloadavg|"
    r"W(NOHANG|EXITED|STOPPED|NOWAIT|CONTINUED|UNTRACED|IF.*|COREDUMP|EXITSTATUS|STOPSIG|TERMSIG)|P_(ALL|PID|PGID)|"
    r"f?statvfs.*|ST_.*|f?pathconf.*|sysconf.*|confstr.*|mkfifo|mknod|makedev|major|minor|[lf]?chown|fchdir|chroot|sync|"
    r"pipe2|p(read|write)v?|readv|writev|sendfile|lockf|F_U?T?LOCK|F_TEST|RTLD_.*|environb|getenvb|[gs]et_blocking|"
    r"O_(NOFOLLOW|NONBLOCK|NDELAY|CLOEXEC|DIRECTORY|NOCTTY|SYNC|DSYNC|ASYNC|FSYNC|ACCMODE)|EX_(?!OK).*|SEEK_(DATA|HOLE)",
    "select": r"epoll|EPOLL.*|poll|POLL.*|PIPE_BUF",
    "signal": r"SIG(?!ABRT$|FPE$|ILL$|INT$|SEGV$|TERM$|_DFL$|_IGN$).*|alarm|.*itimer|ITIMER_.*|ItimerError|pause|"
    r"pthread_.*|siginterrupt|sig(pending|wait|waitinfo|timedwait)|struct_siginfo|pidfd_.*|Sigmasks",
    "socket": r"AF_(?!INET$|INET6$|UNSPEC$).*|send_fds|recv_fds|SOCK_(CLOEXEC|NONBLOCK)|SO_(BINDTODEVICE|REUSEPORT)",
    "time": r"CLOCK_.*|clock_.*|pthread_.*|tzset",
    "faulthandler": r"register|unregister",
    "mmap": r"PROT_.*|MAP_.*|MADV_.*",
}
_WINDOWS_HAS_NO = (
    {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog", "readline", "curses", "posix"}
)  # fmt: skip
# Tests that the simulation itself disturbs, by the end of their names; they are skipped in it, and run on the systems.
DISTURBED = {
    "test_targets.py::test_a_target_that_cannot_be_had_is_one_line[an import]": "an import passes through its function",
}
_F_OFD_SETLK = 37  # fcntl.h's; Python does not name it everywhere
_NOTHING = object()
_HIDDEN = ("/proc", "/sys")

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_CHECKOUT = str(Path(__file__).parents[2])


def environment() -> dict[str, str]:
    """Return the variables with which processes are like this one; none where nothing is simulated."""
    if VARIABLE not in os.environ:
        return {}
    others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != ENTRY_POINT]
    return {VARIABLE: SYSTEM, "PYTHONPATH": os.pathsep.join([ENTRY_POINT, *others])}


@functools.cache
def begin() -> None:
    """Take away in this process what the system of UNISONO_TEST_PLATFORM lacks; without it, nothing."""
    if VARIABLE not in os.environ:
        return
    if _REAL != LINUX or SYSTEM not in (MACOS, WINDOWS):
        raise SystemExit(f"{VARIABLE} is macos or windows, and on Linux; it is {SYSTEM!r}, on {_REAL}")
    views, lacking = _views(), _WINDOWS_HAS_NO if SYSTEM == WINDOWS else set()
    import_ = builtins.__import__

    def import_as_there(name: str, by: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if (name in views or name in lacking) and not level and by and _is_ours(by.get("__file__"), by.get("__name__")):
            if name in lacking:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return views[name]
        return import_(name, by, local, fromlist, level)

    builtins.__import__ = import_as_there  # type: ignore[assignment]
    sys.addaudithook(_hide_files)
    ways: dict[str, Any] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    multiprocessing.context._default_context._default_context = ways["spawn"]  # type: ignore[attr-defined]
    if SYSTEM == WINDOWS:
        ways.pop("fork"), ways.pop("forkserver")


def _views() -> dict[str, types.ModuleType]:
    own: dict[str, dict[str, Any]] = {
        "sys": {"platform": {MACOS: "darwin", WINDOWS: "win32"}[SYSTEM]},
        "os": {"readlink": _without_hidden(os.readlink)},
        "platform": {"system": lambda: {MACOS: "Darwin", WINDOWS: "Windows"}[SYSTEM]},
    }
    lacks = {MACOS: _MACOS_LACKS, WINDOWS: _WINDOWS_LACKS}[SYSTEM]
    if SYSTEM == WINDOWS:
        own["os"] |= {"name": "nt", "kill": _kill}
        own["ctypes"] = {
            "WinDLL": lambda name, use_last_error: Kernel,
            "get_last_error": lambda: 87,
        }  # invalid parameter
        own["signal"] = {"signal": _signal, "CTRL_C_EVENT": 0, "CTRL_BREAK_EVENT": 1, "SIGBREAK": 21}
        kept = {s.name: int(s) for s in signal.Signals if not re.fullmatch(lacks["signal"], s.name)}
        own["signal"] |= {"Signals": enum.IntEnum("Signals", kept)}
    views: dict[str, types.ModuleType] = {
        name: View(importlib.import_module(name), re.compile(lacks.get(name, r"(?!)")), own.get(name, {}))
        for name in {*own, *lacks}
    }
    if SYSTEM == WINDOWS:
        views["msvcrt"] = types.ModuleType("msvcrt", "Windows's locks, made from Linux's locks of an open file.")
        vars(views["msvcrt"]).update(LK_UNLCK=0, LK_LOCK=1, LK_NBLCK=2, locking=_locking)
    return views


class View(types.ModuleType):
    """A module without some names, and with some that differ. What does not change is found as quickly as there."""

    def __init__(self, module: types.ModuleType, lacks: re.Pattern[str], own: Mapping[str, Any]) -> None:
        super().__init__(module.__name__, module.__doc__)
        changing = module is sys  # its streams, arguments, hooks, ...: only functions in C stay as they are
        kept = {
            each: value
            for each, value in vars(module).items()
            if not (lacks.fullmatch(each) or each.endswith("hook"))
            and (isinstance(value, types.BuiltinFunctionType) or not changing)
        }
        self.__dict__.update(kept | dict(own), _module=module, _lacks=lacks, _own=set(own), _before={})

    def __getattr__(self, name: str) -> Any:
        if self._lacks.fullmatch(name) and name not in self._own:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}, as on {SYSTEM}")
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own or self._lacks.fullmatch(name):
            self._own.add(name)
            self.__dict__[name] = value
            return
        self._before.setdefault(name, []).append(getattr(self._module, name, _NOTHING))
        setattr(self._module, name, value)
        if name in self.__dict__:
            self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        """Delete it; one that was set goes back to what it was, as where monkeypatch undoes what it did."""
        if name in self._own:
            self._own.remove(name)
        elif self._before.get(name) and (before := self._before[name].pop()) is not _NOTHING:
            setattr(self._module, name, before)
        else:
            delattr(self._module, name)
        self.__dict__.pop(name, None)

    def __dir__(self) -> list[str]:
        return sorted({*self._own, *(name for name in dir(self._module) if not self._lacks.fullmatch(name))})


class Kernel:
    """What unisono calls of Windows's kernel32: whether a process runs. A handle is the process's number."""

    def OpenProcess(access: int, inherit: bool, pid: int) -> int:  # noqa: N802, N805
        return pid if Path(f"/proc/{pid}").exists() else 0

    def WaitForSingleObject(handle: Any, milliseconds: int) -> int:  # noqa: N802, N805
        state = Path(f"/proc/{handle.value}/stat").read_text().rpartition(")")[2].split()[0]
        return 0 if state in "ZX" else 0x102

    def CloseHandle(handle: Any) -> bool:  # noqa: N802, N805
        return True


def _is_ours(file: str | None, module: str | None = None) -> bool:
    """Return whether code belongs to this checkout, or is a script that a test has written."""
    if file is None:
        return module in ("__main__", "__mp_main__")
    if "site-packages" in file or file.startswith(_STANDARD_LIBRARY) or file == __file__:
        return False
    return file.startswith(_CHECKOUT) or module in ("__main__", "__mp_main__")


def _hide_files(event: str, arguments: tuple[Any, ...]) -> None:
    """Let nothing of ours open a file of Linux's own; psutil, which has code for each system, may."""
    if event in ("open", "os.listdir", "os.scandir") and arguments and _is_hidden(arguments[0]):
        frame = sys._getframe(1)
        while frame is not None and (file := frame.f_code.co_filename).startswith((_STANDARD_LIBRARY, "<frozen")):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None and _is_ours(None if file == "<string>" else file, frame.f_globals.get("__name__")):
            if event == "os.scandir":  # pathlib's glob has asked whether it is a folder, and passes over what is closed
                raise PermissionError(13, "Permission denied", arguments[0])
            raise FileNotFoundError(2, "No such file or directory", arguments[0])


def _is_hidden(path: Any) -> bool:
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    return isinstance(path, str) and (path in _HIDDEN or path.startswith(("/proc/", "/sys/")))


def _without_hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(path: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_hidden(os.fspath(path)):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **kwargs)

    return called


def _kill(pid: int, number: int) -> None:
    """End a process, as `os.kill` does on Windows, whatever the signal."""
    assert number != 0, "os.kill(pid, 0) is Ctrl-C for all processes of a console, on Windows"
    assert pid != os.getpid(), "os.kill ends this process, on Windows: no handler is called"
    os.kill(pid, signal.SIGKILL)


def _signal(number: int, handler: Any) -> Any:
    if int(number) not in (2, 4, 6, 8, 11, 15, 21):
        raise ValueError("invalid signal value")
    return signal.signal(number, handler)


def _locking(file: int, how: int, num_bytes: int) -> None:
    kind = fcntl.F_WRLCK if how else fcntl.F_UNLCK
    lock = struct.pack("hhqqi4x", kind, os.SEEK_CUR, 0, num_bytes, 0)
    try:
        fcntl.fcntl(file, _F_OFD_SETLK, lock)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error
