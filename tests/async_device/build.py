"""Build the device's C++ once, and keep it: a change of its source, of torch or of Python makes another build.

    python tests/async_device/build.py        build now, and say where it is and how long it took

Only a C++ compiler is needed ($CXX, or g++, or clang++), no build tool. Processes that want the library at once wait
for the one that builds it. It is kept in ~/.cache/unisono (or in $XDG_CACHE_HOME/unisono).
"""

import concurrent.futures
import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch

NAME = "queued_device"  # of the module that C++ makes
FOLDER = Path(__file__).with_name("csrc")
# What is compiled together. Most of the time goes into torch's headers, read once for each unit: two units, for two
# cores, take half the processor time of one for each file.
UNITS = [
    ["streams", "graphs", "guard", "memory", "hooks", "module", "autocast"],
    ["tensors", "fallback", "copies", "operations", "sparse"],
]
INCLUDE = Path(torch.__file__).with_name("include")
LIB = Path(torch.__file__).with_name("lib")
FLAGS = [
    # Without optimisation (-O0) the build is no shorter: 47 s of processor time, and 45 s with -O1.
    *("-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden"),
    f"-DTORCH_EXTENSION_NAME={NAME}",
    "-DAT_PER_OPERATOR_HEADERS",  # a file includes the operators that it names, and not all of them
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    *(f"-isystem{folder}" for folder in (INCLUDE, INCLUDE / "torch/csrc/api/include", sysconfig.get_path("include"))),
]
LIBRARIES = [f"-L{LIB}", *(f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python"))]


def load() -> ModuleType:
    """Return the device's module, built if it is not there yet."""
    spec = importlib.util.spec_from_file_location(NAME, built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built() -> Path:
    """Return the path of the built library; build it first if it is not there."""
    sources = {source.name: source.read_text() for source in sorted(FOLDER.iterdir())}
    folder = _folder(sources)
    library = folder / f"{NAME}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise RuntimeError(f"the asynchronous device cannot be kept: {error}. XDG_CACHE_HOME names a folder") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which the kernel releases when the process that builds is killed
        if not library.exists():
            _build(library, sources)
    return library


def _folder(sources: dict[str, str]) -> Path:
    digest = hashlib.sha256()
    for part in [repr(sources), repr(UNITS), *FLAGS, *LIBRARIES, torch.__version__, sys.version]:
        digest.update(part.encode() + b"\0")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "unisono" / f"{NAME}-{digest.hexdigest()[:16]}"


def _build(library: Path, sources: dict[str, str]) -> None:
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "")
    if not compiler:
        raise RuntimeError(
            "the asynchronous device of tests/async_device has to be built, and there is no C++ compiler: install g++ "
            "(Debian, Ubuntu: apt-get install g++), or name one in the variable CXX"
        )
    print("building the asynchronous device, once: about a minute of processor time", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        for name, text in sources.items():  # the text that the folder's name is made of: a file may change meanwhile
            Path(scratch, name).write_text(text)
        commands, objects = [], []
        for number, names in enumerate(UNITS):
            unit = Path(scratch, f"unit{number}.cpp")
            unit.write_text("".join(f'#include "{name}.cpp"\n' for name in names))
            objects.append(str(unit.with_suffix(".o")))
            commands.append([*compiler, *FLAGS, "-c", str(unit), "-o", objects[-1]])
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        part = Path(scratch, library.name)
        _run([*compiler, "-shared", *objects, *LIBRARIES, "-o", str(part)])
        part.replace(library)  # in one step: no process sees half a library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise RuntimeError(f"the C++ compiler cannot be run: {error}") from error
    if done.returncode:
        raise RuntimeError(f"the asynchronous device cannot be built:\n{' '.join(command)}\n{done.stdout}")


def main() -> None:
    """Build, and say how long it took."""
    began = time.monotonic()
    library = built()
    print(f"{library}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
