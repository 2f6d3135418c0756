"""The weights of a run and how SGD updates them: in float32, also where the model computes with weights in bfloat16.

A step changes a weight by less than the 8 bits of bfloat16 show, so weights that had only these would stop learning.
So each weight that the model has in bfloat16 has a master in float32. SGD updates the master, and the model's weight is
the master rounded, always. Source: P. Micikevicius et al., "Mixed precision training", 2017, section 3.1.

All memory that an update changes exists from the start and stays where it is, as CUDA graphs need it (computation.py).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.sgd import sgd

from unisono.runtime import devices, torch_private


class Weights:
    """The weights of a module, and SGD with momentum.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> weights = Weights(module, momentum=0.9, in_bfloat16=True)
        >>> [parameter.dtype for parameter in module.parameters()]
        [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
        >>> module(torch.ones(3, 2, dtype=torch.bfloat16)).sum().backward()
        >>> weights.step(0.1)
        >>> {weight.dtype for weight in weights.masters}
        {torch.float32}

    Args:
        module: float32; its parameters are changed in place.
        momentum, weight_decay: as of `torch.optim.SGD`.
        in_bfloat16: whether the module is to have its parameters in bfloat16, but for those of batch norms.

    `masters` has one for each parameter, in order: a float32 copy, or the parameter itself where the module has it in
    float32. `momenta` has one for each master; none without momentum.
    """

    def __init__(
        self, module: nn.Module, *, momentum: float = 0.0, weight_decay: float = 0.0, in_bfloat16: bool = False
    ) -> None:
        self._module = module
        self._momentum, self._weight_decay = momentum, weight_decay
        norms = {id(p) for m in module.modules() if isinstance(m, _BatchNorm) for p in m.parameters(recurse=False)}
        self._master_by_name: dict[str, Tensor] = {}  # of the parameters that are rounded
        self._rounded: list[Tensor] = []
        for name, parameter in module.named_parameters():
            if in_bfloat16 and id(parameter) not in norms:
                self._master_by_name[name] = parameter.detach().clone()
                self._rounded.append(parameter)
                parameter.data = parameter.data.to(torch.bfloat16)
        self._parameters: list[Tensor] = list(module.parameters())
        self.masters = [self._master_by_name.get(name, own) for name, own in module.named_parameters()]
        # From zeros, the first step gives the momenta that torch.optim.SGD begins with.
        self.momenta = [torch.zeros_like(master) for master in self.masters] if momentum else []
        self._fused = all(devices.has_fused_optimizers(master.device) for master in self.masters)

    @torch.no_grad()
    def step(self, rate: float | Tensor) -> None:
        """Update masters and parameters by the gradients of the parameters, each of which has one.

        In a compiled function the learning rate is a tensor, because each number would be compiled anew.
        """
        compiling = torch.compiler.is_compiling()
        sgd(
            self.masters,
            [parameter.grad.float() for parameter in self._parameters],  # type: ignore[union-attr]
            [*self.momenta] or [None] * len(self.masters),
            foreach=compiling,  # which the compiler fuses
            fused=self._fused and not compiling,
            lr=rate,  # type: ignore[arg-type]  # torch takes tensors, too
            momentum=self._momentum,
            weight_decay=self._weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        torch_private.copy_all_in_place(self._rounded, [*self._master_by_name.values()])

    def static(self) -> list[Tensor]:
        """Return the tensors that keep their addresses: masters, momenta, and the module's parameters and buffers."""
        return [*self.masters, *self.momenta, *self._parameters, *self._module.buffers()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's state dict with the masters in the place of the parameters that are rounded from them."""
        return {**self._module.state_dict(), **self._master_by_name}

    def load(self, state: Mapping[str, Tensor], momenta: Sequence[Tensor]) -> None:
        """Load what `state_dict` and `momenta` were, also of a module with weights in another precision or layout."""
        self._module.load_state_dict(state)
        with torch.no_grad():
            for name, master in self._master_by_name.items():
                master.copy_(state[name])
            for own, saved in zip(self.momenta, momenta, strict=True):
                own.copy_(saved)
