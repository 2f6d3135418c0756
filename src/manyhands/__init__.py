"""manyhands: one line, every device, same numbers.

model = manyhands.DataParallel(model)
"""

from manyhands.data_parallel import DataParallel, data_parallel
from manyhands.primitives.batch_types import register_batch_type
from manyhands.primitives.dims import pad
from manyhands.primitives.parallel_apply import parallel_apply
from manyhands.primitives.replicate import replicate
from manyhands.primitives.scatter_gather import gather, scatter, scatter_kwargs
from manyhands.runtime.errors import ReplicaDied, ReplicaTimeout
from manyhands.runtime.malloc import keep_freed_memory
from manyhands.scripts.install import install
from manyhands.verification.verify import verify

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "ReplicaDied",
    "ReplicaTimeout",
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
