"""verify: the caller's own model on one device and on several, compared number by number.

In training mode and in eval mode it takes one step on one device and one on several, each of a copy of the model, and
compares outputs, loss, gradients, buffers, and the numbers in attributes. If they differ, it finds the first submodule
that differs, and the cause. Where more can be known from it, the step on one device is taken once more: to see how far
rounding errors move gradients, or whether the step gives the same twice.

Draws are switched off meanwhile (runtime/draws_off.py): dropout drops nothing, and what else torch draws has one fixed
value. A draw that this does not reach moves a random state. Then the mode is not compared.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from unisono.data_parallel import ARGUMENTS, DataParallel
from unisono.options import OF_OTHER_LIBRARIES
from unisono.primitives.blueprint import check_initialized
from unisono.primitives.checks import check_kwargs, check_module, check_names
from unisono.primitives.inputs import Arguments
from unisono.primitives.leftovers import Kind as Left
from unisono.primitives.leftovers import listed
from unisono.primitives.object_state import same_state, same_value
from unisono.primitives.placements import check_have_data
from unisono.primitives.sample_lists import SampleList
from unisono.primitives.shared_iterators import shared
from unisono.runtime import devices as _devices
from unisono.runtime.devices import DeviceLike
from unisono.runtime.errors import shown
from unisono.verification import compare
from unisono.verification.causes import (
    LOST,
    SPLIT_INPUT,
    SPLIT_LIST,
    Comparison,
    is_uncertain,
    may_be_split_wrongly,
    nondeterministic,
    split_wrongly,
    with_whole_inputs,
)
from unisono.verification.compare import Tolerance
from unisono.verification.report import MODES, Finding, Kind, Report, Row
from unisono.verification.state import RandomState, copied
from unisono.verification.step import Example, RecordedStep, take_step

_TRIED = 16  # inputs at most, to find the one that is split and has no rows
_NO_ACCELERATOR = "this machine has no accelerator, so the replicas ran on the CPU"
_ONE_ACCELERATOR = (
    "the replicas ran on the CPU: batch norm over all replicas needs one accelerator for each, and there is only one"
)
_ALONE = "the wrapper has no second device here, so the comparison has replicas on {devices}"
_SWITCHED_OFF = "random draws are switched off during the comparison, so dropout drops nothing: {operations}"
_BY_ALL = "all replicas write into it, in the order in which they finish"
_CACHES = (
    "forward stores values in {names} that are the same when the step is repeated, as a cache does; this is "
    "not counted as a difference"
)
_LOST = "each replica has its own, which is lost when forward ends"
_HOOKS = (
    "hooks store {names}, and each replica calls them with its own rows: a value stored by name is one "
    "replica's, and a list is in the order in which replicas finish"
)
_JUMPS = (
    "gradients are compared only to about {moved:.0e} of the largest: a change of parameters and inputs by "
    "{nudge:.0e} of themselves moves gradients by this much, as activations at the kink of a ReLU do. "
    "float64 is more exact"
)


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
        rtol: the largest allowed difference, relative to the largest value. None: as suits the floating types that the
            model computes in.
        show: print the report.
        options: the keyword options of `DataParallel`, such as `shares`.

    Returns:
        The report: `report.same`, `.differences`, `.first_module`, `.cause`; `str(report)` is the table. Differences
        are `.explained` if all of them come from an option that was given and causes them: `sync_batch_norm=False`,
        `scalars="stack"`. It is not `.compared`, and not `.same`, if the model draws random numbers that cannot be
        switched off, such as Python's.

    Raises:
        TypeError, ValueError: arguments that cannot be used.
        Exception: any error that the model raised, on one device or in a replica.
    """
    check_names(options, VERIFY_ARGUMENTS, "verify", OF_OTHERS)
    _check_batch(inputs, target, criterion, options.get("loss"))
    wrapped = _wrap(model, device_ids, output_device, dim, options)
    if rtol is not None and not (isinstance(rtol, int | float) and 0 <= rtol < math.inf):
        raise (ValueError if isinstance(rtol, int | float) else TypeError)(
            f"rtol={shown(rtol)}: expected a finite number, 0 or more"
        )
    check_have_data("compare", inputs, "inputs")
    check_have_data("compare", target, "target")
    args, kwargs = _by_position_and_name(shared(inputs))
    ids = _devices.resolve(device_ids)
    note = [_ONE_ACCELERATOR if ids else _NO_ACCELERATOR] if wrapped is not model and _went_to_cpu(wrapped, ids) else []
    example = _example(wrapped, args, kwargs, target, criterion)
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
    notes = []
    if len(model.devices) < 2 and not model.spans_processes:
        options = {name: getattr(model, name) for name in ("scalars", "in_dims", "out_dims", "sync_batch_norm")}
        on_the_cpu = bool(model.devices) and _devices.is_cpu(model.devices[0])
        ids = ["cpu", "cpu"] if on_the_cpu else None
        wrapped = _wrap(model.module, ids, None, model.dim, options)
        notes = [_ALONE.format(devices=", ".join(map(str, wrapped.devices)))]
    else:
        wrapped = _wrap(model, None, None, 0, {})
    library = next(cls for cls in type(wrapped).__mro__ if cls.__module__.startswith("unisono."))
    example = replace(_example(wrapped, inputs, kwargs), forward=vars(library)["forward"])
    return _compared(wrapped, example, [mode], given, None, notes)


