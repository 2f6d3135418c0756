"""What a model keeps from one step to the next.

Assumes that the module does not change while a forward runs. Calls from several threads may overlap; each has replicas
of its own.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from unisono.autograd.graph_search import GraphSearch
from unisono.engines.compiled_modules import CompileLock
from unisono.engines.replica import ReplicaPool
from unisono.leftovers.first_steps import FirstSteps
from unisono.primitives.blueprint import Blueprint
from unisono.primitives.checks import check_can_be_replicated
from unisono.runtime import timeline
from unisono.runtime.model_warnings import ModelWarnings
from unisono.runtime.thread_pool import inside_replica
from unisono.runtime.timeline import ReplicaTiming


class StepMemory:
    """What one wrapper's steps remember. A copied or unpickled wrapper begins with nothing.

    Attributes:
        row_limits: how many rows fit in each replica's memory, by its number, as far as rescues have shown.
        written: the numbers of the parameters that forwards write (see `LookAtParameters`).
        search: finds tensors in replica graphs that are not the replicas' own.
        first_steps: looks for what is looked for in the first steps of a structure.
        compile_lock: the model's.
        frozen: the live parameters that the last forward has left frozen.
        timings: what each replica did in the last step; an empty list before the first.
    """

    def __init__(self) -> None:
        self.row_limits: dict[int, int] = {}
        self.written: set[int] = set()
        self.search = GraphSearch()
        self.first_steps = FirstSteps()
        self.compile_lock = CompileLock()
        self.frozen: list[torch.Tensor] = []
        self._pool: ReplicaPool | None = None
        self.timings: list[ReplicaTiming] = []

    def thaw(self) -> list[torch.Tensor]:
        """Switch on the gradients of parameters that the last forward has left frozen: the replicas' may be trained.

        Return them: those of replicas begin frozen, and they themselves are to be frozen again if the forward fails.
        """
        if not torch.is_grad_enabled() or inside_replica():
            return []
        frozen = [parameter for parameter in self.frozen if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        return frozen

    def pool_for(self, module: nn.Module, source: torch.device) -> ReplicaPool:
        """Return the replicas of `module` as it is now: those of the last forward, if nothing has changed.

        Raises:
            RuntimeError: parameters or buffers that are not on `source`.
        """
        if timeline.recording:
            timeline.mark(timeline.REPLICATE)
        pool, writes = self._pool, bool(self.written)
        if pool is None or not pool.is_current(module, source, writes=writes):
            blueprint = Blueprint(module)
            tensors = [*blueprint.without_data, *blueprint.parameters.values(), *blueprint.buffers.values()]
            check_can_be_replicated(module, tensors, source)
            blueprint.keep()
            has_wrappers = any(isinstance(part.__dict__.get("_step_memory"), StepMemory) for part in blueprint.modules)
            leftovers = self.first_steps.leftovers
            pool = ReplicaPool(blueprint, source, leftovers, writes=writes, has_wrappers=has_wrappers)
            if not inside_replica():  # there, each replica of an outer module has this object
                self._pool = pool if blueprint.is_reusable else None
        if timeline.recording:
            timeline.mark(timeline.SCATTER)
        return pool

    @property
    def warnings(self) -> ModelWarnings:
        """What the model has been warned of."""
        return self.first_steps.warnings

    def refresh(self) -> None:
        """Forget what is known about the module; the next forward looks at all of it again."""
        self.search.clear()
        self._pool = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def freeze(parameters: Iterable[torch.Tensor]) -> None:
    """Switch the gradients of parameters off."""
    for parameter in parameters:
        parameter.requires_grad_(False)
