"""`accelerate launch` on this machine."""

import contextlib
import importlib.metadata
from collections.abc import Iterator, Sequence

from clusters import page, uneven_rows
from clusters.part import Check, Part
from clusters.site import Site


@contextlib.contextmanager
def _open(site: Site) -> Iterator[Sequence[Check]]:
    site.write("train.py", page.training_script())

    def numbers() -> str:
        kept = site.new_folder("numbers")
        command = page.block("other-launchers", "Accelerate").strip()
        site.expect("sh", "-c", command, env={"UNISONO_CLUSTERS_KEEP": str(kept)})
        return uneven_rows.compared(kept, 2)

    yield [Check("2 processes with uneven rows, against one device", numbers)]


PART = Part(
    "accelerate",
    "accelerate launch",
    lambda: importlib.metadata.version("accelerate"),
    _open,
    packages=("accelerate",),
)
