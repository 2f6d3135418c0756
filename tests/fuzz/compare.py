"""Run a program twice, with the plain module and with the wrapped one, and compare what both have shown.

Blocks, forms and actions in which replicas do something else than one device say what a message has to name then: other
numbers with that message are no difference, and end the program.
"""

import contextlib
import gc
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import unisono
from fuzz.actions import ACTIONS
from fuzz.model import INPUTS, OUTPUTS
from fuzz.program import Program, Step
from fuzz.side import ONE_PROCESS, Observed, Rank, Side, devices_of
from helpers.contract import at
from helpers.garbage import collected
from unisono.engines import graphed
from unisono.leftovers import first_steps
from unisono.runtime import devices
from unisono.runtime.errors import forget_logged
from unisono.verification.compare import difference, largest

# Of the plain side's largest number, in a tensor: rounding, some layers deep, and some steps of an optimizer.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
TOLERANCE = 1e-8
FLOOR = 1e-12  # in double precision, of the largest number of a kind: what cancels has the rounding errors of others
LARGEST = 1e15
# Gradients that pass through float32 are rounded to it, one way or the other.
TOLERANCE_OF_NARROW_DTYPES = 1e-5


class Difference(NamedTuple):
    """What the two sides do not agree on."""

    kind: str  # what two differences of one cause have in common
    text: str  # where, and what each side has


SAID = Difference("said", "a message names the cause")  # which ends a program, and is none


class Outcome(NamedTuple):
    """How a program has ended."""

    difference: Difference | None  # None if both sides have shown the same
    num_steps: int = 0  # after which it ended: both sides can fail in the same way, or diverge
    raised: bool = False  # whether they failed
    said: bool = False  # whether numbers differ, or the wrapped side failed, with a message that names the cause
    num_launches: int = 0  # of graphs of kernels


def run(program: Program, timeout_s: float, rank: Rank = ONE_PROCESS, agree: Any = None) -> Outcome:
    """Run a program until its end, or until its two sides differ.

    Args:
        timeout_s: of wrappers.
        rank: the process's, if several run the program together.
        agree: then: is given this rank's difference after each step; returns `SAID` if a rank has that, since others
            wait for it; else the difference of the lowest rank that has one.
    """

    def wrapped(module: nn.Module, outermost: bool) -> nn.Module:
        return wrap(program, module, outermost, timeout_s, rank)

    with quiet(), at("separate memory") if program.place == "separate memory" else contextlib.nullcontext():
        forget_logged()
        gc.collect()
        gc.freeze()  # the collections below look at what this program makes
        before, sides = process_state(), []
        launches: list[None] = []
        try:
            sides.append(Side(program, rank, None))
            sides.append(Side(program, rank, wrapped))
            with graphs_soon(launches) if program.graphs else contextlib.nullcontext():
                outcome = _run_steps(program, sides[0], sides[1], agree)
        finally:
            for side in sides:
                side.error = None  # whose frames refer to this side
            if "compiled" in program.traits:
                torch.compiler.reset()
        outcome = outcome._replace(num_launches=len(launches))
        after = process_state()
        restore_process_state(before)
        if outcome.difference is None and not outcome.said and after != before:
            changed = [name for name in before if before[name] != after[name]]
            text = f"after the program these are not as before: {', '.join(changed)}"
            outcome = outcome._replace(difference=Difference("state of the process", text))
        return outcome


@contextlib.contextmanager
def graphs_soon(launches: list[None]) -> Iterator[None]:
    """Let steps have graphs from the third one of a kind on; `launches` gets an entry for each that is launched."""
    launch = devices.Graph.launch

    def counted(graph: devices.Graph) -> None:
        launches.append(None)
        launch(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_steps, "_FIRST", 1)
        patch.setattr(graphed, "_NUM_BEFORE", 1)
        patch.setattr(devices.Graph, "launch", counted)
        yield


def _run_steps(program: Program, plain: Side, wrapped: Side, agree: Any) -> Outcome:
    with next(wrapped.wrappers()).profile() if program.profile else contextlib.nullcontext():
        for number, step in enumerate(program.steps):
            is_last = number == len(program.steps) - 1
            if is_last:
                gc.collect()  # what earlier steps have left is no side's
            for side in (plain, wrapped):
                side.begin_step(step.seed)
                side.is_compared = number >= program.first_compared
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    gc.disable()
                    try:
                        ACTIONS[step.action].run(side, step)
                        side.end_step()
                    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - compared below
                        side.error = error
                    side.forget_inputs()
                    side.garbage = _tensors_in_cycles() if is_last else []
                    gc.enable()
                side.said += [str(warning.message) for warning in seen]
            found = _compared(plain, wrapped)
            if found is not None and not all(map(_is_of_use, plain.observed)):
                found = None  # the training has diverged: rounding decides
            if found is not None and _names_the_cause(program, step, wrapped):
                found = SAID
            elif found is not None:
                found = Difference(found.kind, f"step {number}, {step!r}: {found.text}")
            if agree is not None:
                found = agree(found)
            if found == SAID:
                return Outcome(None, number, said=True)
            is_finite = all(bool(parameter.isfinite().all()) for parameter in plain.core.parameters())
            if found is not None or plain.error is not None or not is_finite:
                return Outcome(found, number, plain.error is not None)
    return Outcome(None, len(program.steps))


def _tensors_in_cycles() -> list[str]:
    return [each for each in collected() if "unisono" in each or each.startswith(("Tensor ", "Parameter "))]


