"""scatter and gather: the rows of a batch to the replicas, and the replicas' outputs back into one.

The two are each other's inverse, and each other's adjoint: the gradient of a scatter is a gather. Both verbs are
differentiable. Their halves that know nothing of torch's graph, `deal` (what each replica gets) and `collect` (what
belongs together again), are what the engines use too, so a batch is cut in one way only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from manyhands import devices as _devices
from manyhands import nested
from manyhands.devices import DeviceLike
from manyhands.errors import warn_once
from manyhands.shares import split_rows


@dataclass(frozen=True)
class Rows:
    """Where the rows of a joined tensor come from: `sizes[i]` rows along `dim` are replica i's.

    A 0-dim output counts as one row of a vector (`scalar=True`), as in torch.
    """

    dim: int
    sizes: tuple[int, ...]
    scalar: bool = False

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return replica `index`'s rows of the joined tensor, as a view (a sparse tensor's as a copy)."""
        if self.scalar:
            return tensor[index]
        narrow = tensor.narrow_copy if tensor.is_sparse else tensor.narrow
        return narrow(self.dim, sum(self.sizes[:index]), self.sizes[index])

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the joined tensor, a new one; the parts must be on one device."""
        if self.scalar:
            return torch.stack(list(parts))
        return torch.cat(list(parts), self.dim)


def check_dim(dim: object) -> None:
    """Raise TypeError if `dim` cannot be the axis of the rows."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim={dim!r}: expected an int, the axis that holds the rows")


def check_kwargs(kwargs: object, argument: str) -> dict[str, Any]:
    """Return keyword inputs, {} for None; raise TypeError if they are no dict of names."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise TypeError(f"{argument}: expected a dict from names to inputs, got {kwargs!r}")
    return kwargs


def count_rows(inputs: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> int | None:
    """Return how many rows the tensors of a call have along `dim`; None where no tensor has rows (0-dim, or none).

    Raises:
        ValueError: tensors with different numbers of rows, or one without an axis `dim`; names each.
    """
    rows: dict[str, int] = {}
    for path, tensor in [*nested.tensors(inputs, "inputs"), *nested.tensors(kwargs, "kwargs")]:
        if tensor.dim() == 0:
            continue
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"cannot scatter {path} of shape {tuple(tensor.shape)} along dim={dim}: it has no such axis"
            )
        rows[path] = tensor.size(dim)
    if len(set(rows.values())) > 1:
        each = ", ".join(f"{path} has {count}" for path, count in rows.items())
        raise ValueError(
            f"cannot scatter tensors with different numbers of rows along dim={dim}: {each}. Give every tensor the "
            "rows of the batch (tensor.expand), or keep what belongs to no row out of the call: in a buffer of the "
            "module, or as a 0-dim tensor."
        )
    return next(iter(rows.values()), None)


def deal(value: Any, rows: Rows, index: int, device: torch.device) -> Any:
    """Return replica `index`'s part of nested inputs: each tensor's rows, as a copy on `device`; all else as it is.

    It is a copy even where the device is the same, so that a module that writes into its input writes into its own.
    A 0-dim tensor goes whole to every replica.
    """

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, copy=True) if tensor.dim() == 0 else rows.part(tensor, index).to(device, copy=True)

    return nested.map_tensors(part, value)


def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0) -> list[Any]:
    """Split the tensors in `inputs` along `dim` by torch's rule, ceil(rows / n) rows each; one result a device.

    Containers keep their types; objects that are not tensors are the same in every result. With fewer rows than
    devices there are fewer results: at least one, and as many as there are devices where no tensor has rows.

        >>> shards = manyhands.scatter({"x": torch.zeros(10, 5), "flag": True}, ["cpu", "cpu", "cpu", "cpu"])
        >>> [shard["x"].shape[0] for shard in shards]
        [3, 3, 3, 1]

    Args:
        inputs: a tensor, or tuples, lists, dicts and dataclasses of tensors, with `rows` along `dim`.
        target_gpus: the devices: accelerator indices, strings or `torch.device`s.
        dim: the axis that holds the rows, of every tensor that is not 0-dim.

    Returns:
        A list of values like `inputs`, shard i a copy on device i. Differentiable.

    Raises:
        ValueError: tensors with different numbers of rows, or without the axis.
    """
    return [args[0] for args, _ in _scatter_call((inputs,), {}, target_gpus, dim)]


def scatter_kwargs(
    inputs: Any, kwargs: dict[str, Any] | None, target_gpus: Sequence[DeviceLike], dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Scatter the positional and keyword inputs of one call; both results have one entry a shard.

        >>> inputs, kwargs = manyhands.scatter_kwargs((torch.zeros(4, 5),), {"scale": 2.0}, ["cpu", "cpu"])
        >>> [x.shape[0] for (x,) in inputs], kwargs
        ([2, 2], ({'scale': 2.0}, {'scale': 2.0}))

    Args, Raises: as `scatter`. `inputs` is the tuple of positional arguments; anything else counts as the only one.
    """
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    shards = _scatter_call(inputs, check_kwargs(kwargs, "kwargs"), target_gpus, dim)
    return tuple(args for args, _ in shards), tuple(kw for _, kw in shards)


