"""What a random program does with its model: training of every kind, and what users change between steps.

Each action gets a side, plain or wrapped, and a step; both sides have to show the same. What one side draws, it draws
from the step's seed.
"""

import contextlib
import copy
import functools
import gc
import io
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import unisono
from fuzz.blocks import WIDTH, KeepsLosses, linear
from fuzz.model import INPUTS, NUM_OUTPUTS, OUTPUTS, tensors_in
from fuzz.program import Step
from fuzz.side import OPTIMIZERS, Side, seed_torch

Run = Callable[[Side, Step], None]


class Action(NamedTuple):
    """An action, and how it may be drawn."""

    run: Run
    weight: float  # how often, compared with others
    only: tuple[str, ...]  # the program needs one of these traits
    without: tuple[str, ...]  # and none of these
    said: tuple[str, ...]  # what a message says, in part, where the numbers are not those of the plain module

    def suits(self, traits: frozenset[str]) -> bool:
        return (not self.only or not traits.isdisjoint(self.only)) and traits.isdisjoint(self.without)


ACTIONS: dict[str, Action] = {}


def action(
    weight: float = 1,
    only: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    around: Callable[[Run, Side, Step], None] | None = None,
    said: tuple[str, ...] = (),
) -> Callable[[Run], Run]:
    """Register an action by its function's name, perhaps with something around it."""

    def register(run: Run) -> Run:
        ACTIONS[run.__name__] = Action(functools.partial(around, run) if around else run, weight, only, without, said)
        return run

    return register


def _train_by(run: Run, side: Side, step: Step) -> None:
    side.optimizer.zero_grad()
    run(side, step)
    side.step()


def _train_after(run: Run, side: Side, step: Step) -> None:
    run(side, step)
    side.train(step.rows, step.seed)


training = functools.partial(action, around=_train_by)  # a step of the optimizer, by other gradients than usual
change = functools.partial(action, around=_train_after)  # and then a usual step


_REMEMBERS_GRAPHS = ("attributes", "normed weight")  # the plain module cannot be copied then
_SECOND_ORDER = ("sparse", "reentrant", "float64")
# What a checkpoint around the model runs twice, writes twice.
_NOT_TWICE = ("reentrant", "buffers", "normed weight", "writes_input", "batch norm", "rescue")


def floats_in(output: Any) -> list[Tensor]:
    """Return the tensors of an output that have gradients."""
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


# ---- training ------------------------------------------------------------------------------------


@action(weight=6)
def train(side: Side, step: Step) -> None:
    side.train(step.rows, step.seed)


@training(weight=2)
def accumulate(side: Side, step: Step) -> None:
    """One optimizer step for three batches, one row shorter each."""
    for number in range(3):
        rows = max(step.rows - number, 2 if side.has("ranks") else 1)
        side.backward(side.loss_of(rows, step.seed + number) / 3)


# Until the last backward, buffers and what hooks see are each rank's own: behaviour.md, C6 and C8.
@training(only=("ranks",), without=("hooked", "buffers of ranks", "wraps: two"))
def accumulate_without_sync(side: Side, step: Step) -> None:
    with contextlib.nullcontext() if side.is_plain else next(side.wrappers()).no_sync():
        side.backward(side.loss_of(step.rows, step.seed))
    side.backward(side.loss_of(step.rows, step.seed + 1))


def _losses(side: Side, step: Step) -> list[Tensor]:
    """Return the losses of two or three forwards on batches of other sizes, perhaps with others without gradients."""
    draw, losses = random.Random(step.seed), []
    without_gradients = not side.has("ranks") and not side.has("scripted") and draw.random() < 0.5
    for number in range(draw.choice((2, 2, 3))):
        rows = step.rows + (number and draw.choice((-1, 0, 1, 5)))
        losses.append(side.loss_of(max(rows, 2 if side.has("ranks") else 0), step.seed + number))
        if without_gradients:
            with torch.no_grad():
                side.forward(step.rows, step.seed + 3 + number)
    return losses


@training(weight=3, without=("buffers of ranks",))
def forwards_one_backward(side: Side, step: Step) -> None:
    first, *others = _losses(side, step)
    side.backward(sum(others, first * 0.5))


@training(weight=2, without=("buffers of ranks",))
def forwards_backwards(side: Side, step: Step) -> None:
    """The backwards are in any order."""
    losses = _losses(side, step)
    for loss in random.Random(step.seed).sample(losses, len(losses)):
        side.backward(loss)