def _by_position_and_name(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), check_kwargs(inputs, "inputs")
    return (inputs if type(inputs) is tuple else (inputs,)), {}  # a named tuple is one input


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
    rows: list[Row] = []
    findings: list[Finding] = []
    notes = [*notes]
    random = RandomState()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            for mode in modes:
                step = functools.partial(take_step, example=example, random=random, mode=mode)
                one = step(wrapped.module)
                many = step(wrapped, like=one)
                computed = [tensor for call in one.recorder.calls for _, tensor in call.outputs]
                dtypes = [t.dtype for t in (*computed, *one.outputs.values(), *wrapped.module.parameters())]
                tolerance = Tolerance.of(dtypes, example.device, rtol)
                notes += _notes(mode, one, many)
                comparison = Comparison(mode, wrapped, given, one, many, tolerance)
                if drawn := comparison.draws():
                    findings.append(drawn)
                    if many.error is None:  # else the shapes of the outputs say more
                        continue
                found = _rows(mode, one, many, tolerance)
                if rtol is None and _only_gradients_differ(found):
                    moved = compare.sensitivity(one.gradients, step(wrapped.module, nudge=tolerance.rtol).gradients)
                    before, found = found, compare.allowing(found, moved)
                    notes += [_JUMPS.format(nudge=tolerance.rtol, moved=moved)] if found != before else []
                found, caches = _with_containers_told_apart(mode, found, one, many, tolerance, step, wrapped)
                notes += [_CACHES.format(names=listed(caches))] if caches else []
                rows += found
                if not any(row.differs for row in found):
                    continue
                of_mode = comparison.findings(found)
                is_nondeterministic = False
                if is_uncertain(of_mode):
                    again = step(wrapped.module)
                    is_nondeterministic = any(row.differs for row in _rows(mode, one, again, tolerance))
                    of_mode = nondeterministic(of_mode, one, again, tolerance) if is_nondeterministic else of_mode
                if not is_nondeterministic and may_be_split_wrongly(of_mode):
                    split = _wrongly_split(wrapped, example, one, tolerance, step)
                    whole = _arguments(wrapped, example).whole_with_rows() if split is None else []
                    of_mode = with_whole_inputs(of_mode, whole) if split is None else split_wrongly(of_mode, *split)
                findings += of_mode
    finally:
        random.restore()
    num_replicas = len(many.rows) or len(wrapped.devices)
    said = tuple(dict.fromkeys(notes))
    return Report(_title(wrapped, many), tuple(rows), tuple(findings), said, num_replicas)


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
    device_ids: Sequence[DeviceLike] | None,
    output_device: DeviceLike | None,
    dim: int,
    options: dict[str, Any],
) -> DataParallel:
    """Return the model itself if it is a wrapper, else a wrapper of a copy."""
    check_module(model, "model")
    check_initialized(model, chain(model.parameters(), model.buffers()))
    if isinstance(model, DataParallel):
        if device_ids is not None or output_device is not None or dim != 0 or options:
            raise ValueError(
                "the model is already wrapped, and compared with its own options: leave out devices and options"
            )
        if not model.devices:
            raise ValueError(
                "this wrapper runs the plain module on this machine, so there are no replicas to compare. "
                'Write verify(model.module, ..., device_ids=["cpu"] * 2)'
            )
        if model.spans_processes:
            raise ValueError(
                "this wrapper spans several processes, but verify compares within one. Write verify(model.module)"
            )
        return model
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


