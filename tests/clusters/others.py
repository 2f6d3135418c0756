"""The launchers of docs/other-launchers.md on this machine, each with two processes: accelerate, Dask, Monarch."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from clusters import page, uneven_rows
from clusters.part import Check, Part
from clusters.site import CheckError, Site, free_port

_MAIN = "\n\nif __name__ == '__main__':\n    main()\n"


def _numbers(site: Site, *command: str) -> str:
    kept = site.new_folder("numbers")
    site.expect(*command, env={"UNISONO_CLUSTERS_KEEP": str(kept)})
    return uneven_rows.compared(kept, 2)


def _killed(site: Site) -> str:
    kept = site.new_folder("killed")
    env = {"UNISONO_CLUSTERS_KEEP": str(kept), "UNISONO_CLUSTERS_KILL": "1"}
    ended = site.run("python", "train.py", env=env, limit_s=100)
    if not ended.status:
        raise CheckError("status 0, expected an error")
    return f"the call raises: all have ended {uneven_rows.seconds_since_kill(kept)}, with status {ended.status}"


def _accelerate(site: Site) -> Sequence[Check]:
    site.write("train.py", page.training_script())
    command = page.block("other-launchers", "Accelerate").strip()
    return [Check("2 processes with uneven rows, against one device", partial(_numbers, site, "sh", "-c", command))]


def _dask(site: Site) -> Sequence[Check]:
    code = page.changed(page.block("other-launchers", "Dask"), {"29500": str(free_port())})
    site.write("train.py", page.with_training(code) + _MAIN)
    return [Check("2 workers with uneven rows, against one device", partial(_numbers, site, "python", "train.py"))]


def _monarch(site: Site) -> Sequence[Check]:
    """Check a mesh of processes of one host."""
    site.write("train.py", page.with_training(page.block("other-launchers", "Monarch")))
    return [
        Check("2 processes with uneven rows, against one device", partial(_numbers, site, "python", "train.py")),
        Check("a process is killed", partial(_killed, site)),
    ]


def _part(name: str, title: str, package: str, checks: Callable[[Site], Sequence[Check]]) -> Part:
    @contextlib.contextmanager
    def opened(site: Site) -> Iterator[Sequence[Check]]:
        yield checks(site)

    return Part(name, title, partial(importlib.metadata.version, package), opened, packages=(package,))


PARTS = (
    _part("monarch", "Monarch", "torchmonarch", _monarch),
    _part("accelerate", "accelerate launch", "accelerate", _accelerate),
    _part("dask", "Dask", "distributed", _dask),
)
