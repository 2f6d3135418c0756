"""Open MPI's mpirun on this machine."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

from clusters import page, uneven_rows
from clusters.part import Check, Part
from clusters.site import CheckError, Site

# More processes than cores; and root, as in a container.
ALLOWED = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class _Checks:
    def __init__(self, site: Site) -> None:
        self.site = site
        site.write("train.py", page.training_script())

    def numbers(self) -> str:
        kept = self.site.new_folder("numbers")
        command = page.changed(page.block("mpi").strip(), {"-n 2": "-n 3"})
        self.site.expect("sh", "-c", command, env={"UNISONO_CLUSTERS_KEEP": str(kept), **ALLOWED})
        return uneven_rows.compared(kept, 3)

    def killed(self) -> str:
        """mpirun itself ends the other processes when one is killed."""
        kept = self.site.new_folder("killed")
        env = {"UNISONO_CLUSTERS_KEEP": str(kept), "UNISONO_CLUSTERS_KILL": "1", **ALLOWED}
        ended = self.site.run("sh", "-c", page.block("mpi").strip(), env=env, limit_s=100)
        if not ended.status or self.site.processes(OMPI_COMM_WORLD_SIZE="2"):
            raise CheckError(f"status {ended.status}, and processes are left")
        return f"mpirun has ended the others {uneven_rows.seconds_since_kill(kept)}, with status {ended.status}"


@contextlib.contextmanager
def _open(site: Site) -> Iterator[Sequence[Check]]:
    checks = _Checks(site)
    yield [
        Check("`mpirun -n 3 python train.py` with uneven rows, against one device", checks.numbers),
        Check("a process is killed", checks.killed),
    ]


def _version() -> str:
    return subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout.split()[3]


PART = Part("mpi", "Open MPI", _version, _open, programs={"mpirun": "openmpi-bin"})
