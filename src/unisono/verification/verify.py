"""verify: the caller's own model on one device and on several, compared number by number.

In training mode and in eval mode it takes one step on one device and one on several, each of a copy of the model, and
compares outputs, loss, gradients, buffers, and the numbers in attributes (modes.py says in which types). If they
differ, it finds the first submodule that differs, and the cause.

Draws are switched off meanwhile (runtime/draws_off.py): dropout drops nothing, and what else torch draws has one fixed
value. A draw that this does not reach moves a random state. Then the mode is not compared.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils.data import DataLoader

from unisono.data_parallel import ARGUMENTS, DataParallel
from unisono.options import OF_OTHER_LIBRARIES, WrapperOptions
from unisono.primitives.checks import check_initialized, check_kwargs, check_module, check_names
from unisono.primitives.placements import check_have_data
from unisono.runtime import devices as _devices
from unisono.runtime.devices import DeviceIds, DeviceLike
from unisono.runtime.errors import shown
from unisono.verification.modes import compare_mode
from unisono.verification.report import MODES, Report
from unisono.verification.state import RandomState, copied
from unisono.verification.step import Example

_NO_ACCELERATOR = "this machine has no accelerator, so the replicas ran on the CPU"
_ONE_ACCELERATOR = (
    "the replicas ran on the CPU: batch norm over all replicas needs one accelerator for each, and there is only one"
)
_NO_SECOND_DEVICE = "the wrapper has no second device here, so the comparison has replicas on {devices}"


def verify(
    model: nn.Module,
    inputs: Any,
    target: Any = None,
    criterion: Callable[..., Any] | None = None,
    device_ids: DeviceIds | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    *,
    step: Callable[..., Any] | None = None,
    rtol: float | None = None,
    show: bool = True,
    **options: Unpack[WrapperOptions],
) -> Report:
    """Run a model on one device and on several, compare all results, and say why they differ, if they do.

        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        >>> report = unisono.verify(model, torch.randn(30, 5), device_ids=["cpu", "cpu"], show=False)
        >>> report.same, report.first_module, str(report.cause)
        (False, '1', 'batch norm per shard')
        >>> model[1] = torch.nn.LayerNorm(8)
        >>> unisono.verify(model, torch.randn(30, 5), device_ids=["cpu", "cpu"], show=False).same
        True

    Training mode is compared first, then eval mode. A model in training mode keeps the flags of its submodules, so a
    frozen batch norm stays frozen; one in eval mode is switched with `train()`. Each step runs on a copy of the model,
    and the random state is restored; your own hooks run, as in any step. Random draws are switched off meanwhile:
    dropout drops nothing. It needs about as much memory on the host as the activations need on the device.
    docs/same-numbers.md explains the tolerances.

    Args:
        model: a module that can be copied with copy.deepcopy, on any device; or a `DataParallel`, whose module, devices
            and options are used.
        inputs: a tuple of positional inputs, a dict of keyword inputs, or the only input. Take a batch that does not
            divide evenly, such as a last one.
        target: the second argument of `criterion`; None: the criterion gets the output only.
        criterion: `criterion(output, target)` returns the loss. None: a fixed random projection of all outputs
            serves as the loss, so that gradients are compared.
        device_ids: one device a replica, as in `DataParallel`. None: every accelerator, one alone counting twice; two
            replicas on the CPU where there is none, or one and `sync_batch_norm=True`.
        output_device, dim: as in `DataParallel`.
        step: `step(model, *inputs)` runs the model, as often as a step of yours does, and returns what is compared and
            what the loss is computed from. None: one forward. Give it where a step has two forwards before its
            backward, or one under `torch.no_grad()` between them.
        rtol: the largest allowed difference, relative to the scale of a value. None: as suits the floating types that
            the step computes in; see docs/same-numbers.md.
        show: print the report.
        options: the keyword options of `DataParallel`, such as `shares`.

    Returns:
        The report: `report.same`, `.differences`, `.first_module`, `.cause`; `str(report)` is the table. Differences
        are `.explained` if all of them come from an option that was given and causes them: `sync_batch_norm=False`,
        `scalars="stack"`. A value that rounding alone may change by a large part is in `.not_judged`, and the report is
        not `.same`. It is not `.compared`, and not `.same`, if the model draws random numbers that cannot be switched
        off, such as Python's.

    Raises:
        TypeError, ValueError: arguments that cannot be used.
        Exception: any error that the model raised, on one device or in a replica.
    """
    check_names(options, VERIFY_ARGUMENTS, "verify", OF_OTHERS)
    _check_batch(inputs, target, criterion, options.get("loss"))
    if step is not None and not callable(step):
        raise TypeError(f"step={shown(step)}: expected a function, called as step(model, *inputs), or None")
    wrapped = _wrap(model, device_ids, output_device, dim, options)
    if rtol is not None and not (isinstance(rtol, int | float) and 0 <= rtol < math.inf):
        raise (ValueError if isinstance(rtol, int | float) else TypeError)(
            f"rtol={shown(rtol)}: expected a finite number, 0 or more"
        )
    check_have_data("compare", inputs, "inputs")
    check_have_data("compare", target, "target")
    args, kwargs = _by_position_and_name(inputs)
    ids = _devices.resolve(device_ids)
    note = []
    if isinstance(model, DataParallel):
        note = [] if wrapped is model else [_no_second_device(wrapped)]
    elif _went_to_cpu(wrapped, ids):
        note = [_ONE_ACCELERATOR if ids else _NO_ACCELERATOR]
    example = replace(_example(wrapped, args, kwargs, target, criterion), step=step)
    report = replace(_compared(wrapped, example, MODES, options, rtol, note), is_printed=show)
    if show:
        print(report)
    return report


def verify_call(
    model: DataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any], mode: str, given: Mapping[str, Any]
) -> Report:
    """Compare a call of a wrapper in one mode; where it has fewer than two devices, as it would be with two replicas.

    Inputs are those of the library's forward: hooks of the wrapper, and a forward of a subclass, ran before.

    Args:
        mode: "training" or "eval".
        given: options that explain a difference if they cause it, as those of `verify` do.
    """
    wrapped = _wrap(model, None, None, 0, {})
    notes = [] if wrapped is model else [_no_second_device(wrapped)]
    library = next(cls for cls in type(wrapped).__mro__ if cls.__module__.startswith("unisono."))
    example = replace(_example(wrapped, inputs, kwargs), forward=vars(library)["forward"])
    return _compared(wrapped, example, [mode], given, None, notes)


def _by_position_and_name(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), check_kwargs(inputs, "inputs")
    return (inputs if type(inputs) is tuple else (inputs,)), {}  # a named tuple is one input


def _no_second_device(wrapped: DataParallel) -> str:
    return _NO_SECOND_DEVICE.format(devices=", ".join(map(str, wrapped.devices)))


def _went_to_cpu(wrapped: DataParallel, wanted: Sequence[torch.device]) -> bool:
    return _devices.is_cpu(wrapped.devices[0]) and not any(map(_devices.is_cpu, wanted))


def _example(
    wrapped: DataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, criterion: Any = None
) -> Example:
    gathered_on = _devices.resolve_output(wrapped.output_device, wrapped.devices)
    return Example(inputs, kwargs, target, criterion, wrapped.devices[0], gathered_on)


def _compared(
    wrapped: DataParallel,
    example: Example,
    modes: Sequence[str],
    given: Mapping[str, Any],
    rtol: float | None,
    notes: Sequence[str],
) -> Report:
    """Compare one device with several, in each mode."""
    random = RandomState()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            compared = [compare_mode(mode, wrapped, example, random, given, rtol) for mode in modes]
    finally:
        random.restore()
    rows = tuple(row for each in compared for row in each.rows)
    findings = tuple(finding for each in compared for finding in each.findings)
    said = tuple(dict.fromkeys([*notes, *(note for each in compared for note in each.notes)]))
    of_replicas = compared[-1].replica_rows
    return Report(_title(wrapped, of_replicas), rows, findings, said, len(of_replicas) or len(wrapped.devices))


_OWN = [name for name in inspect.signature(verify).parameters if name != "options"]
VERIFY_ARGUMENTS = [*dict.fromkeys([*_OWN, *ARGUMENTS[1:]])]  # all but the module: those of the wrapper, too
VERIFY_ARGUMENTS.remove("process_group")  # it compares within one process
OF_OTHERS = {
    **OF_OTHER_LIBRARIES,
    **dict.fromkeys(("loss_fn", "loss_function", "criteria", "loss_func"), "criterion"),
    **dict.fromkeys(("label", "labels", "y"), "target"),
    **dict.fromkeys(("atol", "tol", "tolerance"), "rtol"),
    "mode": "leave it out: training and eval mode are both compared",
}


def _check_batch(inputs: object, target: object, criterion: object, loss: object) -> None:
    """Raise TypeError or ValueError if the arguments are not those of one step, or in another order."""
    in_order = "write verify(model, inputs, target, criterion)"
    if isinstance(inputs, DataLoader):
        raise TypeError(
            "inputs: expected those of one batch, got a DataLoader; take one: inputs, target = next(iter(loader))"
        )
    if callable(loss):
        raise TypeError(f"loss={shown(loss)}: expected 'mean' or 'sum'; {in_order}")
    if target is not None and criterion is None:
        if callable(target):
            raise TypeError(f"target: expected the target of the batch, got {shown(target)}; {in_order}")
        raise ValueError("target without criterion: give a criterion(output, target) that returns the loss")
    is_class = isinstance(criterion, type) and issubclass(criterion, nn.Module)
    if criterion is not None and (is_class or not callable(criterion)):
        remedy = f"make one: {criterion.__name__}()" if is_class else in_order  # type: ignore[attr-defined]
        raise TypeError(f"criterion: expected a function of output and target, got {shown(criterion)}; {remedy}")


def _wrap(
    model: nn.Module,
    device_ids: DeviceIds | None,
    output_device: DeviceLike | None,
    dim: int,
    options: Mapping[str, Any],
) -> DataParallel:
    """Return the model itself if it is a wrapper with several replicas, else a wrapper of a copy, with its options."""
    check_module(model, "model")
    check_initialized(model, chain(model.parameters(), model.buffers()))
    if isinstance(model, DataParallel):
        if device_ids is not None or output_device is not None or dim != 0 or options:
            raise ValueError(
                "the model is already wrapped, and compared with its own options: leave out devices and options"
            )
        if model.spans_processes:
            raise ValueError(
                "this wrapper spans several processes, but verify compares within one. Write verify(model.module)"
            )
        while len(model.devices) < 2 and isinstance(model.module, DataParallel):
            model = model.module
        if len(model.devices) > 1:
            return model
        options = {name: getattr(model, name) for name in ("scalars", "in_dims", "out_dims", "sync_batch_norm")}
        device_ids = ["cpu", "cpu"] if model.devices and _devices.is_cpu(model.devices[0]) else None
        dim, model = model.dim, model.module
    devices = _devices.resolve(device_ids)
    module = copied(model)
    if device_ids is None and len(devices) == 1:
        devices = devices * 2
        if options.get("sync_batch_norm") and not _devices.computes_on_host(devices[0]):
            devices, module = [], module.to("cpu")
    if not devices:  # a script for GPUs on a machine without any; or batch norm would wait for ever on the only one
        devices = [torch.device("cpu")] * max(2, len(device_ids or ()))
    # With `in_dims` no input is warned of: what differs is found here.
    options = {"in_dims": dim, **options}
    return DataParallel(module, devices, output_device, dim, process_group=False, **options)


def _title(wrapped: DataParallel, replica_rows: Sequence[int]) -> str:
    devices = [str(device) for device in wrapped.devices]
    if len(replica_rows) == len(devices):
        pairs = zip(devices, replica_rows, strict=True)
        devices = [f"{device} {rows} row{'s' * (rows != 1)}" for device, rows in pairs]
    count = f"{len(devices)} replicas" if len(devices) > 1 else "one replica"
    return f"{type(wrapped.module).__name__} on {wrapped.devices[0]}, and on {count} ({', '.join(devices)})"