def _rows(mode: str, one: RecordedStep, many: RecordedStep, tolerance: Tolerance) -> list[Row]:
    """Return every comparison of two steps."""
    outputs = one.outputs
    rows: list[Row] = []
    if many.error is not None:
        rows.append(Row(mode, Kind.OUTPUT, "", difference=math.inf, note=str(many.error).split(". ")[0]))
    else:
        of_many = compare.joined_numbers(outputs, many.outputs)
        rows += compare.rows_of(mode, Kind.OUTPUT, outputs, of_many, tolerance)
        values = compare.values_in(one.output, many.output)
        rows += [compare.row_of_value(mode, *each, tolerance) for each in values]
    if one.loss is not None and many.loss is not None:
        scale = max(map(compare.largest, (one.loss, *outputs.values())))
        rows += compare.rows_of(mode, Kind.LOSS, {"": one.loss}, {"": many.loss}, tolerance, {"": scale})
    if (one.loss is None) == (many.loss is None):
        scales = compare.common_scales(one.gradients)
        rows += compare.rows_of(mode, Kind.GRADIENT, one.gradients, many.gradients, tolerance, scales)
    written = one.written.keys() | many.written.keys()
    of_one, of_many = ({n: p for n, p in step.parameters.items() if n in written} for step in (one, many))
    rows += compare.rows_of(mode, Kind.PARAMETER, of_one, of_many, tolerance)
    rows += compare.rows_of(mode, Kind.BUFFER, one.buffers, many.buffers, tolerance, compare.module_scales(one.buffers))
    updated = _updated(one, many)
    of_many = {name: number for name, number in many.attributes.items() if name in updated}
    rows += compare.rows_of(mode, Kind.ATTRIBUTE, updated, of_many, tolerance)
    rows += [
        Row(mode, Kind.ATTRIBUTE, name, difference=math.inf, note=note)
        for name, note in _changed_contents(one, many, tolerance)
        if name not in updated
    ]
    return rows


def _changed_contents(one: RecordedStep, many: RecordedStep, tolerance: Tolerance) -> Iterator[tuple[str, str]]:
    """Yield the containers and objects in attributes that hold other values than on one device, and why they do."""

    for name, after in many.contents.items():
        expected, before = one.contents.get(name, {}), many.contents_before.get(name, {})
        if expected.keys() == after.keys() and all(
            compare.holds_the_same(expected[path], after[path], tolerance) for path in after
        ):
            continue
        if not same_state(before, after):
            yield name, _BY_ALL
        elif before and name in many.left[Left.ASSIGNED]:  # else forward fills it
            yield name, _LOST