@training(without=("buffers of ranks", "batch norm", "scripted"))
def no_grad_between(side: Side, step: Step) -> None:
    loss = side.loss_of(step.rows, step.seed)
    with torch.no_grad():
        side.forward(step.rows, step.seed + 1)
    side.backward(loss)


# On accelerators two threads go through a replica's graph for the output and for what has left it.
def _free(side: Side) -> dict[str, bool]:
    return {"retain_graph": side.has("asynchronous")}


# A loss that has left forward is a sum over the rows of a replica. Through a checkpoint that writes buffers its numbers
# are others: row R5.
@training(weight=4, only=("losses",), without=("loss: mean", "wraps: part", "written in backward"))
def losses_that_leave(side: Side, step: Step) -> None:
    """Alone, with that of the output, before it, after it, of two forwards, without sync before, or by derivatives."""

    def both(number: int = 0) -> list[Tensor]:
        for block in blocks:
            block.kept.clear()
        output = side.loss_of(step.rows, step.seed + number)
        return [output, torch.stack([loss.to(output) for block in blocks for loss in block.kept]).sum()]

    def grads(loss: Tensor, **options: Any) -> list[Tensor]:
        found = torch.autograd.grad(loss, side.trained(), allow_unused=True, **options)
        return [grad for grad in found if grad is not None]

    blocks = [module for module in side.core.modules() if isinstance(module, KeepsLosses)]
    output, kept = both()
    how = step.seed % (5 if side.has("reentrant") else 7)
    if how == 0:
        side.backward(kept)
    elif how == 1:
        side.backward(output + kept, **_free(side))
    elif how == 2:
        side.backward(output, retain_graph=True)
        side.backward(kept)
    elif how == 3:
        side.backward(kept, retain_graph=True)
        side.backward(output)
    elif how == 4:
        # Until backward, a rank reads of buffers what those forwards wrote in which it had rows: behaviour.md, C8.
        # The same batch is cut alike: a rank has rows in both, or in none.
        second = 0 if side.has("buffers of ranks") else 1
        side.backward(output + kept + both(second)[1], **_free(side))
    elif how == 5:
        with contextlib.nullcontext() if side.is_plain else next(side.wrappers()).no_sync():
            side.backward(kept)
        side.backward(torch.stack(both(1)).sum(), **_free(side))
    else:
        side.observe_all("gradient", grads(kept, retain_graph=True))
        # A sum of sums over the ranks is its own derivative: each rank has it whole.
        side.backward(output + sum(grad.square().sum() for grad in grads(kept, create_graph=True)), **_free(side))
    for block in blocks:
        block.kept.clear()


@training()
def backward_twice(side: Side, step: Step) -> None:
    loss = side.loss_of(step.rows, step.seed)
    side.backward(loss, retain_graph=True)
    side.backward(loss * 2)


@training(without=("buffers, sample list",))
def backward_of_each_output(side: Side, step: Step) -> None:
    outputs = floats_in(side.forward(step.rows, step.seed))
    for number, output in enumerate(outputs, 1):
        side.backward(side.loss(output), retain_graph=number < len(outputs))


