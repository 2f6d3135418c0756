"""One mode compared: the step on one device with that on several, in float64, then in the model's own type.

In float64, with autocast without effect, rounding hides nothing that matters: so this comparison decides. Where the
step raises an error in float64, as custom kernels do, float32 decides, or the model's own type, and the report says so.
What differs is explained (causes.py); where more can be known from it, a step is taken once more: to see how far
rounding errors move the numbers, or whether the step gives the same twice.

If all is the same, the model's own type is compared too, coarsely: it has other kernels, and other code may run in it.
Its steps are taken first: what a model keeps between its steps, such as a table of positions, has then its own type,
and errors of the model are raised as they are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from unisono.data_parallel import DataParallel
from unisono.leftovers.report import Kind as Left
from unisono.leftovers.report import listed
from unisono.primitives.object_state import same_state, same_value
from unisono.primitives.sample_lists import SampleList
from unisono.primitives.scatter import Arguments
from unisono.runtime import devices as _devices
from unisono.runtime.errors import described
from unisono.runtime.widening import widened
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
from unisono.verification.report import Cause, Finding, Kind, Row
from unisono.verification.state import RandomState, copied
from unisono.verification.step import Example, RecordedStep, take_step

_TRIED = 16  # inputs at most, to find the one that is split and has no rows
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
_THREADS = (
    "forward may read {names}, which this thread has set in a threading.local: the threads of replicas have another "
    "value there, or none. Pass it as an input, or make it an attribute of the module"
)
_JUMPS = (
    "{mode}: in the model's own type, a change of parameters and inputs by {nudge:.0e} of themselves moves some values "
    "by more than is allowed otherwise, as activations at the kink of a ReLU do; they may differ by twice as much"
)
_NOT_IN_FLOAT64 = "{mode}: compared in {precision}, because the step raises an error in float64: {error}"
_NO_EFFECT = (
    "{mode}: the output of {name} differs, but nothing depends on it: in float64 outputs, loss, gradients and what the "
    "model keeps are the same"
)


@dataclass
class ComparedMode:
    """What the comparison of one mode has shown."""

    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    replica_rows: Sequence[int] = ()  # of each replica; empty if not known


@dataclass(frozen=True)
class Steps:
    """The steps that are compared: of one wrapper and one example, in one mode and one floating type."""

    mode: str
    wrapped: DataParallel
    example: Example
    random: RandomState
    least: torch.dtype | None  # None: the model's own type
    backward: bool = True  # whether gradients are computed

    def take(self, model: torch.nn.Module, example: Example | None = None, **arguments: Any) -> RecordedStep:
        """Take a step; the other arguments are those of `take_step`."""
        given = {"least": self.least, "backward": self.backward, **arguments}
        return take_step(model, example or self.example, self.random, self.mode, **given)

    def both(self, **arguments: Any) -> tuple[RecordedStep, RecordedStep]:
        """Take the step on one device, and the one on several; the arguments are those of `take_step`."""
        one = self.take(self.wrapped.module, **arguments)
        return one, self.take(self.wrapped, like=one, **arguments)

    def comparison(
        self, given: Mapping[str, Any], one: RecordedStep, many: RecordedStep, tolerance: Tolerance
    ) -> Comparison:
        """Return what finds the causes of differences between both."""
        has_step = self.example.step is not None
        return Comparison(self.mode, self.wrapped, given, one, many, tolerance, has_step)


def compare_mode(
    mode: str,
    wrapped: DataParallel,
    example: Example,
    random: RandomState,
    given: Mapping[str, Any],
    rtol: float | None,
) -> ComparedMode:
    """Compare one device with several; `given` and `rtol` are those of `verify`."""
    found = ComparedMode()
    # Few programs call backward in eval mode, and float64 compares it.
    own = Steps(mode, wrapped, example, random, None, backward=mode == "training")
    try:
        steps_in_own = own.both(record=False)
    except ValueError:  # the record shows why outputs cannot be joined
        steps_in_own = own.both()
    types = _types_of(wrapped, example) | {*steps_in_own[0].asked}
    wide, taken = _widened(own, types, found.notes)
    _decide(wide, *taken, given, rtol, found)
    if wide.least is not None and not found.findings and taken[1].error is None:
        _compare_coarsely(own, *steps_in_own, types, given, rtol, found)
    return found


def _widened(own: Steps, types: set[torch.dtype], notes: list[str]) -> tuple[Steps, tuple[RecordedStep, RecordedStep]]:
    """Take both steps in float64, or in the widest type in which they raise no error; say in `notes` if it is another.

    Args:
        types: those in which the step computes as it is.
    """
    first_error = ""
    for least in (torch.float64, torch.float32):
        if all(widened(dtype, least) == dtype for dtype in types):
            break
        steps = replace(own, least=least, backward=True)
        try:
            if least is torch.float64 and not _devices.has_float64(own.example.device):
                steps = _on_the_cpu(steps)
            taken = steps.both()
        except Exception as error:  # noqa: BLE001  code of the model, which does not take this type
            first_error = first_error or described(error).splitlines()[0].rstrip(": ")
            continue
        if first_error:
            notes.append(_NOT_IN_FLOAT64.format(mode=own.mode, precision="float32", error=first_error))
        return steps, taken
    steps = replace(own, backward=True)
    taken = steps.both()
    if first_error:
        precision = _precision(types)
        notes.append(_NOT_IN_FLOAT64.format(mode=own.mode, precision=precision, error=first_error))
    return steps, taken


def _decide(
    steps: Steps,
    one: RecordedStep,
    many: RecordedStep,
    given: Mapping[str, Any],
    rtol: float | None,
    found: ComparedMode,
) -> None:
    """Compare the steps in the type that decides; add to `found` what they show."""
    found.replica_rows = many.rows
    found.notes += _notes(steps.mode, one, many)
    tolerance = Tolerance.of(one.dtypes, steps.example.device, rtol, is_widened=steps.least is not None)
    comparison = steps.comparison(given, one, many, tolerance)
    if drawn := comparison.draws():
        found.findings.append(drawn)
        if many.error is None:  # else the shapes of the outputs say more
            return
    rows = _rows(steps.mode, one, many, tolerance)
    if rtol is None:
        rows = _with_rounding(rows, one, tolerance, tolerance.floor, steps)
    rows, caches = _with_containers_told_apart(rows, one, many, tolerance, steps)
    found.notes += [_CACHES.format(names=listed(caches))] if caches else []
    found.rows += [replace(row, precision=_precision(one.dtypes)) for row in rows]
    findings = _findings(comparison, rows, steps)
    if steps.least is torch.float64 and not any(row.differs or not row.judged for row in rows):
        certain = [finding for finding in findings if finding.cause is Cause.PER_SHARD_BATCH_NORM]
        names = [finding.module or "the model itself" for finding in findings if finding not in certain]
        found.notes += [_NO_EFFECT.format(mode=steps.mode, name=name) for name in names]
        findings = certain
    found.findings += findings


def _on_the_cpu(steps: Steps) -> Steps:
    """Return the same steps with all devices on the CPU: that of the example has no float64."""
    wrapped = steps.wrapped
    cpu = [torch.device("cpu")] * len(wrapped.devices)
    names = ("shares", "scalars", "in_dims", "out_dims", "sync_batch_norm")
    options = {name: getattr(wrapped, name) for name in names}
    module = copied(wrapped.module).to("cpu")
    on_the_cpu = DataParallel(module, cpu, None, wrapped.dim, process_group=False, **options)
    return replace(steps, wrapped=on_the_cpu, example=replace(steps.example, device=cpu[0], output_device=cpu[0]))


def _types_of(wrapped: DataParallel, example: Example) -> set[torch.dtype]:
    """Return the types in which the model and the batch are."""
    module = wrapped.module
    of_batch = [tensor for _, tensor in compare.tensors_in([example.inputs, example.kwargs, example.target])]
    return {tensor.dtype for tensor in (*module.parameters(), *module.buffers(), *of_batch)}


def _precision(dtypes: set[torch.dtype]) -> str:
    """Return the coarsest of the floating types, as it is called."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    coarsest = max(floating, key=lambda dtype: Tolerance.of([dtype], torch.device("cpu"), None).rtol, default=None)
    return "" if coarsest is None else str(coarsest.to_real()).removeprefix("torch.")