def _with_containers_told_apart(
    mode: str,
    rows: list[Row],
    one: RecordedStep,
    many: RecordedStep,
    tolerance: Tolerance,
    step: Callable[..., RecordedStep],
    wrapped: DataParallel,
) -> tuple[list[Row], list[str]]:
    """Return the rows without those of caches, and with what else all replicas write into; and the caches.

    A cache holds other keys, such as another number of rows, and stays as it is when the step is repeated with slightly
    other numbers. What replicas write into outside of the model, as a list of the file, is no attribute; and the order
    of arrival in a list may be that of one device by accident.
    """
    may_be_caches, written = [], [name for name in many.left[Left.SHARED] if _attribute_of(name, many) is None]
    for name, after in many.contents.items():
        expected, before = one.contents.get(name, {}), many.contents_before.get(name, {})
        new, common = after.keys() - before.keys(), expected.keys() & after.keys()
        if not all(compare.holds_the_same(expected[path], after[path], tolerance) for path in common):
            continue
        if expected.keys() != after.keys():
            may_be_caches.append(name)
        elif len(new) > 1 and not all(same_value(after[path], after[min(new)]) for path in new):
            written += [shared for shared in many.left[Left.SHARED] if _attribute_of(shared, many) == name]
    if not may_be_caches and not written:
        return rows, []
    again = step(wrapped, like=one, nudge=tolerance.rtol, repeated=True)
    states = [(again.contents_before.get(name, {}), again.contents.get(name, {})) for name in may_be_caches]
    caches = [name for name, state in zip(may_be_caches, states, strict=True) if same_state(*state)]
    rows = [row for row in rows if row.kind is not Kind.ATTRIBUTE or row.name not in caches]
    of_all = [name for name in written if any(_is_inside(name, other) for other in again.left[Left.SHARED])]
    caches += [name for name in written if name not in of_all]
    return [*rows, *(Row(mode, Kind.ATTRIBUTE, name, difference=math.inf, note=_BY_ALL) for name in of_all)], caches


def _is_inside(name: str, other: str) -> bool:
    """Return whether one of two things that replicas share is in the other, or is the other."""
    path, other_path = name.partition(" (")[0], other.partition(" (")[0]
    return path.startswith(other_path) or other_path.startswith(path)


def _attribute_of(shared: str, many: RecordedStep) -> str | None:
    """Return the attribute, of those whose contents are compared, in which something is that replicas share."""
    return next((name for name in many.contents if shared == name or shared.startswith((f"{name}.", f"{name}["))), None)


def _wrongly_split(
    wrapped: DataParallel,
    example: Example,
    one: RecordedStep,
    tolerance: Tolerance,
    step: Callable[..., RecordedStep],
) -> tuple[str, tuple[str, ...]] | None:
    """Return what is to be said of an input that has no rows and is split, or of a list that is not split by entry.

    With it come the arguments to write, if they help. None: there is no such input. With the remedy the step gives the
    numbers of one device: that is tried.
    """
    arguments = _arguments(wrapped, example)

    def gives_the_same(model: nn.Module, example: Example) -> bool:
        try:
            many = step(model, like=one, example=example)
        except Exception:  # noqa: BLE001  the model may expect other inputs: any error says that this is no remedy
            return False
        rows = [row for row in _rows("", one, many, tolerance) if row.kind in (Kind.OUTPUT, Kind.LOSS)]
        return many.error is None and not any(row.differs for row in rows)

    has_numbers = wrapped.scalars == "stack" and any(tensor.dim() == 0 for tensor in one.outputs.values())
    for numbers in arguments.may_have_no_rows()[:_TRIED]:
        attempt: DataParallel = copied(wrapped)  # type: ignore[assignment]
        attempt.in_dims = in_dims = arguments.in_dims_with_whole(numbers)
        fix: tuple[str, ...] = (f"in_dims={in_dims!r}",)
        is_same = gives_the_same(attempt, example)
        if not is_same and has_numbers:  # a mean over rows differs for another reason
            attempt.scalars, fix = "mean", (*fix, "scalars='mean'")
            is_same = gives_the_same(attempt, example)
        if is_same:
            return SPLIT_INPUT.format(inputs=arguments.described(numbers), fix=", ".join(fix)), fix
    for name, kind, with_samples in _with_samples(example):
        if gives_the_same(wrapped, with_samples):
            entries = f"{name}.values()" if kind == "dict" else name
            return SPLIT_LIST.format(input=name, kind=kind, entries=entries), ()
    return None


def _arguments(wrapped: DataParallel, example: Example) -> Arguments:
    inputs, kwargs = example.fresh_inputs()
    return Arguments(inputs, kwargs, wrapped.dim, wrapped.in_dims, wrapped.module.forward)


