"""verify: the caller's own model on one device and on several, compared number by number.

In training mode and in eval mode it takes one step on one device and one on several, from the same state, and compares
outputs, loss, gradients, buffers, and the numbers in attributes. If they differ, it finds the first submodule that
differs, and the cause. If the cause is uncertain, one more step on one device shows whether the step gives the same
twice, or how far rounding errors move the gradients. That makes at most three steps on one device and two on several,
each a forward with its backward. At the end, model and random state are as before.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from unisono.data_parallel import DataParallel
from unisono.engines.threads import Threads
from unisono.primitives.blueprint import check_initialized
from unisono.primitives.placements import check_have_data
from unisono.primitives.replicate import check_device
from unisono.runtime import devices as _devices
from unisono.runtime import torch_private
from unisono.runtime.devices import DeviceLike
from unisono.verification import compare
from unisono.verification.attributes import attribute_rows, filled
from unisono.verification.causes import LOST, Comparison, about_repetition, is_uncertain, made_certain
from unisono.verification.compare import Tolerance
from unisono.verification.report import MODES, Finding, Kind, Report, Row
from unisono.verification.state import Snapshot
from unisono.verification.step import Example, RecordedStep, take_step

_WORKERS_NOT_RECORDED = (
    'calls in other processes are not recorded: engine="threads" tells which submodule differs first, and why'
)
_NO_ACCELERATOR = "this machine has no accelerator: the replicas were on the CPU"


def verify(
    model: nn.Module,
    inputs: Any,
    target: Any = None,
    criterion: Callable[..., Any] | None = None,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    show: bool = True,
    **options: Any,
) -> Report:
    """Run a model on one device and on several, compare all results, and say why they differ, if they do.

        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        >>> report = unisono.verify(model, torch.randn(30, 5), device_ids=["cpu", "cpu"], show=False)
        >>> report.same, report.first_module, str(report.cause)
        (False, '1', 'batch norm per shard')
        >>> model[1] = torch.nn.LayerNorm(8)
        >>> unisono.verify(model, torch.randn(30, 5), device_ids=["cpu", "cpu"], show=False).same
        True

    Both modes are run: training mode with the flags that the submodules have (a frozen batch norm stays frozen) if the
    model is in training mode, else after `train()`; then eval mode. Afterwards parameters, buffers, gradients, flags,
    hooks, attributes and random state are what they were; hooks of your own have run, as in any step. The tolerances
    are explained in unisono/verification/compare.py; the memory that it takes, in call_recorder.py beside it.

    Args:
        model: a module, on the first of the devices; or a `DataParallel`, whose module, devices and options are used.
        inputs: a tuple of positional inputs, a dict of keyword inputs, or the only input. Take a batch that does not
            divide evenly, such as a last one.
        target: the second argument of `criterion`; None: the criterion gets the output only.
        criterion: `criterion(output, target)` returns the loss. None: a fixed random projection of all outputs
            serves as the loss, so that gradients are compared.
        device_ids: one device a replica, as in `DataParallel`. None: every accelerator, one alone counting twice; two
            replicas on the CPU where there is none.
        output_device, dim: as in `DataParallel`.
        rtol, atol: the largest allowed difference, relative to the largest value, and absolute. None: as suits the
            floating types that the model computes in.
        show: print the report.
        options: the keyword options of `DataParallel`, such as `shares`.

    Returns:
        The report: `report.same`, `.differences`, `.first_module`, `.cause`; `str(report)` is the table. Differences
        are `.explained` if all of them come from random numbers, which each replica draws from its own stream, or from
        an option that was given and causes them: `sync_batch_norm=False`, `scalars="stack"`.

    Raises:
        TypeError, ValueError: arguments that cannot be used. RuntimeError: a model that is not on the first device.
        Exception: any error that the model raised, on one device or in a replica.
    """
    wrapped = _wrap(model, device_ids, output_device, dim, options)
    module: nn.Module = wrapped.module
    if target is not None and criterion is None:
        raise ValueError("target without criterion: give a criterion(output, target) that returns the loss")
    if criterion is not None and not callable(criterion):
        raise TypeError(f"criterion: expected a function of output and target, got {criterion!r}")
    for name, given in (("rtol", rtol), ("atol", atol)):
        if given is not None and not 0 <= given < math.inf:
            raise ValueError(f"{name}={given}: expected a finite number, 0 or more")
    check_have_data("compare", inputs, "inputs")
    check_have_data("compare", target, "target")
    example = Example(inputs, target, criterion)
    devices = wrapped.devices
    gathered_on = _devices.resolve_output(wrapped.output_device, devices)
    rows: list[Row] = []
    findings: list[Finding] = []
    notes = [_NO_ACCELERATOR] if wrapped is not model and not _devices.resolve(device_ids) else []
    spare = _SpareStep(module)

    with torch.inference_mode(False), torch.enable_grad():
        state = Snapshot(wrapped, criterion)
        with torch_private.without_post_accumulate_hooks(state.tensors):
            try:
                for mode in MODES:
                    step = functools.partial(take_step, module, example, state, mode, devices[0], gathered_on)
                    one = step(module)
                    many = step(wrapped, like=one)
                    tolerance = Tolerance.of(_dtypes(module, one), devices[0], rtol, atol)
                    found = _rows(mode, one, many, tolerance)
                    notes += _notes(mode, one, many)
                    if rtol is None and atol is None and _only_gradients_differ(found):
                        found = spare.allow_jumps(found, step, one, tolerance)
                    compared = Comparison(mode, wrapped, options, one, many, found, tolerance)
                    rows += compared.rows
                    if compared.differs() and not isinstance(wrapped._engine, Threads):
                        notes.append(_WORKERS_NOT_RECORDED)
                    if compared.differs():
                        findings += spare.make_certain(compared.find(), step, one, tolerance)
            finally:
                state.restore(gradients=True)
    report = Report(
        _title(wrapped, many),
        tuple(rows),
        tuple(findings),
        tuple(dict.fromkeys([*notes, *spare.notes])),
        len(many.rows) or len(devices),
    )
    if show:
        print(report)
    return report


class _SpareStep:
    """The third step on one device: taken at most once, where it shows most; both modes use its result.

    Attributes:
        notes: about it, for the report.
    """

    def __init__(self, module: nn.Module) -> None:
        self.notes: list[str] = []
        self._module = module
        self._taken = False
        self._sensitivity = 0.0
        self._nondeterminism = ""

    def allow_jumps(
        self, rows: list[Row], step: Callable[..., RecordedStep], one: RecordedStep, tolerance: Tolerance
    ) -> list[Row]:
        """Return the rows; gradients may differ as far as they move when everything is changed a little."""
        if not self._taken:
            self._taken = True
            nudged = step(self._module, nudge=tolerance.rtol)
            self._sensitivity = compare.sensitivity(one.gradients, nudged.gradients)
        allowed = compare.allowing(rows, self._sensitivity)
        if allowed != rows:
            self.notes.append(
                f"parameters and inputs that change by {tolerance.rtol:.0e} of themselves move gradients by "
                f"{self._sensitivity:.0e} of the largest, as activations at the kink of a ReLU do: gradients cannot be "
                "compared more exactly than that (in float64 they can)"
            )
        return allowed

    def make_certain(
        self, findings: list[Finding], step: Callable[..., RecordedStep], one: RecordedStep, tolerance: Tolerance
    ) -> list[Finding]:
        """Return the findings after checking, if they are uncertain, whether the step gives the same when repeated."""
        if is_uncertain(findings) and not self._taken:
            self._taken = True
            again = step(self._module)
            if any(row.differs for row in _rows("", one, again, tolerance)):
                self._nondeterminism = about_repetition(one, again, tolerance)
        return made_certain(findings, self._nondeterminism) if self._nondeterminism else findings


def _wrap(
    model: nn.Module,
    device_ids: Sequence[DeviceLike] | None,
    output_device: DeviceLike | None,
    dim: int,
    options: dict[str, Any],
) -> DataParallel:
    """Return the model itself if it is a wrapper, else a new wrapper of it.

    Raises:
        TypeError, ValueError, RuntimeError: it cannot be wrapped like this.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {model!r}")
    check_initialized(model, chain(model.parameters(), model.buffers()))
    if isinstance(model, DataParallel):
        if device_ids is not None or output_device is not None or dim != 0 or options:
            raise ValueError("the model is wrapped already, and compared as it is: leave out devices and options")
        if not model.devices:
            raise ValueError(
                'the wrapper runs the plain module here: verify(model.module, ..., device_ids=["cpu"] * 2)'
            )
        if model.spans_processes:
            raise ValueError(
                "the wrapper spans several processes, and verify compares within one: verify(model.module)"
            )
        return model
    devices = _devices.resolve(device_ids)
    if device_ids is None and len(devices) == 1:
        devices = devices * 2
    if not devices:  # a script for GPUs on a machine without any
        devices = [torch.device("cpu")] * max(2, len(device_ids or ()))
    check_device(model, chain(model.parameters(), model.buffers()), devices[0])
    return DataParallel(model, devices, output_device, dim, process_group=False, **options)