def _compare_coarsely(
    steps: Steps,
    one: RecordedStep,
    many: RecordedStep,
    types: set[torch.dtype],
    given: Mapping[str, Any],
    rtol: float | None,
    found: ComparedMode,
) -> None:
    """Compare the steps in the model's own types, given as `types`; add to `found` what they show.

    What rounding decides in float64 is not judged here either.
    """
    undecided = {(row.kind, row.name) for row in found.rows if not row.judged}
    tolerance = Tolerance.of(types, steps.example.device, rtol)
    rows = _rows(steps.mode, one, many, tolerance, coarsely=True)
    rows = [row for row in rows if row.kind is not Kind.ATTRIBUTE]  # float64 has judged them
    if rtol is None:
        before, rows = rows, _with_rounding(rows, one, tolerance, tolerance.rtol, steps, coarsely=True)
        found.notes += [_JUMPS.format(mode=steps.mode, nudge=tolerance.rtol)] if rows != before else []
    rows = [replace(row, judged=False) if row.differs and (row.kind, row.name) in undecided else row for row in rows]
    found.rows += [replace(row, precision=_precision(types)) for row in rows]
    if any(row.differs for row in rows):
        one, many = steps.both()
        found.findings += _findings(steps.comparison(given, one, many, tolerance), rows, steps)


