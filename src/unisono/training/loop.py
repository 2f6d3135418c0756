"""The training loop of `unisono train`, one story from top to bottom.

    unisono train                                       # digits, every device
    unisono train --devices 'cpu*2' --model mlp         # two replicas on the CPU, done in a moment

    torchrun --nproc-per-node 2 -m unisono train        # two processes

A step is: rows, learning rate, forward, backward, update, record. An epoch is: steps, evaluation, record, checkpoint,
picture. The loop is the same on one device and on several, compiled or not (computation.py). Each of several processes
takes its shard of every batch, and the losses are summed over the processes.

Nothing in a step waits for an accelerator: rows are on the device or are copied to it asynchronously. Reading a loss
waits for the device, so there a step's loss is read, and the step recorded, when the next step has been queued: the
device always has work, and the numbers are the same. All steps are recorded before a checkpoint is saved.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from unisono.console.device_option import describe
from unisono.console.errors import Interrupted, OptionError
from unisono.console.progress import Progress
from unisono.data_parallel import DataParallel
from unisono.runtime import devices as _devices
from unisono.runtime.contexts import contextmanager
from unisono.runtime.precision import float32_products
from unisono.runtime.torch_private import compiler
from unisono.training.computation import cannot_compile
from unisono.training.metrics import EpochRecord
from unisono.training.observers import Observer
from unisono.training.options import Options
from unisono.training.ranks import ALONE, Ranks
from unisono.training.run import PendingStep, Run
from unisono.training.run_folder import RunFolder
from unisono.training.schedule import epoch_batches, learning_rate, num_steps


def train(
    options: Options,
    folder: RunFolder,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    observers: Mapping[str, Observer] = MappingProxyType({}),
    *,
    resume: bool = False,
    profile: bool = False,
) -> Run:
    """Train as the options say, and write the files of a run (run_folder.py); return the run that has ended.

    Args:
        options: what to train, and how.
        folder: for the results; without `resume` a run in it is deleted.
        progress: shows the steps (default: not at all).
        ranks: the processes that train together; all of them call this, with equal arguments but for `options.devices`.
        observers: who is told of each step and epoch, by name; called in the first process only.
        resume: go on from the checkpoint in the folder.
        profile: whether the steps are profiled.

    Raises:
        CommandError: it cannot start or go on; the message is one line for the user.
        Interrupted: a signal asked it to stop, and the last finished step has been saved.
    """
    progress = progress or Progress()
    with (
        contextlib.closing(folder),  # which other runs may use then
        contextlib.closing(Run(options, folder, progress, ranks, observers, resume=resume, profile=profile)) as run,
        float32_products(run.devices[0], rounded=options.precision != "fp32"),
        run.stop,
        run.observers,
        _explained(run),
    ):
        try:
            for epoch in range(len(run.metrics.epochs), options.epochs):
                with run.profiled() as run.profile:
                    _train_epoch(run, epoch)
                _finish_epoch(run, epoch)
        except Interrupted:
            run.save()
            progress.say(f"stopped after step {run.metrics.num_steps}; to resume: unisono train --resume {folder}")
            raise
    return run


def _train_epoch(run: Run, epoch: int) -> None:
    """Take the steps of an epoch that are not finished yet."""
    options = run.options
    labels = run.dataset.train_labels
    batches = epoch_batches(len(labels), options.batch_size, seed=options.seed, epoch=epoch, device=labels.device)
    first_step = epoch * run.steps_per_epoch

    run.model.train()
    run.start_clock()
    for step in range(run.metrics.num_steps, first_step + run.steps_per_epoch):
        run.stop.check()
        rows = batches[step - first_step]
        rate = learning_rate(step, peak=options.lr, steps_per_epoch=run.steps_per_epoch, epochs=options.epochs)
        loss = _take_step(run, rows, rate)
        run.pending.append(PendingStep(step + 1, epoch + 1, rate, len(rows), loss, _replicas_in_words(run.model)))
        run.record(all_but=run.steps_ahead)
        if run.should_save:
            run.save()
            run.start_clock()
    run.record()


def _take_step(run: Run, rows: Tensor, rate: float) -> Callable[[], float]:
    """Take a step; return what waits for this process's part of the loss."""
    # This process takes its shard of the batch. The loss is a sum divided by the rows of the whole batch. So losses and
    # gradients add up to those of the mean, also where the shards are uneven.
    images, labels = run.dataset.train_images, run.dataset.train_labels
    run.computation.begin_step()
    loss = run.computation.training_loss(images, labels, run.ranks.shard_of(rows), len(rows))
    loss.backward()  # type: ignore[no-untyped-call]
    read_loss = _begin_to_read(loss.detach().clone())  # a CUDA graph's memory is the next step's, too
    run.computation.update(rate)
    return read_loss


