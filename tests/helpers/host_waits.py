"""What would make the host wait for an accelerator, noted on simulated devices; and copies between devices."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from unisono import testing

_aten = torch.ops.aten
# These return numbers to the host, or shapes that depend on numbers.
_READS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.unique_consecutive.default,
    _aten._unique2.default,
}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_COPIES = {_aten._to_copy.default: "to", _aten.copy_.default: "copy_"}


@dataclass
class Noted:
    """Attributes:
    waits: what the host would have waited for.
    copies: the (source, target) of each copy between accelerators.
    """

    waits: list[str] = field(default_factory=list)
    copies: list[tuple[torch.device, torch.device]] = field(default_factory=list)


@contextlib.contextmanager
def noted_on_simulated_devices() -> Iterator[Noted]:
    """Within the context, note in all threads what operations on simulated tensors would make the host wait."""
    noted = Noted()
    run = testing.SimulatedTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask_or_host = any(
            index is not None and (index.dtype is torch.bool or index.device.type == "cpu")
            for index in (args[1] if func in _INDEXED else ())
        )
        if func in _READS or by_mask_or_host:
            noted.waits.append(str(func))
        if func in _COPIES:
            target = args[0].device if func is _aten.copy_.default else (kwargs or {}).get("device", args[0].device)
            source = args[1].device if func is _aten.copy_.default else args[0].device
            target = torch.device("sim", target.index) if target.type == "lazy" else target
            if "cpu" in (source.type, target.type) and source.type != target.type:
                noted.waits.append(f"{_COPIES[func]}, {source} to {target}")
            elif source != target:
                noted.copies.append((source, target))
        return run(cls, func, types, args, kwargs)

    def noting(owner: Any, name: str) -> Any:
        call: Callable[..., Any] = getattr(owner, name)

        def noted_call(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            on_device = device is not None and torch.device(device).type == "sim"
            if on_device or isinstance(args[0], testing.SimulatedTensor):
                noted.waits.append(name)
            return call(*args, **kwargs)

        return mock.patch.object(owner, name, noted_call)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(testing.SimulatedTensor, "__torch_dispatch__", classmethod(dispatch)))
        for owner, name in (
            (testing.SimulatedTensor, "tolist"),
            (torch.Tensor, "new_tensor"),
            (torch, "tensor"),
            (torch, "as_tensor"),
        ):
            patches.enter_context(noting(owner, name))
        yield noted