def _dtypes(module: nn.Module, one: RecordedStep) -> Iterator[torch.dtype]:
    """Yield the types that a step computed in."""
    yield from one.recorder.dtypes()
    yield from (tensor.dtype for _, tensor in compare.tensors_in(one.output))
    yield from (parameter.dtype for parameter in module.parameters())


def _rows(mode: str, one: RecordedStep, many: RecordedStep, tolerance: Tolerance) -> list[Row]:
    """Return every comparison of two steps."""
    rows: list[Row] = []
    if many.error is not None:
        note = str(many.error).split(". ")[0]
        rows.append(Row(mode, Kind.OUTPUT, "", None, difference=math.inf, note=note))
    else:
        rows += compare.output_rows(mode, one.output, many.output, tolerance)
    if one.loss is not None and many.loss is not None:
        largest = max((compare.largest(tensor) for _, tensor in compare.tensors_in(one.output)), default=0.0)
        rows.append(compare.loss_row(mode, one.loss, many.loss, largest, tolerance))
        nothing: dict[str, torch.Tensor | None] = dict.fromkeys(one.gradients or many.gradients)
        rows += compare.gradient_rows(mode, one.gradients or nothing, many.gradients or nothing, tolerance)
    rows += compare.buffer_rows(mode, one.buffers, many.buffers, tolerance)
    rows += attribute_rows(mode, one.attributes_before, one.attributes, many.attributes, tolerance)
    return rows