def _names_the_cause(program: Program, step: Step, wrapped: Side) -> bool:
    """Return whether a warning, or the error, names something of the program that replicas do otherwise."""
    error = [] if wrapped.error is None else [str(wrapped.error), *getattr(wrapped.error, "__notes__", ())]
    messages = "\n".join([*wrapped.said, *error])
    return any(part in messages for part in (*program.said, *ACTIONS[step.action].said))


def _is_of_use(observed: Observed) -> bool:
    """Return whether numbers are finite, and far from the largest ones."""
    value = observed.value
    return not isinstance(value, Tensor) or value.dtype == torch.bool or bool((value.abs() < LARGEST).all())


class OwnGather(unisono.DataParallel):
    """Has a primitive of its own, so it runs the plain composition."""

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return super().gather(outputs, output_device)


def wrap(program: Program, module: nn.Module, outermost: bool, timeout_s: float, rank: Rank) -> nn.Module:
    """Return a module wrapped as a program says.

    Args:
        outermost: whether no other wrapper will be around it.
    """
    num_replicas = program.num_replicas if outermost else 2
    is_layer = isinstance(module, nn.Linear)
    options: dict[str, Any] = {} if is_layer else {**INPUTS[program.inputs].options, **OUTPUTS[program.outputs].options}
    if outermost and program.wraps == "both":
        options["in_dims"] = (0, None)
    if "batch norm" in program.traits:
        options["sync_batch_norm"] = True
    if outermost:
        options["shares"] = program.shares
    options |= {"parts": program.parts, "loss": program.loss, "rescue": program.rescue, "timeout": timeout_s}
    if outermost:
        options["graphs"] = program.graphs
    devices = devices_of(program, rank, num_replicas)
    if program.output_device:
        options["output_device"] = "cpu" if program.output_device == "cpu" else devices[-1]
    return (OwnGather if program.own_gather else unisono.DataParallel)(module, devices, **options)


def _compared(plain: Side, wrapped: Side) -> Difference | None:
    # On another device than the module's a replica has copies of the buffers, into which later forwards do not write.
    if wrapped.error is None and plain.has("asynchronous") and "modified by an inplace" in str(plain.error):
        return None
    if type(plain.error) is not type(wrapped.error):
        raised = wrapped.error or plain.error
        assert raised is not None
        words = " ".join(str(raised).split()[:6])
        kind = f"{'wrapped' if wrapped.error else 'plain'} raises {type(raised).__name__}: {words}"
        other = "" if None in (plain.error, wrapped.error) else f"plain raises {plain.error!r}\n"
        return Difference(kind, f"{kind}\n{other}{_traceback_of(raised)}")
    if plain.error is not None:
        return None
    names, others = [[observed.what for observed in side.observed] for side in (plain, wrapped)]
    if names != others:
        return Difference("names", f"plain has {names}, wrapped has {others}")
    largest_of: dict[str, float] = {}  # of gradients, of outputs, and so on
    for one in plain.observed:
        if isinstance(one.value, Tensor) and one.value.is_floating_point():
            largest_of[_first_word(one.kind)] = max(largest_of.get(_first_word(one.kind), 0.0), largest(one.value))
    for one, two in zip(plain.observed, wrapped.observed, strict=True):
        if apart := _apart(plain.program, one.value, two.value, largest_of.get(_first_word(one.kind), 0.0)):
            return Difference(one.kind, f"{one.what}: {apart}")
    if wrapped.garbage and not plain.garbage:
        return Difference("garbage", f"only the garbage collector frees {', '.join(sorted({*wrapped.garbage}))}")
    return None


def _first_word(text: str) -> str:
    return text.split()[0]


def _traceback_of(error: BaseException) -> str:
    """Return the innermost frames of a traceback, and the error."""
    lines = "".join(traceback.format_exception(error)[-8:]).splitlines()
    return "\n".join(line for line in lines if line.strip(" ^~"))[-3000:]


def _apart(program: Program, plain: Any, wrapped: Any, largest_of_kind: float) -> str | None:
    """Return how far two values are apart, in words; None if they agree, by the rule of `verify`."""
    if not (isinstance(plain, Tensor) and isinstance(wrapped, Tensor)):
        is_same = type(plain) is type(wrapped) and plain == wrapped
        return None if is_same else f"{_brief(plain)}, wrapped {_brief(wrapped)}"
    if plain.shape != wrapped.shape or plain.dtype != wrapped.dtype:
        return f"{_brief(plain)}, wrapped {_brief(wrapped)}"
    is_exact = not (plain.is_floating_point() or plain.is_complex())
    usual = TOLERANCE_OF_NARROW_DTYPES if program.outputs == "narrow dtypes" else TOLERANCE
    rtol = TOLERANCES.get(plain.dtype, usual)
    floor = FLOOR if rtol == TOLERANCE else rtol
    distance, size = difference(plain, wrapped), largest(plain)
    if distance <= (0.0 if is_exact else rtol * size + floor * largest_of_kind):
        return None
    return f"{distance:.2g} apart, of numbers up to {size:.2g}"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        zeros = ", all zero" if value.numel() and not value.any() else ""
        return f"a tensor {tuple(value.shape)} of {value.dtype}{zeros}"
    return repr(value)


# ---- the process ---------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Any:
    """Run programs in double precision, and without what they would warn of."""
    level, dtype = logging.root.manager.disable, torch.get_default_dtype()
    logging.disable(logging.WARNING)
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.set_default_dtype(dtype)


# What a program must leave as it was, and how to set it again.
_STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "inference mode": (torch.is_inference_mode_enabled, None),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the kernels of attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
}


def process_state() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _STATE.items()}


def restore_process_state(state: dict[str, Any]) -> None:
    for name, (_, write) in _STATE.items():
        if write is not None:
            write(state[name])
