"""Monarch on this machine: a mesh of processes of one host."""

import contextlib
import importlib.metadata
from collections.abc import Iterator, Sequence

from clusters import page, uneven_rows
from clusters.part import Check, Part
from clusters.site import CheckError, Site


class _Checks:
    def __init__(self, site: Site) -> None:
        self.site = site
        site.write("train.py", page.with_training(page.block("other-launchers", "Monarch")))

    def numbers(self) -> str:
        kept = self.site.new_folder("numbers")
        self.site.expect("python", "train.py", env={"UNISONO_CLUSTERS_KEEP": str(kept)})
        return uneven_rows.compared(kept, 2)

    def killed(self) -> str:
        kept = self.site.new_folder("killed")
        env = {"UNISONO_CLUSTERS_KEEP": str(kept), "UNISONO_CLUSTERS_KILL": "1"}
        ended = self.site.run("python", "train.py", env=env, limit_s=100)
        if not ended.status:
            raise CheckError("status 0, expected an error")
        return f"the call raises: all have ended {uneven_rows.seconds_since_kill(kept)}, with status {ended.status}"


@contextlib.contextmanager
def _open(site: Site) -> Iterator[Sequence[Check]]:
    checks = _Checks(site)
    yield [
        Check("2 processes with uneven rows, against one device", checks.numbers),
        Check("a process is killed", checks.killed),
    ]


PART = Part("monarch", "Monarch", lambda: importlib.metadata.version("torchmonarch"), _open, packages=("torchmonarch",))