def _only_gradients_differ(rows: Sequence[Row]) -> bool:
    """Return whether gradients differ where outputs and loss do not."""
    kinds = {row.kind for row in rows if row.differs}
    return Kind.GRADIENT in kinds and not kinds & {Kind.OUTPUT, Kind.LOSS}


def _notes(mode: str, one: RecordedStep, many: RecordedStep) -> Iterator[str]:
    if one.loss is None:
        yield "no output is floating: there is no loss, and no gradients to compare"
    elif many.loss is None:
        yield f"{mode}: loss and gradients are not compared, because the outputs have other shapes"
    elif one.no_gradients:
        yield f"{mode}: gradients are not compared, because the backward fails on one device: {one.no_gradients}"
    elif not one.gradients:
        yield f"{mode}: there are no gradients to compare: the loss needs none"
    if names := filled(one.attributes_before, one.attributes, many.attributes):
        yield f"forward fills {', '.join(names)}: {LOST}. If they are read after forward, return them as outputs"
    if len(many.rows) == 1:
        yield "only one replica had rows: give a batch with more rows"


def _title(wrapped: DataParallel, many: RecordedStep) -> str:
    devices = [str(device) for device in wrapped.devices]
    if len(many.rows) == len(devices):
        devices = [f"{device} {rows} rows" for device, rows in zip(devices, many.rows, strict=True)]
    count = f"{len(devices)} replicas" if len(devices) > 1 else "one replica"
    return f"{type(wrapped.module).__name__} on {wrapped.devices[0]}, and on {count} ({', '.join(devices)})"
