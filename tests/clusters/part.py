"""What a launcher is to this package: what it needs, and the checks that are run with it."""

import importlib.metadata
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from clusters.site import SYSTEM_PATH, Site


@dataclass(frozen=True)
class Check:
    """One row of the table: `run` returns in a few words what was found, and raises if it should be something else."""

    what: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Part:
    """A launcher.

    Attributes:
        name: for `--only`.
        title: in the table.
        version: returns the launcher's version, once it is there.
        open: begins what the checks need (daemons), returns them, and ends it.
        programs: of the system, by the Debian package that has each.
        packages: of Python's package index.
        obstacle: returns why it cannot run on this machine though everything is installed; None if it can.
    """

    name: str
    title: str
    version: Callable[[], str]
    open: Callable[[Site], AbstractContextManager[Sequence[Check]]]
    programs: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    obstacle: Callable[[], str | None] = lambda: None

    def missing_debian_packages(self) -> list[str]:
        """Return the Debian packages whose programs are not there."""
        return sorted(
            {package for program, package in self.programs.items() if not shutil.which(program, path=SYSTEM_PATH)}
        )

    def why_not(self) -> str | None:
        """Return why it cannot run here; None if it can."""
        if missing := self.missing_debian_packages():
            return f"not installed: apt-get install --no-install-recommends {' '.join(missing)}"
        if missing := [package for package in self.packages if not _has(package)]:
            return f"not installed: pip install {' '.join(missing)}"
        return self.obstacle()


def _has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
