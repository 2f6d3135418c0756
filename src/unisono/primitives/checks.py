"""What is refused: arguments of a wrong type, names that no argument has, and modules that cannot be replicated."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from unisono.runtime import devices as _devices
from unisono.runtime.errors import shown
from unisono.runtime.torch_private import process_groups

_NOT_WHOLE = (
    "DataParallel needs whole parameters in each process, as plain tensors, but {what}. The library that "
    "shards parameters also sums their gradients: use it alone, without DataParallel."
)
_UNINITIALIZED = {nn.UninitializedParameter, nn.UninitializedBuffer}
_NEAR = 0.8  # how like a name of the advice, which has many, must be: `find_unused_parameter`


def check_flag(value: object, argument: str) -> bool:
    """Return a flag; raise TypeError for anything but True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument}={shown(value)}: expected True or False")
    return value


def check_module(value: object, argument: str) -> None:
    """Raise TypeError for anything but a module."""
    if not isinstance(value, nn.Module):
        remedy = (
            f"; make one: {value.__name__}(...)" if isinstance(value, type) and issubclass(value, nn.Module) else ""
        )
        raise TypeError(f"{argument}: expected a torch.nn.Module, got {shown(value)}{remedy}")


def check_kwargs(kwargs: object, argument: str) -> dict[str, Any]:
    """Return keyword inputs, {} for None; raise TypeError if they are no dict of names."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise TypeError(f"{argument}: expected a dict from names to inputs, got {shown(kwargs)}")
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(f"{argument}: expected a dict from names to inputs, got the key {shown(name)}")
    return kwargs


def check_word(words: Sequence[str], value: object, argument: str) -> None:
    """Raise TypeError or ValueError for what is not one of `words`."""
    if not isinstance(value, str) or value not in words:
        wrong = ValueError if isinstance(value, str) else TypeError
        raise wrong(f"{argument}={shown(value)}: expected one of {list(words)}")


def check_names(given: Iterable[str], known: Collection[str], function: str, advice: Mapping[str, str]) -> None:
    """Raise TypeError if one of the given keyword arguments is none of `known`.

    >>> check_names(["share"], ["shares", "dim"], "DataParallel", {})
    Traceback (most recent call last):
    ...
    TypeError: DataParallel has no argument 'share'; did you mean shares?

    Args:
        function: whose arguments they are.
        advice: what to say of a name that other libraries have; the name of an argument of ours if that is meant.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{function} has no argument {name!r}; {_remedy(name, known, advice)}")


def _remedy(name: str, known: Collection[str], advice: Mapping[str, str]) -> str:
    meant = advice.get(name) or next(iter(get_close_matches(name, known, 1)), "")
    if meant in known:
        return f"did you mean {meant}?"
    if meant and not meant.isidentifier():  # a name alone is that of an argument that another function has
        return meant
    near = next(iter(get_close_matches(name, [key for key in advice if key != name], 1, _NEAR)), "")
    if near and not advice[near].isidentifier():
        return f"did you mean {near}? {advice[near]}"
    return f"it has {', '.join(known)}"


def check_can_be_replicated(root: nn.Module, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Check that those of `tensors` that are parameters or buffers of `root` are on `device`, and initialized.

    Raises:
        RuntimeError: one is not; names it, both devices and the remedy (the type is torch's).
        ValueError: one is not initialized.
        TypeError: one is sharded over processes.
    """
    tensors = list(tensors)
    check_initialized(root, tensors)
    _check_whole(root, tensors)
    for tensor in tensors:
        if tensor.device != device and not _devices.same_device(tensor.device, device):
            named = (*root.named_parameters(), *(() if tensor.is_meta else root.named_buffers()))
            name = next((name for name, other in named if other is tensor), None)
            if name is None:
                continue  # only an attribute refers to it: each replica gets a copy; or it is a buffer without data
            where = f"module must have its parameters and buffers on device {device} (device_ids[0]), but {name} is on"
            if tensor.is_meta:
                raise RuntimeError(
                    f"{where} the meta device, which stores no data. First allocate the module, "
                    f"model.to_empty(device={str(device)!r}), and load or initialise its parameters. A module that "
                    "is only a template for torch.func.functional_call belongs in a list: self.base = [base]."
                )
            raise RuntimeError(
                f"{where} {tensor.device}. First move the whole module there, model.to({str(device)!r}), or "
                "wrap only the part that runs on several devices."
            )


def _check_whole(root: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Raise TypeError if some parameters of `root` are sharded: no process has them as a whole then."""
    kinds = process_groups.sharded_tensor_types()
    sharded = next((path for path, module in root.named_modules() if process_groups.is_sharded(module)), None)
    if sharded is not None:
        raise TypeError(_NOT_WHOLE.format(what=f"FSDP manages {f'layer {sharded!r}' if sharded else 'the module'}"))
    part = next((tensor for tensor in tensors if isinstance(tensor, kinds)), None)
    if part is not None:
        named = (*root.named_parameters(), *root.named_buffers())
        name = next((name for name, tensor in named if tensor is part), "a tensor of it")
        raise TypeError(_NOT_WHOLE.format(what=f"{name} is a {type(part).__name__}"))


def check_initialized(root: nn.Module, tensors: Iterable[torch.Tensor | None]) -> None:
    """Check that all of `tensors`, parameters and buffers of `root`, have a shape; a lazy module's have none at first.

    Raises:
        ValueError: one has none; names the layer and the remedy (the type and the first words are torch's).
    """
    if _UNINITIALIZED.isdisjoint(map(type, tensors)):
        return
    uninitialized = (
        (path, module, name)
        for path, module in root.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if type(tensor) in _UNINITIALIZED
    )
    path, module, name = next(uninitialized, ("", root, "parameters"))  # none if an attribute's module has it
    where = f"layer {path!r} ({type(module).__name__})" if path else type(module).__name__
    raise ValueError(
        f"Attempted to use an uninitialized parameter: {where} does not know the shape of its {name!r} yet; "
        "its first input decides it. Before you wrap the module and make the optimizer, call the plain "
        "module once: `with torch.no_grad(): model(inputs[:1])`. In a wrapper the plain module is "
        "`model.module`."
    )
