"""scatter and gather: split the rows of a batch among replicas, and join the replicas' outputs into one.

The two are each other's inverse, and each other's adjoint: the gradient of a scatter is a gather. Both are
differentiable. `DataParallel` splits and joins by the same code, in inputs.py and outputs.py.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from unisono.primitives.checks import check_kwargs
from unisono.primitives.dims import OutputRules, check_dim
from unisono.primitives.inputs import Arguments, scattered
from unisono.primitives.outputs import gathered
from unisono.primitives.split_sizes import split_rows
from unisono.runtime import devices as _devices
from unisono.runtime.devices import DeviceIds, DeviceLike
from unisono.runtime.model_warnings import of_process

T = TypeVar("T")


def scatter(inputs: T, target_gpus: DeviceIds, dim: int = 0) -> list[T]:
    """Split the tensors in `inputs` along `dim` by torch's rule, ceil(rows / n) rows each; one result a device.

    Containers keep their types; objects that are not tensors are the same in every result. With fewer rows than
    devices there are fewer results: at least one, and as many as there are devices where no tensor has rows.

        >>> shards = unisono.scatter({"x": torch.zeros(10, 5), "flag": True}, ["cpu", "cpu", "cpu", "cpu"])
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
    inputs: Any, kwargs: dict[str, Any] | None, target_gpus: DeviceIds, dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Scatter the positional and keyword inputs of one call; both results have one entry a shard.

        >>> inputs, kwargs = unisono.scatter_kwargs((torch.zeros(4, 5),), {"scale": 2.0}, ["cpu", "cpu"])
        >>> [x.shape[0] for (x,) in inputs], kwargs
        ([2, 2], ({'scale': 2.0}, {'scale': 2.0}))

    Args, Raises: as `scatter`. `inputs` is the tuple of positional arguments; anything else is the only one.
    """
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    shards = _scatter_call(inputs, check_kwargs(kwargs, "kwargs"), target_gpus, dim)
    return tuple(args for args, _ in shards), tuple(kw for _, kw in shards)


def _scatter_call(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], target_gpus: DeviceIds, dim: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    check_dim(dim)
    devices = _devices.resolve_each(target_gpus, "target_gpus")
    if not devices:
        raise ValueError("no devices to scatter to: expected at least one")
    arguments = Arguments(inputs, kwargs, dim).find_rows(dim)
    if arguments.rows is None:  # nothing to split: every device gets the same
        return scattered(arguments, devices, [0] * len(devices), of_process)
    sizes = [size for size in split_rows(arguments.rows, len(devices)) if size] or [0]
    return scattered(
        arguments, devices[: len(sizes)], sizes, of_process
    )  # by torch's rule the last devices may get no rows


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Join the replicas' outputs along `dim`, in order, on `target_device`: the inverse of `scatter`.

        >>> unisono.gather([{"y": torch.zeros(3, 2)}, {"y": torch.ones(1, 2)}], "cpu")["y"].shape
        torch.Size([4, 2])

    Args:
        outputs: one output a replica, all of one structure: tensors, None, numbers and strings in tuples, lists,
            dicts and dataclasses, and in objects that their class makes again from what iterating over them yields.
        target_device: where the joined tensors are; an accelerator's index, a string or a `torch.device`.
        dim: the axis along which tensors are joined. 0-dim tensors become a vector, one entry a replica.

    Returns:
        A value of the same structure. None stays None, equal strings stay one, numbers become a list with one entry a
        replica. Differentiable.

    Raises:
        ValueError: outputs of different structure, rank, dtype or size (but along `dim`); names the path, and what
            each replica gave.
        TypeError: an output of a type that cannot be gathered.
    """
    check_dim(dim)
    if not isinstance(outputs, list | tuple):
        raise TypeError(f"outputs: expected a list with one output for each replica, got {type(outputs).__name__}")
    if not outputs:
        raise ValueError("no outputs to gather: expected one for each replica")
    if target_device is None:
        raise TypeError("target_device is None: expected an int, a string or a torch.device")
    device = _devices.resolve_output(target_device, (), "target_device")
    return gathered(outputs, device, OutputRules(dim, warnings=of_process))
