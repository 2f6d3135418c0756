"""The environment of a pair: a release of torch, the pins of constraints.txt, and unisono from this checkout."""

import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

from compat.pythons import Python

ROOT = Path(__file__).parents[2]
NEWEST = "newest"  # in the place of a release of torch: what pip finds

# Most tests run without these. Where a Python has no wheels of all that a line needs, it is left out.
_MAY_BE_MISSING = {
    "tensorboard": ["tensorboard"],
    "transformers": ["transformers", "accelerate"],
    "nbmake": ["nbmake", "ipykernel"],
}
# In the place of pins: the first releases with wheels for a Python without the lock.
_WITHOUT_LOCK = {"safetensors": "0.9.0rc1"}
_TESTS_NEED = ["hypothesis", "pytest", "pytest-xdist"]


class NotInstalledError(Exception):
    """venv or pip could not install something, and has said why."""


def set_up(folder: Path, python: Python, torch: str, downloads: Path) -> list[str]:
    """Set up an environment, unless one is there and newer than what it is made from; return what was left out.

    Raises:
        NotInstalledError: the packages that are needed cannot be installed. venv or pip has said why.
    """
    ready = folder / ".left-out"
    asked = max((ROOT / name).stat().st_mtime for name in ("pyproject.toml", "constraints.txt"))
    if not (ready.exists() and ready.stat().st_mtime > asked):
        print(f"Setting up {folder.name}. The largest part is torch", flush=True)
        if subprocess.run([python.path, "-m", "venv", "--clear", str(folder)], check=False).returncode != 0:
            raise NotInstalledError  # Debian's Python without python3-venv, for example
        pins = folder / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        instead = _WITHOUT_LOCK if python.free_threaded else {}
        kept = [line for line in lines if line.partition("==")[0] not in {"torch", *instead}]
        kept += [f"{name}=={release}" for name, release in instead.items()]
        pins.write_text("\n".join(kept) + "\n", encoding="utf-8")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        (any_torch,) = (each for each in project["dependencies"] if each.startswith("torch"))
        others = [each for each in project["dependencies"] if each != any_torch]
        wanted = [any_torch if torch == NEWEST else f"torch=={torch}", *others]
        wanted += project["optional-dependencies"]["train"]
        _pip(folder, downloads, ["-c", str(pins), *wanted, *_TESTS_NEED])
        _pip(folder, downloads, ["--no-deps", "--editable", str(ROOT)])
        left_out = []
        for name, packages in _MAY_BE_MISSING.items():
            try:
                _pip(folder, downloads, ["--only-binary", ":all:", "-c", str(pins), *packages])
            except NotInstalledError:
                left_out.append(name)
        ready.write_text("\n".join(left_out), encoding="utf-8")
    return ready.read_text(encoding="utf-8").split()


def _pip(folder: Path, downloads: Path, arguments: Sequence[str]) -> None:
    """Install something. Pairs share what has been downloaded, until the end of the run."""
    command = [str(program(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*command, "--cache-dir", str(downloads), *arguments], check=False).returncode != 0:
        raise NotInstalledError


def program(folder: Path) -> Path:
    """Return the Python of an environment."""
    on_windows = folder / "Scripts" / "python.exe"
    return on_windows if on_windows.exists() else folder / "bin" / "python"