def _with_samples(example: Example) -> Iterator[tuple[str, str, Example]]:
    """Yield the example with a SampleList in the place of a list, or of a dict whose keys number its entries.

    Each comes with the name of what it replaces, and the class of that.
    """
    for number, value in enumerate(example.inputs):
        if (samples := _as_samples(value)) is not None:
            inputs = (*example.inputs[:number], samples, *example.inputs[number + 1 :])
            yield f"inputs[{number}]", type(value).__name__, replace(example, inputs=inputs)
    for name, value in example.kwargs.items():
        if (samples := _as_samples(value)) is not None:
            yield f"kwargs[{name!r}]", type(value).__name__, replace(example, kwargs=example.kwargs | {name: samples})


def _as_samples(value: Any) -> SampleList[Any] | None:
    if type(value) in (list, tuple):
        return SampleList(value)
    return SampleList(value.values()) if type(value) is dict and [*value] == [*range(len(value))] else None


def _updated(one: RecordedStep, many: RecordedStep) -> dict[str, torch.Tensor]:
    """Return the numbers in attributes that the step has updated, on one device or on several."""

    def is_as_before(step: RecordedStep, name: str) -> bool:
        before, after = one.attributes_before[name], step.attributes.get(name)
        return after is not None and before.dtype == after.dtype and torch.equal(before, after)

    names = one.attributes_before.keys() & one.attributes.keys()
    return {
        name: number
        for name, number in one.attributes.items()
        if name in names and not (is_as_before(one, name) and is_as_before(many, name))
    }


def _only_gradients_differ(rows: Sequence[Row]) -> bool:
    """Return whether gradients differ where outputs and loss do not."""
    kinds = {row.kind for row in rows if row.differs}
    return Kind.GRADIENT in kinds and not kinds & {Kind.OUTPUT, Kind.LOSS}


def _notes(mode: str, one: RecordedStep, many: RecordedStep) -> Iterator[str]:
    if operations := dict.fromkeys([*one.switched_off, *many.switched_off]):
        yield _SWITCHED_OFF.format(operations=", ".join(operations))
    if one.loss is None:
        of_gradients = "" if one.gradients else ", and no gradients to compare"
        yield f"no output is floating point: there is no loss{of_gradients}"
    elif many.loss is None:
        yield f"{mode}: loss and gradients are not compared, because the outputs differ in shape"
    elif one.no_gradients:
        yield f"{mode}: gradients are not compared, because the backward fails on one device: {one.no_gradients}"
    elif not one.gradients:
        yield f"{mode}: no gradients to compare: no parameter or input got one"
    # A cache, or values that are kept for who reads them: no difference, unless it is a number that is updated.
    updated = {*_updated(one, many), *(name for name in many.left[Left.ASSIGNED] if many.contents_before.get(name))}
    # A layer or parameter that it makes is in the findings.
    if filled := [name for name in many.left[Left.ASSIGNED] if name not in updated and not _is_made(name, one)]:
        yield f"forward stores {listed(filled)}: {LOST}. If you read them after forward, return them as outputs"
    if many.left[Left.HOOKS]:
        yield _HOOKS.format(names=listed(many.left[Left.HOOKS]))
    if len(many.rows) == 1:
        replicas = "only one replica" if sum(many.rows) else "no replica"
        yield f"{replicas} had rows (samples): give a larger batch"


def _is_made(name: str, one: RecordedStep) -> bool:
    """Return whether an attribute is a parameter, or a module with parameters, that forward has made."""
    return any(each == name or each.startswith(f"{name}.") for each in one.written if each not in one.parameters_before)


def _title(wrapped: DataParallel, many: RecordedStep) -> str:
    devices = [str(device) for device in wrapped.devices]
    if len(many.rows) == len(devices):
        devices = [f"{device} {rows} row{'s' * (rows != 1)}" for device, rows in zip(devices, many.rows, strict=True)]
    count = f"{len(devices)} replicas" if len(devices) > 1 else "one replica"
    return f"{type(wrapped.module).__name__} on {wrapped.devices[0]}, and on {count} ({', '.join(devices)})"
