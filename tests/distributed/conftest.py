"""An environment without the variables of any launcher."""

import os
from collections.abc import Callable, Mapping

import pytest

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_STARTS = ("SLURM_", "OMPI_", "PMI", "MPI_", "MV2_", "FLUX_", "JSM_")


@pytest.fixture
def environment_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set launchers' variables to those given, and no others; at first to none."""

    def set_to(*variables: Mapping[str, str], **more: str) -> None:
        for name in [name for name in os.environ if name.startswith(_STARTS) or name in _TORCHRUN]:
            monkeypatch.delenv(name)
        for given in (*variables, more):
            for name, value in given.items():
                monkeypatch.setenv(name, value)

    set_to()
    return set_to