def _with_rounding(
    rows: list[Row], one: RecordedStep, tolerance: Tolerance, nudge: float, steps: Steps, *, coarsely: bool = False
) -> list[Row]:
    """Return the rows, judged by what rounding explains: steps on one device that are nudged show it."""
    taken = (steps.take(steps.wrapped.module, nudge=by, record=False) for by in (nudge, -nudge))
    nudged = (_rows(steps.mode, one, each, tolerance, coarsely=coarsely) for each in taken)
    decided = compare.decided(rows, nudged, tolerance, coarsely=coarsely)
    if all(row.judged for row in decided):
        return decided
    again = steps.take(steps.wrapped.module, record=False)
    is_repeatable = not any(row.differs for row in _rows(steps.mode, one, again, tolerance))
    return decided if is_repeatable else rows


def _findings(comparison: Comparison, rows: Sequence[Row], steps: Steps) -> list[Finding]:
    """Return the findings about what differs; uncertain ones after more steps that may explain them."""
    findings = comparison.findings(rows)
    if not any(row.differs for row in rows):
        return findings
    one, tolerance = comparison.one, comparison.tolerance
    if is_uncertain(findings):
        again = steps.take(steps.wrapped.module)
        if any(row.differs for row in _rows(steps.mode, one, again, tolerance)):
            return nondeterministic(findings, one, again, tolerance)
    if may_be_split_wrongly(findings):
        arguments = _arguments(comparison.many, steps)
        split = _wrongly_split(one, arguments, tolerance, steps)
        if split is not None:
            return split_wrongly(findings, *split)
        whole = arguments.whole_with_rows()
        return with_whole_inputs(findings, [path for path, _ in whole])
    return findings


def _rows(
    mode: str, one: RecordedStep, many: RecordedStep, tolerance: Tolerance, *, coarsely: bool = False
) -> list[Row]:
    """Return every comparison of two steps; `coarsely` as in `compare.gradient_rows`."""
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
        loss = 0.0 if one.loss is None else compare.largest(one.loss)
        rows += compare.gradient_rows(mode, one.gradients, many.gradients, tolerance, coarsely=coarsely, loss=loss)
    written = one.written.keys() | many.written.keys()
    of_one, of_many = ({n: p for n, p in step.parameters.items() if n in written} for step in (one, many))
    rows += compare.rows_of(mode, Kind.PARAMETER, of_one, of_many, tolerance)
    scales = compare.module_scales(one.buffers, {*one.updated_buffers, *many.updated_buffers})
    rows += compare.rows_of(mode, Kind.BUFFER, one.buffers, many.buffers, tolerance, scales)
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
        elif before and (name in many.left[Left.ASSIGNED] or name in one.containers):  # else forward fills it
            yield name, _LOST


