"""unisono: one line, every device, same numbers.

model = unisono.DataParallel(model)
"""

import unisono.console.start  # noqa: F401  first: what follows imports torch
from unisono.data_parallel import DataParallel, data_parallel
from unisono.primitives.batch_types import register_batch_type
from unisono.primitives.dims import pad
from unisono.primitives.gather import gather
from unisono.primitives.parallel_apply import parallel_apply
from unisono.primitives.replicate import replicate
from unisono.primitives.sample_lists import SampleList
from unisono.primitives.scatter import scatter, scatter_kwargs
from unisono.profiling.profile import Profile
from unisono.runtime.devices import DeviceLike
from unisono.runtime.malloc import keep_freed_memory
from unisono.runtime.stuck_threads import ReplicaTimeout
from unisono.runtime.timeline import ReplicaTiming
from unisono.scripts.install import install
from unisono.verification.report import Report
from unisono.verification.verify import verify

__version__ = "0.1.0.dev0"

__all__ = [
    "DataParallel",
    "DeviceLike",
    "Profile",
    "ReplicaTimeout",
    "ReplicaTiming",
    "Report",
    "SampleList",
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
