"""unisono: one line, every device, same numbers.

model = unisono.DataParallel(model)
"""

from typing import TYPE_CHECKING, Any

from unisono.data_parallel import DataParallel, data_parallel
from unisono.engines.threads import Threads
from unisono.primitives.batch_types import register_batch_type
from unisono.primitives.dims import pad
from unisono.primitives.parallel_apply import parallel_apply
from unisono.primitives.replicate import replicate
from unisono.primitives.sample_lists import SampleList
from unisono.primitives.scatter_gather import gather, scatter, scatter_kwargs
from unisono.runtime.errors import ReplicaDied, ReplicaTimeout
from unisono.runtime.malloc import keep_freed_memory
from unisono.scripts.install import install
from unisono.verification.verify import verify

if TYPE_CHECKING:
    from unisono.engines.processes.engine import Processes

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "Processes",
    "ReplicaDied",
    "ReplicaTimeout",
    "SampleList",
    "Threads",
    "data_parallel",
    "gather",
    "install",
    "keep_freed_memory",
    "pad",
    "parallel_apply",
    "register_batch_type",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "Processes":  # imported when it is asked for: it needs more than torch, and a system that forks
        from unisono.engines.processes.engine import Processes

        return Processes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