def _with_containers_told_apart(
    rows: list[Row],
    one: RecordedStep,
    many: RecordedStep,
    tolerance: Tolerance,
    steps: Steps,
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
    again = steps.take(steps.wrapped, like=one, nudge=tolerance.rtol, repeated=True)
    states = [(again.contents_before.get(name, {}), again.contents.get(name, {})) for name in may_be_caches]
    caches = [name for name, state in zip(may_be_caches, states, strict=True) if same_state(*state)]
    rows = [row for row in rows if row.kind is not Kind.ATTRIBUTE or row.name not in caches]
    of_all = [name for name in written if any(_is_inside(name, other) for other in again.left[Left.SHARED])]
    caches += [name for name in written if name not in of_all]
    by_all = [Row(steps.mode, Kind.ATTRIBUTE, name, difference=math.inf, note=_BY_ALL) for name in of_all]
    return [*rows, *by_all], caches


def _is_inside(name: str, other: str) -> bool:
    """Return whether one of two things that replicas share is in the other, or is the other."""
    path, other_path = name.partition(" (")[0], other.partition(" (")[0]
    return path.startswith(other_path) or other_path.startswith(path)


def _attribute_of(shared: str, many: RecordedStep) -> str | None:
    """Return the attribute, of those whose contents are compared, in which something is that replicas share."""
    # In an iterator or a text nothing can be compared.
    compared = [name for name, contents in many.contents.items() if [*contents] not in ([], [""])]
    return next((name for name in compared if shared == name or shared.startswith((f"{name}.", f"{name}["))), None)


def _wrongly_split(
    one: RecordedStep, arguments: Arguments, tolerance: Tolerance, steps: Steps
) -> tuple[str, tuple[str, ...]] | None:
    """Return what is to be said of an input that has no rows and is split, or of a list that is not split by entry.

    With it come the arguments to write, if they help. None: there is no such input. With the remedy the step gives the
    numbers of one device: that is tried.
    """
    wrapped, example = steps.wrapped, steps.example

    def gives_the_same(model: torch.nn.Module, example: Example) -> bool:
        try:
            many = steps.take(model, like=one, example=example)
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


def _arguments(many: RecordedStep, steps: Steps) -> Arguments:
    """Return what the wrapper is called with: the inputs of the example, or what the caller's `step` gives it."""
    wrapped = steps.wrapped
    inputs, kwargs = many.given or steps.example.fresh_inputs()
    return Arguments(inputs, kwargs, wrapped.dim).find_rows(wrapped.in_dims, wrapped.module.forward)


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
    """Return the numbers in attributes that the step has updated, on one device or on several, or filled on both."""

    def is_as_before(step: RecordedStep, name: str) -> bool:
        before, after = one.attributes_before[name], step.attributes.get(name)
        return after is not None and before.dtype == after.dtype and torch.equal(before, after)

    names = one.attributes_before.keys() & one.attributes.keys()
    filled = (one.attributes.keys() & many.attributes.keys()) - one.attributes_before.keys()
    return {
        name: number
        for name, number in one.attributes.items()
        if name in filled or (name in names and not (is_as_before(one, name) and is_as_before(many, name)))
    }


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
    stored = dict.fromkeys([*many.left[Left.ASSIGNED], *sorted(one.marked - many.marked)])
    if filled := [name for name in stored if name not in updated and not _is_made(name, one)]:
        yield f"forward stores {listed(filled)}: {LOST}. If you read them after forward, return them as outputs"
    if by_all := sorted(many.marked - one.marked):
        yield f"forward writes into {listed(by_all)}: {_BY_ALL}"
    if many.left[Left.HOOKS]:
        yield _HOOKS.format(names=listed(many.left[Left.HOOKS]))
    if many.left[Left.THREADS]:
        yield _THREADS.format(names=listed(many.left[Left.THREADS]))
    if len(many.rows) == 1:
        replicas = "only one replica" if sum(many.rows) else "no replica"
        yield f"{replicas} had rows (samples): give a larger batch"


def _is_made(name: str, one: RecordedStep) -> bool:
    """Return whether an attribute is a parameter, or a module with parameters, that forward has made."""
    return any(each == name or each.startswith(f"{name}.") for each in one.written if each not in one.parameters_before)
