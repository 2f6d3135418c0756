"""The training loop of `manyhands train`, one story from top to bottom.

    manyhands train                                       # digits, every device
    manyhands train --devices 'cpu*2' --model mlp         # two replicas on the CPU, done in a moment

    torchrun --nproc-per-node 2 -m manyhands train        # two processes

A step is: rows, learning rate, forward, backward, update, record. An epoch is: steps, evaluation, record, picture,
checkpoint. That the model runs on several devices cannot be seen here, which is the point. Of several processes each
takes its part of every batch, and they add up their losses; otherwise all do the same.

Nothing in a step waits for an accelerator: rows are where they are needed, or are queued to go there, and losses are
read a step later (under_way.py).
"""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from manyhands.console.errors import Interrupted, OptionError
from manyhands.runtime import devices, torch_private
from manyhands.training.compiling import cannot_compile, uncompiled
from manyhands.training.display import Display
from manyhands.training.interrupts import StopRequest
from manyhands.training.metrics import EpochRecord
from manyhands.training.options import Options
from manyhands.training.ranks import ALONE, Ranks
from manyhands.training.run import Run, describe
from manyhands.training.run_folder import RunFolder
from manyhands.training.schedule import epoch_batches, learning_rate
from manyhands.training.under_way import PendingStep, UnderWay
from manyhands.training.work import Work


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the test accuracy after its last epoch, what an epoch of training took, and where.

    `seconds_per_epoch` is the median over the epochs (the lower one of two); `places` are the devices of each process.
    """

    test_accuracy: float
    seconds_per_epoch: float
    places: Sequence[Sequence[torch.device]]


def train(
    options: Options, folder: RunFolder, display: Display, *, resume: bool = False, ranks: Ranks = ALONE
) -> Outcome:
    """Train as the options say, and leave in the folder what run_folder.py lists.

    Args:
        options: what to do.
        folder: where the results go; without `resume` a run that it holds is deleted.
        display: shown what happens.
        resume: go on from the checkpoint in the folder.
        ranks: the processes that share the work; all of them call this, alike but for `options.devices`.

    Raises:
        TrainingError, DataError: it cannot start or go on; the message is one line for the user.
        Interrupted: a signal asked it to stop, and the last finished step has been saved.
    """
    run = Run.begin(options, folder, display, resume=resume, ranks=ranks)
    products = devices.float32_products(run.devices[0], rounded=options.precision != "fp32")
    with contextlib.closing(run), products, StopRequest(ranks) as stop:
        under_way = UnderWay(run, display)
        try:
            for epoch in range(run.progress.epochs, options.epochs):
                _train_epoch(run, epoch, under_way, display, stop)
                _finish_epoch(run, epoch, display, stop)
        except Interrupted:
            under_way.record()
            run.keep()
            display.say(f"stopped after step {run.progress.steps}; to go on: manyhands train --resume {folder}")
            raise
        except torch_private.compiler_errors() as error:
            if stop.received is None:
                raise cannot_compile(run.devices[0], error) from error
            # A signal from the terminal ends the programs of the compiler, too, in the middle of a step.
            display.say(f"stopped while compiling; what had been saved stays in {folder}")
            raise Interrupted(stop.received) from error
    return _outcome(run)


def _train_epoch(run: Run, epoch: int, under_way: UnderWay, display: Display, stop: StopRequest) -> None:
    """Take the steps of an epoch that have not been taken yet."""
    options, optimizer = run.options, run.optimizer
    where = run.dataset.train_labels.device
    batches = epoch_batches(run.num_rows, options.batch_size, seed=options.seed, epoch=epoch, device=where)
    first_step = epoch * run.steps_per_epoch

    run.model.train()
    under_way.start_clock()
    for step in range(run.progress.steps, first_step + run.steps_per_epoch):
        stop.check()

        rate = learning_rate(
            step,
            peak=options.lr,
            schedule=options.schedule,
            warmup_steps=round(options.warmup_epochs * run.steps_per_epoch),
            total_steps=options.epochs * run.steps_per_epoch,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate

        # The batch is taken in as many parts as --accumulate says, and of each part this process takes its own. Each
        # loss is a sum divided by the rows of the whole batch, so that losses and gradients add up to those of the
        # mean, however uneven the parts are.
        rows = batches[step - first_step]
        if options.compile and len(rows) not in run.sizes_compiled:
            display.busy(f"compiling the model for steps of {len(rows)} rows")
            run.sizes_compiled.add(len(rows))
        loss_of_parts = torch.zeros((), device=run.devices[0])
        work = Work(run.devices)
        optimizer.zero_grad()
        for part, is_last in _parts(rows, options.accumulate):
            mine = run.ranks.part_of(part)
            # What has to go to other processes goes there once, with the last part.
            to_others = contextlib.nullcontext() if is_last else run.model.no_sync()
            with _explained(run), to_others, work.of_part(run.model, len(mine)):
                loss_of_part = _sum_of_losses(run, mine) / len(rows)
                loss_of_part.backward()  # type: ignore[no-untyped-call]
            loss_of_parts += loss_of_part.detach()
        loss = devices.begin_to_read(loss_of_parts)
        optimizer.step()

        under_way.add(PendingStep(step, epoch, rate, len(rows), loss, work.shares))
        if under_way.long_unsaved:
            under_way.record()
            run.keep()
            under_way.start_clock()  # saving is not training
    under_way.record()


def _finish_epoch(run: Run, epoch: int, display: Display, stop: StopRequest) -> None:
    """Evaluate, and record, draw and save what the epoch came to."""
    began = time.perf_counter()
    test_loss, test_accuracy = evaluate(run, stop)
    test_seconds = time.perf_counter() - began
    if not math.isfinite(test_loss):
        raise run.diverged(f"the test loss is {test_loss} after epoch {epoch + 1}", run.options.lr)

    record = EpochRecord(
        epoch=epoch + 1,
        step=run.progress.steps,
        train_loss=run.metrics.train_loss(epoch + 1),
        test_loss=test_loss,
        test_accuracy=test_accuracy,
        train_seconds=run.metrics.train_seconds(epoch + 1),
        test_seconds=test_seconds,
    )
    run.progress = replace(run.progress, epochs=epoch + 1)
    run.metrics.add(record)
    display.say(
        f"epoch {record.epoch}/{run.options.epochs}: train loss {record.train_loss:.4f}, "
        f"test accuracy {record.test_accuracy:.4f}, {record.train_seconds:.1f} s of training"
    )
    run.keep()
    run.draw()


def evaluate(run: Run, stop: StopRequest) -> tuple[float, float]:
    """Return the mean loss and the accuracy over the test rows, each counted once, on all replicas of all processes."""
    images, labels = run.dataset.test_images, run.dataset.test_labels
    first_device = run.devices[0]
    of_batches = [torch.zeros(2, device=first_device)]  # loss and number of correct answers of each
    as_written = uncompiled() if run.options.compile else contextlib.nullcontext()
    run.model.eval()
    with torch.inference_mode(), as_written, _explained(run):
        for first in range(0, len(labels), run.options.batch_size):
            stop.check()
            last = min(first + run.options.batch_size, len(labels))
            rows = run.ranks.part_of(torch.arange(first, last, device=labels.device))
            if not len(rows):
                continue
            with _precision(run):
                logits = run.model(devices.rows_on(first_device, images, rows)).float()
            answers = devices.rows_on(first_device, labels, rows)
            loss_of_batch = F.cross_entropy(logits, answers, reduction="sum")
            of_batches.append(torch.stack([loss_of_batch, (logits.argmax(dim=1) == answers).sum().float()]))
    # Read once: each reading waits for the device. Added up in Python, whose numbers have 64 bits on every machine.
    loss, correct = run.ranks.sum(*map(math.fsum, zip(*torch.stack(of_batches).tolist(), strict=True)))
    return loss / len(labels), correct / len(labels)


def _parts(rows: Tensor, num_parts: int) -> Iterator[tuple[Tensor, bool]]:
    """Yield so many parts of a batch, none of them empty, and whether each is the last."""
    parts = rows.tensor_split(min(num_parts, len(rows)))
    for number, part in enumerate(parts, start=1):
        yield part, number == len(parts)


def _sum_of_losses(run: Run, rows: Tensor) -> Tensor:
    """Return the sum of the losses of some training rows, with the graph to walk backward."""
    dataset, first_device = run.dataset, run.devices[0]
    images, labels = (devices.rows_on(first_device, t, rows) for t in (dataset.train_images, dataset.train_labels))
    with _precision(run):
        logits = run.model(images)
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def _precision(run: Run) -> contextlib.AbstractContextManager[object]:
    """Return what the model runs under: autocast to bfloat16 if that was asked for."""
    return torch.autocast(run.devices[0].type, torch.bfloat16, enabled=run.options.precision == "bf16")


@contextlib.contextmanager
def _explained(run: Run) -> Iterator[None]:
    """Turn what torch raises when batch size and devices do not go together into what to do about it."""
    options = run.options
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OptionError(
            f"out of memory with --batch-size {options.batch_size} on {describe(*run.places)}: "
            f"--accumulate {2 * options.accumulate} takes about half at a time"
        ) from error
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        each, remedy = "batch norm", f"--batch-size {4 * options.accumulate}"
        if not options.sync_batch_norm:
            each = "some replica's batch norm"
            num_replicas = sum(map(len, run.places))
            remedy = f"--batch-size {4 * num_replicas * options.accumulate}, or leave out --no-sync-batch-norm"
        raise OptionError(
            f"--batch-size {options.batch_size} on {describe(*run.places)} leaves {each} a single row, which it cannot "
            f"train on: take {remedy}"
        ) from error


def _outcome(run: Run) -> Outcome:
    epochs = run.metrics.epochs
    seconds = statistics.median_low(record.train_seconds for record in epochs)  # the first one may have compiled
    return Outcome(epochs[-1].test_accuracy, seconds, run.places)