def _begin_to_read(number: Tensor) -> Callable[[], float]:
    """Begin to copy a 0-dim tensor to the host; return a function that waits for it and returns the number."""
    if _devices.computes_on_host(number.device):
        value = number.item()
        return lambda: value
    copy, is_there = _devices.begin_copy_to_host(number)

    def read() -> float:
        is_there(True)
        return copy.item()

    return read


def _replicas_in_words(model: DataParallel) -> str:
    """Return the rows of each replica in its last forward, and how long forward and backward took.

    On an accelerator that is the time until the work was queued: waiting for it would leave the device idle.
    """
    return ", ".join(
        f"{each.device} {each.rows} rows {1000 * (each.forward_s + each.backward_s):.0f} ms"
        for each in model.replica_timings
    )


def _finish_epoch(run: Run, epoch: int) -> None:
    """Evaluate; record, save and draw the results of the epoch."""
    began = time.perf_counter()
    test_loss, test_accuracy = evaluate(run)
    test_seconds = time.perf_counter() - began
    if not math.isfinite(test_loss):
        raise run.diverged(f"the test loss is {test_loss} after epoch {epoch + 1}", run.options.lr)

    train_loss, train_seconds = run.metrics.totals(epoch + 1)
    record = EpochRecord(
        epoch=epoch + 1,
        step=run.metrics.num_steps,
        train_loss=train_loss,
        test_loss=test_loss,
        test_accuracy=test_accuracy,
        train_seconds=train_seconds,
        test_seconds=test_seconds,
    )
    run.metrics.add(record)
    run.progress.say(
        f"epoch {record.epoch}/{run.options.epochs}: train loss {record.train_loss:.4f}, "
        f"test accuracy {record.test_accuracy:.4f}, {record.train_seconds:.1f} s of training"
    )
    run.save()
    run.draw()
    run.write_profile()  # the epoch is saved, whatever becomes of these files
    run.observers.tell("epoch", record)


def evaluate(run: Run) -> tuple[float, float]:
    """Return the mean loss and the accuracy over all test rows, computed on all replicas of all processes."""
    images, labels = run.dataset.test_images, run.dataset.test_labels
    order = torch.arange(len(labels), device=labels.device)
    totals = [torch.zeros(2, device=run.devices[0])]  # of each batch: sum of the losses, number of correct answers
    run.model.eval()
    with torch.no_grad():
        for batch in order.tensor_split(num_steps(len(labels), run.options.batch_size)):
            run.stop.check()
            rows = run.ranks.shard_of(batch)
            if not len(rows):
                continue
            run.computation.begin_step()
            totals.append(run.computation.test_totals(images, labels, rows))
    # Read once: each reading waits for the device. Added up in Python, whose numbers have 64 bits on every machine.
    total_loss, num_correct = run.ranks.sum(*map(math.fsum, zip(*torch.stack(totals).tolist(), strict=True)))
    return total_loss / len(labels), num_correct / len(labels)


@contextmanager
def _explained(run: Run) -> Iterator[None]:
    """Turn errors of the compiler, and of a batch that does not suit the devices, into ones that say what to do."""
    options = run.options
    try:
        yield
    except compiler.compiler_errors() as error:
        if run.stop.received is None:
            raise cannot_compile(run.devices[0], error) from error
        # A signal from the terminal also ends the processes of the compiler, in the middle of a step.
        run.progress.say(f"stopped while compiling; earlier checkpoints stay in {run.folder}")
        raise Interrupted(run.stop.received) from error
    except torch.OutOfMemoryError as error:
        raise OptionError(
            f"out of memory with --batch-size {options.batch_size} on {describe(*run.devices_by_rank)}: use a "
            "smaller batch, or more devices"
        ) from error
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        num_shards = 1 if options.sync_batch_norm else sum(map(len, run.devices_by_rank))
        raise OptionError(
            f"--batch-size {options.batch_size} on {describe(*run.devices_by_rank)} leaves a single row "
            f"(sample) for a batch norm, which needs two: use --batch-size {4 * num_shards}"
        ) from error
