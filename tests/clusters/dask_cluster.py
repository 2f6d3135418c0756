"""Dask on this machine: two workers, which are processes."""

import contextlib
import importlib.metadata
from collections.abc import Iterator, Sequence

from clusters import page, uneven_rows
from clusters.part import Check, Part
from clusters.site import Site, free_port

_MAIN = "\n\nif __name__ == '__main__':\n    main()\n"


@contextlib.contextmanager
def _open(site: Site) -> Iterator[Sequence[Check]]:
    code = page.changed(page.block("other-launchers", "Dask"), {"29500": str(free_port())})
    site.write("train.py", page.with_training(code) + _MAIN)

    def numbers() -> str:
        kept = site.new_folder("numbers")
        site.expect("python", "train.py", env={"UNISONO_CLUSTERS_KEEP": str(kept)})
        return uneven_rows.compared(kept, 2)

    yield [Check("2 workers with uneven rows, against one device", numbers)]


PART = Part("dask", "Dask", lambda: importlib.metadata.version("distributed"), _open, packages=("distributed",))
