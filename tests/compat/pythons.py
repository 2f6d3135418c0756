"""Pythons on this machine: where they are, and what they are."""

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_SAYS = """
import platform, sysconfig
print(platform.python_version(), int(bool(sysconfig.get_config_var("Py_GIL_DISABLED"))))
"""


class Python(NamedTuple):
    """A Python that starts.

    Attributes:
        path: of the program.
        version: such as "3.14.7".
        free_threaded: whether it has been built without the global lock.
    """

    path: str
    version: str
    free_threaded: bool

    @property
    def release(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def key(self) -> str:
        """Its name in PAIRS, such as "3.14t"."""
        return ".".join(map(str, self.release)) + "t" * self.free_threaded

    def __str__(self) -> str:
        return self.version + ", free-threaded" * self.free_threaded


@functools.cache
def find(name: str) -> Python | None:
    """Return the Python with this path, name or release ("3.14t"); None if there is none that starts."""
    if not name[:1].isdigit():
        return _asked(shutil.which(name) or name)
    program = f"python{name}"
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += sorted(Path.home().glob(".pyenv/versions/*/bin"))
    folders += sorted(Path("/opt").glob("python*/bin"))
    found = (_asked(str(folder / program)) for folder in folders if (folder / program).exists())
    return next((python for python in found if python and python.key == name), None)


def _asked(path: str) -> Python | None:
    """Return what a program says it is; None if it is no Python, or one that does not start, as pyenv's shims."""
    try:
        done = subprocess.run([path, "-c", _SAYS], capture_output=True, text=True, check=True)
        version, free_threaded = done.stdout.split()
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return Python(path, version, free_threaded == "1")