def _scatter_call(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], target_gpus: Sequence[DeviceLike], dim: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    check_dim(dim)
    devices = _devices.resolve_each(target_gpus, "target_gpus")
    if not devices:
        raise ValueError("no devices to scatter to: expected at least one")
    return split_call(inputs, kwargs, devices, dim)


def split_call(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: Sequence[torch.device],
    dim: int,
    sizes: Sequence[int] | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return (positional, keyword) inputs for each device.

    `sizes` says how many rows each gets; left out, it is torch's rule, and devices that get no rows are left out.
    """
    count = count_rows(inputs, kwargs, dim)
    if count is None:  # nothing to split: the objects are the same everywhere
        whole = Rows(dim, ())
        return [(deal(inputs, whole, i, device), deal(kwargs, whole, i, device)) for i, device in enumerate(devices)]
    if sizes is None:
        sizes = [size for size in split_rows(count, len(devices)) if size] or [0]
    rows = Rows(dim, tuple(sizes))
    used = zip(range(len(sizes)), devices, strict=False)  # by torch's rule the last devices may get none
    return [(deal(inputs, rows, i, device), deal(kwargs, rows, i, device)) for i, device in used]


@dataclass(frozen=True)
class Group:
    """Tensors of the replicas' outputs that belong together, and how they are joined."""

    tensors: tuple[torch.Tensor, ...]
    rows: Rows


def collect(outputs: Sequence[Any], dim: int) -> tuple[list[Group], list[Any]]:
    """Match the replicas' outputs leaf by leaf; return the groups of tensors, and one value for every leaf.

    In the second result the place of group g holds `Placeholder(g)`; other leaves hold what the gathered output has
    there: the replicas' common value, or a list of numbers, one a replica.

    Raises:
        ValueError: outputs that do not fit together; TypeError: outputs of a type that cannot be gathered.
    """
    groups: list[Group] = []
    values: list[Any] = []
    for path, given in nested.leaves_together(outputs, "output"):
        if any(isinstance(value, torch.Tensor) for value in given):
            values.append(Placeholder(len(groups)))
            groups.append(_group(path, given, dim))
        else:
            values.append(_common_value(path, given))
    return groups, values


@dataclass(frozen=True)
class Placeholder:
    """Stands in a gathered output where the joined tensor of a group will be."""

    group: int


def put_together(output: Any, values: Sequence[Any], joined: Sequence[torch.Tensor]) -> Any:
    """Return a value of `output`'s structure with the leaves of `collect`, its groups replaced by `joined`."""
    leaf = iter(values)

    def fill(_: Any) -> Any:
        value = next(leaf)
        return joined[value.group] if isinstance(value, Placeholder) else value

    return nested.map_leaves(fill, output)


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Join the replicas' outputs along `dim`, in order, on `target_device`: the inverse of `scatter`.

        >>> manyhands.gather([{"y": torch.zeros(3, 2)}, {"y": torch.ones(1, 2)}], "cpu")["y"].shape
        torch.Size([4, 2])

    Args:
        outputs: one output a replica, all of one structure: tensors, None, numbers and strings in tuples, lists,
            dicts and dataclasses.
        target_device: where the joined tensors are; an accelerator's index, a string or a `torch.device`.
        dim: the axis along which tensors are joined. 0-dim tensors become a vector, one entry a replica.

    Returns:
        A value of the same structure. None stays None, equal strings stay one, numbers become a list with one entry a
        replica. Differentiable.

    Raises:
        ValueError: outputs of different structure, rank, dtype or size off the joined axis; names the path, and what
            each replica gave.
        TypeError: an output of a type that cannot be gathered.
    """
    check_dim(dim)
    if not isinstance(outputs, list | tuple):
        raise TypeError(f"outputs: expected a list with one output a replica, got {type(outputs).__name__}")
    if not outputs:
        raise ValueError("no outputs to gather: expected one a replica")
    if target_device is None:
        raise TypeError("target_device is None: expected an int, a string or a torch.device")
    device = _devices.resolve_output(target_device, ())
    groups, values = collect(outputs, dim)
    joined = [group.rows.join([_devices.copy_to(tensor, device) for tensor in group.tensors]) for group in groups]
    return put_together(outputs[0], values, joined)


def _group(path: str, given: tuple[Any, ...], dim: int) -> Group:
    if not all(isinstance(value, torch.Tensor) for value in given):
        raise nested.disagreement(path, "types", [type(value).__name__ for value in given])
    if len({tensor.dim() for tensor in given}) > 1:
        raise nested.disagreement(path, "numbers of axes", [tuple(tensor.shape) for tensor in given])
    if len({tensor.dtype for tensor in given}) > 1:
        raise nested.disagreement(path, "dtypes", [tensor.dtype for tensor in given])
    ndim = given[0].dim()
    if ndim == 0:
        warn_once(
            "gathering 0-dim outputs, such as a loss: they become a vector with one entry a replica. "
            "Take its mean or sum before backward()."
        )
        return Group(given, Rows(0, (1,) * len(given), scalar=True))
    if not -ndim <= dim < ndim:
        raise ValueError(f"cannot gather {path} of shape {tuple(given[0].shape)} along dim={dim}: it has no such axis")
    dim %= ndim
    if len({tensor.shape[:dim] + tensor.shape[dim + 1 :] for tensor in given}) > 1:
        raise nested.disagreement(path, f"sizes off the joined axis {dim}", [tuple(t.shape) for t in given])
    return Group(given, Rows(dim, tuple(tensor.size(dim) for tensor in given)))


def _common_value(path: str, given: tuple[Any, ...]) -> Any:
    """Return what stands in the gathered output for the replicas' values of a leaf that is no tensor."""
    first = given[0]
    if any(type(value) is not type(first) for value in given):
        raise nested.disagreement(path, "types", [type(value).__name__ for value in given])
    if isinstance(first, bool | int | float | complex):
        return list(given)
    if all(value is first for value in given):
        return first
    if isinstance(first, str | bytes | torch.Size | torch.dtype | torch.device):
        if any(value != first for value in given):
            raise nested.disagreement(path, "values", [repr(value) for value in given])
        return first
    raise TypeError(
        f"cannot gather {path}: the replicas returned objects of type {type(first).__name__}, which has no rows to "
        "join. Return tensors, numbers or strings, in tuples, lists, dicts or dataclasses."
    )