# Each entry of a SampleList is an output: a layer that only other replicas' rows use has no gradient, where the plain
# module's has zeros.
@training(without=("outputs: sample list",))
def backward_of_a_part(side: Side, step: Step) -> None:
    """Of one output, or of some of its rows."""
    draw = random.Random(step.seed)
    outputs = floats_in(side.forward(step.rows, step.seed))
    if outputs:
        output = draw.choice(outputs)
        if output.dim() and not side.has("ranks"):
            output = output[: max(1, len(output) // 2)]
        side.backward(side.loss(output))


# A SampleList's entries, and what hooks see of them, are each replica's own. To the gradient of a parameter replicas
# compute those of its bucket: as for `gradients_of_some`, a checkpoint runs that one device needs not. Outputs of the
# plain composition have no gradients by each other.
@training(
    weight=3, without=("reentrant", "ranks", "own_gather", "outputs: sample list", "checkpointed buffers, a parameter")
)
def gradients_between_outputs(side: Side, step: Step) -> None:
    """By torch.autograd.grad, then by tensors that keep theirs and by hooks that change it."""
    outputs = floats_in(side.forward(step.rows, step.seed))
    if not outputs:
        return
    draw, kept = random.Random(step.seed), []
    losses = [side.loss(output) for output in outputs]
    one, other = draw.randrange(len(outputs)), draw.randrange(len(outputs))
    if draw.random() < 0.7:
        found = torch.autograd.grad(losses[one], outputs[other], retain_graph=True, allow_unused=True)
        side.observe_all("gradient of an output", found)
    for output in draw.sample(outputs, draw.randrange(len(outputs) + 1)):
        output.retain_grad()
        kept.append(output)
        if draw.random() < 0.5:
            output.register_hook(_halve_gradient)
    side.backward(sum(losses, losses[0] * 0))
    side.observe_all("kept gradient of an output", [output.grad for output in kept])


# Replicas compute all gradients of a bucket: they may run a checkpoint that one device needs not, which writes buffers.
@action(without=("reentrant", "written in backward", "buffers of ranks"))
def gradients_of_some(side: Side, step: Step) -> None:
    """torch.autograd.grad of half of the parameters, and of the inputs if they require gradients."""
    x = side.batch(step.rows, step.seed)
    loss = side.loss(side.run(x))
    trained = side.trained()
    wanted: list[Tensor] = random.Random(step.seed).sample(trained, (len(trained) + 1) // 2)
    wanted += [x] if x.requires_grad and not side.has("ranks") else []
    if loss.requires_grad and wanted:
        side.observe_all("gradient", torch.autograd.grad(loss, wanted, allow_unused=True))


@training(without=(*_SECOND_ORDER, "ranks"))
def gradient_penalty(side: Side, step: Step) -> None:
    # With no rows, a hook on a tensor of forward may be given None in the second backward.
    x = side.batch(max(1, step.rows), step.seed, requires_grad=True)
    loss = side.loss(side.run(x))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
    side.observe("gradient of the input", grad)
    if grad is not None:
        side.backward(loss + grad.square().sum().to(loss.device) * 0.1)


@action(without=(*_SECOND_ORDER, "buffers of ranks"))
def hessian_product(side: Side, step: Step) -> None:
    """The product of the Hessian and of the gradient; of the third order, if the seed says so."""
    loss, trained = side.loss_of(step.rows, step.seed), side.trained()
    third = step.seed % 4 == 0 and not side.has("batch norm")  # its third derivative in torch is wrong
    for order in range(1, 4 if third else 3):
        if not loss.requires_grad or not trained:
            return
        grads = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        side.observe_all(f"derivative of order {order}", grads)
        loss = torch.as_tensor(sum((grad * grad.detach()).sum() for grad in grads if grad is not None))


@training()
def penalty_on_parameters(side: Side, step: Step) -> None:
    """A part of the loss does not go through the model."""
    loss = side.loss_of(step.rows, step.seed)
    side.backward(loss + side.core.head.weight.square().sum().to(loss.device))


@action()
def zeroed_gradients(side: Side, step: Step) -> None:
    side.optimizer.zero_grad(set_to_none=False)
    side.backward(side.loss_of(step.rows, step.seed))
    side.step()


@training(without=("sparse",))
def clipped_gradients(side: Side, step: Step) -> None:
    side.backward(side.loss_of(step.rows, step.seed))
    side.observe("norm", nn.utils.clip_grad_norm_(list(side.model.parameters()), 1.0))


@action(without=("sparse", "float64", "ranks"))
def lbfgs(side: Side, step: Step) -> None:
    if not side.trained():
        return
    optimizer = torch.optim.LBFGS(side.trained(), lr=1e-3, max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = side.loss_of(step.rows, step.seed)
        side.backward(loss)
        return float(loss)

    optimizer.step(closure)


@action(without=("sparse", "float64", "ranks"))
def gradient_scaler(side: Side, step: Step) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    side.optimizer.zero_grad()
    loss = side.loss_of(step.rows, step.seed)
    if loss.requires_grad:
        scaler.scale(loss).backward()
        if any(parameter.grad is not None for parameter in side.model.parameters()):
            scaler.step(side.optimizer)
            scaler.update()


@change()
def another_optimizer(side: Side, step: Step) -> None:
    side.make_optimizer(None if side.has("sparse") else random.Random(step.seed).choice(list(OPTIMIZERS)))


@action()
def gradients_of_ones_own(side: Side, step: Step) -> None:
    """The caller replaces gradients between two backwards, or removes them."""
    side.train(step.rows, step.seed)
    draw = random.Random(step.seed)
    for _, parameter in side.parameters():
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            parameter.grad = parameter.grad.clone() if draw.random() < 0.5 else None
    side.backward(side.loss_of(step.rows, step.seed + 1))


# The plain module's column is a view of what it saved for backward; the wrapper's has memory of its own.
@training(without=("writes_input", "outputs: column", "outputs: sample list"))
def writes_into_output(side: Side, step: Step) -> None:
    outputs = floats_in(side.forward(step.rows, step.seed))
    if outputs:
        outputs[0].mul_(2)
        side.backward(side.loss(outputs[0]))


@action(without=("buffers of ranks",))
def forward_without_backward(side: Side, step: Step) -> None:
    side.forward(step.rows, step.seed)
    side.train(step.rows, step.seed + 1)


@training()
def output_deleted_before_backward(side: Side, step: Step) -> None:
    loss = side.loss_of(step.rows, step.seed)
    gc.collect(0)
    side.backward(loss)


# ---- modes ---------------------------------------------------------------------------------------


# Without gradients, outputs of a scripted module may require some: that depends on how often it has run.
# Under a launcher, forwards without gradients stay in their process, also in one that has no rows: C15.
@training(without=("scripted", "ranks"))
def eval_between(side: Side, step: Step) -> None:
    """Forwards in eval mode, without gradients and with them, and between a forward and its backward."""
    was_training = side.model.training
    loss = None
    if not side.has("batch norm"):  # whose running statistics would change between
        loss = side.loss_of(step.rows, step.seed)
    side.model.eval()
    with torch.no_grad():
        side.forward(step.rows, step.seed + 1)
    output = side.forward(step.rows, step.seed + 2)
    if loss is not None or not side.has("written in backward"):  # replicas run a checkpoint in the mode of its forward
        side.model.train(was_training)
    side.backward(side.loss(output) if loss is None else loss)
    side.model.train(was_training)


@change(without=("batch statistics of ranks",))  # an error that says what to write
def eval_mode(side: Side, step: Step) -> None:
    side.model.eval()


@change()
def train_mode(side: Side, step: Step) -> None:
    side.model.train()


# Under a launcher, a forward without gradients stays in its process: buffers and batch norm would be its own.
@action(without=("ranks", "scripted"))
def no_grad(side: Side, step: Step) -> None:
    with torch.no_grad():
        side.forward(step.rows, step.seed)


@action(without=("ranks", "scripted"))
def inference_mode(side: Side, step: Step) -> None:
    with torch.inference_mode():
        side.forward(step.rows, step.seed, requires_grad=False)


@action()
def anomaly_mode(side: Side, step: Step) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        side.train(step.rows, step.seed)


@training(without=("compiled", "reentrant", "out_of_memory"))  # the plain composition rescues nothing
def backward_in_a_mode(side: Side, step: Step) -> None:
    """Forward was outside of the mode, which other threads cannot join; gradients are asked for in every way."""
    if not side.has("written in backward"):  # the plain composition runs, in which checkpoints write replicas' buffers
        with Scaling():
            side.backward(side.loss_of(step.rows, step.seed))
    loss = side.loss_of(step.rows, step.seed + 1)
    with Scaling():
        side.backward(loss, retain_graph=True)
    side.backward(loss)


# The plain composition runs, in which checkpoints write into the replicas' buffers.
@action(without=("ranks", "rescue", "written in backward"))
def tensors_saved_on_cpu(side: Side, step: Step) -> None:
    with torch.autograd.graph.save_on_cpu():
        side.train(step.rows, step.seed)


# TorchScript runs another graph once it has seen a function twice, and torch's checkpoint finds other saved tensors. A
# parameter that a reentrant checkpoint returns becomes an output of itself, in torch, and backward never ends.
@training(without=(*_NOT_TWICE, "ranks", "asynchronous", "scripted", "outputs: a parameter"))
def checkpoint_around(side: Side, step: Step) -> None:
    reentrant = step.seed % 3 == 0
    x = side.batch(step.rows, step.seed, requires_grad=True if reentrant else None)
    side.backward(side.loss(checkpoint(side.run, x, use_reentrant=reentrant)))


@action(weight=0.05, without=("compiled", "ranks", "scripted"))
def compiled_around(side: Side, step: Step) -> None:
    backend = random.Random(step.seed).choice(("eager", "aot_eager"))
    side.train(step.rows, step.seed, model=torch.compile(side.model, backend=backend))
    torch.compiler.reset()


@contextlib.contextmanager
def in_float32(side: Side, step: Step) -> Any:
    """Let the model be in single precision in the block; afterwards its values are as before, bit for bit."""
    side.optimizer.zero_grad()
    values = side.values()
    (side.model if side.has_part else random.Random(step.seed).choice((side.core, side.model))).float()
    side.dtype = torch.float32
    try:
        yield
    finally:
        side.optimizer.zero_grad()
        side.model.double()
        side.dtype = torch.float64
        side.restore(values)
        side.make_optimizer()


# The gradient of a tensor that is not the module's is in double precision, and rounded to single on its way.
@action(without=("float64", "scripted", "compiled", "profile", "outside"))
def float32(side: Side, step: Step) -> None:
    with in_float32(side, step):
        side.backward(side.loss_of(step.rows, step.seed))
        side.observe_all("gradient", [parameter.grad for _, parameter in side.parameters()])


@action(without=("float64", "scripted", "compiled", "batch norm", "sparse", "by row", "ranks", "outside"))
def autocast(side: Side, step: Step) -> None:
    with in_float32(side, step):
        with torch.autocast("cpu", torch.bfloat16):
            output = side.run(side.batch(step.rows, step.seed, requires_grad=False))
        side.observe_all("output", [t.bfloat16() for t in tensors_in(output) if t.is_floating_point()])
        side.backward(side.loss(output))


# ---- threads, failures, interrupts ---------------------------------------------------------------


@action(weight=0.3)
def another_thread(side: Side, step: Step) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(side.train, step.rows, step.seed).result()


# Forward changes the plain module meanwhile; with the wrapper each call has replicas of its own.
_NOT_IN_TWO_THREADS = (
    "buffers",
    "hooks in forward",
    "reentrant",
    "attributes",
    "normed weight",
    "parametrized",
    "compiled",
)


@action(without=("ranks", "torch.func", *_NOT_IN_TWO_THREADS))
def two_threads(side: Side, step: Step) -> None:
    """Two threads use the model at the same time."""
    batches = [side.batch(step.rows + number, step.seed + number) for number in range(2)]

    def differentiate(x: Tensor) -> list[Any]:
        output = side.run(x)
        loss, trained = side.loss(output), side.trained()
        is_possible = loss.requires_grad and trained
        return [*tensors_in(output), *(torch.autograd.grad(loss, trained, allow_unused=True) if is_possible else ())]

    with ThreadPoolExecutor(2) as pool:
        for number, tensors in enumerate(pool.map(differentiate, batches)):
            side.observe_all(f"of thread {number}, tensor", tensors)


class Scaling(TorchDispatchMode):
    """Halves the products of matrices: what another thread computes is not halved."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func is torch.ops.aten.mm.default else found


class DeliberateError(Exception):
    """What a hook raises."""


def _raise_for_some(module: nn.Module, args: Any) -> None:
    """Raise in the replicas that have a row of a kind. After a layer norm all sums are zero, but for rounding."""
    if (args[0].detach().sum(1) > 1e-3).any():
        raise DeliberateError


class _Interrupts:
    """A hook that sends Ctrl-C to the process, when the thread that made it gets there: in forward or backward."""

    def __init__(self, in_backward: bool) -> None:
        self.in_backward, self.place = in_backward, (os.getpid(), threading.get_ident())

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if not self.in_backward:
            self.interrupt()
        elif output.requires_grad:
            output.register_hook(self.interrupt)

    def interrupt(self, _: object = None) -> None:
        if self.place == (os.getpid(), threading.get_ident()):
            signal.raise_signal(signal.SIGINT)


def _cut_off(side: Side, step: Step, hook: Any, run: Callable[[], object], in_backward: bool = False) -> None:
    """Run what a hook cuts off; then the training goes on.

    A forward that is cut off leaves buffers as they were. The plain module's does not; nor does one device alone, which
    measured shares may try, or choose.
    """
    values = side.values()
    runs_itself = side.is_plain or any(wrapper._options.measured is not None for wrapper in side.wrappers())
    try:
        run()
        side.observe("cut off", False)
    except (DeliberateError, KeyboardInterrupt):
        side.observe("cut off", True)
        if runs_itself and not in_backward:
            side.restore(values)
    finally:
        hook.remove()
    seed_torch(step.seed)
    side.train(step.rows, step.seed + 1)


# With one replica the wrapped module runs itself: what it has written stays, as it does in the plain one; so do
# weights. What replicas have assigned is dropped, as row N11 says.
_NOT_CUT_OFF = ("ranks", "one replica", "lists", "weights", "left alike", "hooks alike")


@action(without=_NOT_CUT_OFF)
def failure_in_forward(side: Side, step: Step) -> None:
    hook = side.core.head.register_forward_pre_hook(_raise_for_some)
    _cut_off(side, step, hook, lambda: side.run(side.batch(step.rows, step.seed)))


@action(weight=0.5, without=(*_NOT_CUT_OFF, "profile"))
def interrupt(side: Side, step: Step) -> None:
    """Ctrl-C in forward or in backward."""
    in_backward = step.seed % 2 == 0
    hook = side.core.head.register_forward_hook(_Interrupts(in_backward))
    side.optimizer.zero_grad()
    x = side.batch(step.rows, step.seed, requires_grad=False)
    _cut_off(side, step, hook, lambda: side.backward(side.loss(side.run(x))), in_backward)


# ---- changes of the model ------------------------------------------------------------------------


def _draw_parameter(side: Side, step: Step) -> nn.Parameter:
    return random.Random(step.seed).choice(side.parameters())[1]


@change()
def freeze(side: Side, step: Step) -> None:
    parameter = _draw_parameter(side, step)
    parameter.requires_grad_(False)
    if step.seed % 2:
        parameter.grad = None


@change()
def unfreeze(side: Side, step: Step) -> None:
    for _, parameter in side.parameters():
        parameter.requires_grad_(True)


@action(without=("ranks",))
def freeze_all(side: Side, step: Step) -> None:
    side.model.requires_grad_(False)
    side.backward(side.loss_of(step.rows, step.seed))
    side.model.requires_grad_(True)
    side.train(step.rows, step.seed + 1)


@change()
def replace_parameter(side: Side, step: Step) -> None:
    layers = [m for m in side.core.modules() if type(m) in (nn.Linear, nn.LayerNorm, nn.Conv1d, nn.BatchNorm1d)]
    layer = random.Random(step.seed).choice(layers)
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if "_" not in name:  # weight_g, weight_v
            setattr(layer, name, nn.Parameter(parameter.detach() * 0.9, parameter.requires_grad))
    side.make_optimizer()


@change()
def register_or_remove(side: Side, step: Step) -> None:
    """A parameter and a buffer that nothing uses."""
    if hasattr(side.core, "extra"):
        del side.core.extra, side.core.extra_buffer
    else:
        side.core.register_parameter("extra", nn.Parameter(torch.ones(5, device=side.device)))
        side.core.register_buffer("extra_buffer", torch.ones(5, device=side.device))
    side.make_optimizer()


@change()
def swap_layer(side: Side, step: Step) -> None:
    if len(side.core.blocks):
        side.core.blocks[step.seed % len(side.core.blocks)] = linear().to(side.device)
    side.make_optimizer()


@change()
def tie_layers(side: Side, step: Step) -> None:
    side.core.head = nn.Linear(WIDTH, NUM_OUTPUTS).to(side.device)
    side.core.blocks.append(linear().to(side.device))
    side.core.blocks.append(side.core.blocks[-1])
    side.core.head_again = side.core.head
    side.make_optimizer()


@change()
def change_attribute(side: Side, step: Step) -> None:
    side.core.residual = not side.core.residual


@change()
def change_values(side: Side, step: Step) -> None:
    parameter = _draw_parameter(side, step)
    if step.seed % 2:
        parameter.data = parameter.data * 0.9
    else:
        with torch.no_grad():
            parameter.mul_(0.95)


@change(only=("buffers",))
def change_buffers(side: Side, step: Step) -> None:
    """In place, or by assigning other tensors."""
    for module in side.core.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_floating_point():
                continue
            if step.seed % 2:
                setattr(module, name, buffer.clone() * 0.9)
            else:
                buffer.mul_(0.9)


@change(without=("out_of_memory",))  # in parts, buffers may not change before backward
def overlapping_buffers(side: Side, step: Step) -> None:
    whole = torch.ones(WIDTH, device=side.device)
    side.core.register_buffer("whole", whole)
    side.core.register_buffer("part", whole[:3])


def _double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _halve_gradient(grad: Tensor) -> Tensor:
    return grad * 0.5


@action()
def hooks_for_a_while(side: Side, step: Step) -> None:
    hook = side.core.head.register_forward_hook(_double_output)
    side.train(step.rows, step.seed)
    hook.remove()
    if side.core.head.weight.requires_grad:
        hook = side.core.head.weight.register_hook(_halve_gradient)
        side.train(step.rows, step.seed + 1)
        hook.remove()
    side.train(step.rows, step.seed + 2)


def _double_output_of_linear(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if type(module) is nn.Linear else None


@action(without=("compiled", "scripted", "checkpoint", "reentrant"))
def hook_of_all_modules(side: Side, step: Step) -> None:
    hook = nn.modules.module.register_module_forward_hook(_double_output_of_linear)
    try:
        side.train(step.rows, step.seed)
    finally:
        hook.remove()


_KEPT = "a hook stores"


class _Keeps:
    """A hook that keeps outputs of a layer, or its gradients, in one of several places."""

    def __init__(self, how: str) -> None:
        self.how, self.kept, self.last, self.calls = how, {}, None, 0

    def __call__(self, module: nn.Module, *args: Any) -> None:
        seen = (args[-1][0] if isinstance(args[-1], tuple) else args[-1]).detach()
        if self.how == "counter":
            self.calls += 1
        elif self.how == "attribute":
            self.last = seen
        else:
            self.kept[{"name": "output", "list": len(self.kept)}[self.how]] = seen

    def left(self) -> list[Any]:
        return [self.calls, self.last, *self.kept.values()]


@action(weight=0.5, without=("ranks", "own_gather", "compiled", "checkpoint", "reentrant"), said=(_KEPT,))
def hooks_that_observe(side: Side, step: Step) -> None:
    """By name, in a list, or in an attribute; each once, and then again."""
    draw = random.Random(step.seed)
    keep, head = _Keeps(draw.choice(("name", "list", "attribute", "counter"))), side.core.head
    with draw.choice((head.register_forward_hook, head.register_full_backward_hook))(keep):
        for number in range(2):
            side.train(step.rows + number, step.seed + number)
            side.observe("number of things kept", len(keep.left()))
            side.observe_all("kept", keep.left())


# On accelerators such a backward is an error that says what to write, as is a checkpoint around the wrapper.
@action(without=("ranks", "asynchronous", "compiled", *_NOT_TWICE, "checkpoint"))
def losses_of_hooks(side: Side, step: Step) -> None:
    """The loss is a sum of what hooks have kept, perhaps beside a loss on the output."""
    kept: list[Tensor] = []
    side.optimizer.zero_grad()
    with side.core.head.register_forward_hook(lambda m, args, output: kept.append(output.square().sum())):
        loss = side.loss_of(step.rows, step.seed)
    side.backward(sum(kept, loss * (step.seed % 2)))
    side.step()


# ---- copies and checkpoints ----------------------------------------------------------------------


@change(without=_REMEMBERS_GRAPHS)
def deepcopy(side: Side, step: Step) -> None:
    side.model.zero_grad()
    side.use(copy.deepcopy(side.model))


@change(without=(*_REMEMBERS_GRAPHS, "scripted", "compiled", "parametrized", "containers"))
def unpickle(side: Side, step: Step) -> None:
    side.model.zero_grad()
    side.use(pickle.loads(pickle.dumps(side.model)))


@change(without=("ranks",))
def load_state_dict(side: Side, step: Step) -> None:
    values = {name: v * 0.9 if v.is_floating_point() else v.clone() for name, v in side.core.state_dict().items()}
    side.core.load_state_dict(values, assign=step.seed % 3 == 0)
    side.make_optimizer()


@action()
def checkpoint_and_resume(side: Side, step: Step) -> None:
    """Two steps, of which the second is undone, by way of a file."""
    side.train(step.rows, step.seed)
    file = io.BytesIO()
    torch.save({"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}, file)
    side.train(step.rows, step.seed + 1)
    file.seek(0)
    loaded = torch.load(file)
    side.model.load_state_dict(loaded["model"])
    side.optimizer.load_state_dict(loaded["optimizer"])
    side.train(step.rows, step.seed + 2)


@action(without=(*_REMEMBERS_GRAPHS, "scripted", "float64", "compiled", "ranks"))
def moving_average(side: Side, step: Step) -> None:
    average = AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=step.seed % 2 == 0)
    for number in range(2):
        side.train(step.rows, step.seed + number)
        average.update_parameters(side.model)
    average.eval()
    with torch.no_grad():
        side.forward(step.rows, step.seed + 3, model=average)
    side.use(average.module)
    side.model.train()


@action(
    weight=4, only=("batch norm",), without=("inputs: keyword", "wraps: part", "wraps: two", "wraps: both", "ranks")
)
def update_batch_norm(side: Side, step: Step) -> None:
    if side.program.inputs == "tensor":
        batches = [side.batch(step.rows + number, step.seed + number, requires_grad=False) for number in range(3)]
        update_bn(batches, side.model)


# A checkpoint would run again with the module's own parameters.
@action(only=("wraps: part", "wraps: model"), without=("ranks", *_NOT_TWICE, "checkpoint", "tied", "containers"))
def functional_call(side: Side, step: Step) -> None:
    """With leaves in place of the parameters, or with other tensors that have a history."""
    outer = nn.Sequential(side.model) if side.has("inputs: tensor") and side.has("wraps: model") else side.model
    if outer is side.model and side.has("wraps: model"):
        return  # torch refuses a DataParallel that is no part of another module
    as_leaves = step.seed % 2 == 0
    given = {}
    for name, parameter in outer.named_parameters():
        value = parameter * 1.1
        given[name] = value.detach().requires_grad_(parameter.requires_grad) if as_leaves else value
    side.optimizer.zero_grad()
    output = side.run(
        side.batch(step.rows, step.seed), lambda *args, **kwargs: torch.func.functional_call(outer, given, args, kwargs)
    )
    side.backward(side.loss(output))
    if as_leaves:
        side.observe_all("gradient", [value.grad for value in given.values()])


# ---- what only wrappers have ---------------------------------------------------------------------


@change()
def refresh(side: Side, step: Step) -> None:
    for wrapper in side.wrappers():
        wrapper.refresh()


@action(weight=2)
def other_shares(side: Side, step: Step) -> None:
    for wrapper in side.wrappers():
        num_replicas = len(wrapper.devices)
        last = [0] * (num_replicas - 1) + [1]
        wrapper.shares = random.Random(step.seed).choice(("chunk", "even", "measured", [1] * num_replicas, last))
    side.train(step.rows, step.seed)
    side.train(step.rows, step.seed + 1)


@action(only=("wraps: model",))
def call_by_name(side: Side, step: Step) -> None:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return side.model(*args, **kwargs) if side.is_plain else side.model.call("forward", *args, **kwargs)

    side.train(step.rows, step.seed, model=forward)


# Of Python's generator and numpy's nothing is said there: row N6 of docs/behaviour.md.
_BATCHES_OF_TENSORS = (
    "wraps: part",
    "wraps: two",
    "wraps: both",
    "writes_input",
    "ranks",
    "drawn elsewhere",
    "own_gather",
)


_SAID_FORMS = [
    *(f"inputs: {name}" for name, form in INPUTS.items() if form.said),
    *(f"outputs: {name}" for name, form in OUTPUTS.items() if form.said),
]


# What forward leaves behind is said to differ where it follows from the order in which replicas finish; and what a
# message may say has other words here. With one device, two replicas are compared.
@change(
    without=(
        "wraps: part",
        "wraps: two",
        "ranks",
        "one replica",
        "attributes",
        "lists",
        "drawn elsewhere",
        *_SAID_FORMS,
    )
)
def verify(side: Side, step: Step) -> None:
    """It says that all is the same, and leaves all as it was."""
    x = side.batch(step.rows, step.seed, requires_grad=False if side.program.writes_input else None)
    inputs, found = side.inputs(x), "same"
    if not side.is_plain:
        report = unisono.verify(side.model, inputs, step=lambda model, args, kwargs: model(*args, **kwargs), show=False)
        found = found if report.same else str(report)
    side.observe("report of verify", found)


@action(weight=3, only=("inputs: tensor",), without=_BATCHES_OF_TENSORS)
def map_batches(side: Side, step: Step) -> None:
    was_training = side.model.training
    side.model.eval()
    batches = [side.batch(step.rows + number, step.seed + number, requires_grad=False) for number in range(4)]
    with torch.no_grad():
        outputs = iter(map(side.model, batches) if side.is_plain else side.model.map(batches))
        for _ in batches:
            with side.on_a_stream():
                side.observe_all("output", tensors_in(next(outputs)))
    side.model.train(was_training)


@action(weight=3, only=("inputs: tensor",), without=(*_BATCHES_OF_TENSORS, "outputs: column", "outputs: narrow dtypes"))
def evaluate(side: Side, step: Step) -> None:
    def metric(output: Any, target: Tensor) -> float:
        return float((next(tensors_in(output)).sum(1) - target).square().mean())

    was_training = side.model.training
    side.model.eval()
    batches = [side.batch(step.rows + 1 + number, step.seed + number, requires_grad=False) for number in range(3)]
    pairs = [(batch, batch[:, 0]) for batch in batches]
    if side.is_plain:
        with torch.no_grad():
            total = sum(metric(side.model(x), target) * len(x) for x, target in pairs)
        value = total / sum(map(len, batches))
    else:
        value = side.model.evaluate(pairs, metric)
    side.observe("metric", torch.tensor(value))
    side.model.train(was_training)
