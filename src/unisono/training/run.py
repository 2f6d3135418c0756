"""A run: how it is set up, resumed, recorded and saved. The training itself is in loop.py."""

import contextlib
import json
import math
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from unisono import __version__
from unisono.console.device_option import choose_devices, describe
from unisono.console.errors import DivergedError, FolderError, Interrupted
from unisono.console.files import replaced
from unisono.console.progress import Progress
from unisono.data_parallel import DataParallel
from unisono.distributed import environment
from unisono.profiling.profile import Profile
from unisono.runtime import devices as _devices
from unisono.runtime.precision import has_tf32
from unisono.training import checkpoint, data, models
from unisono.training.checkpoint import Checkpoint
from unisono.training.computation import Computation, expect_compiler
from unisono.training.metrics import Metrics, StepRecord
from unisono.training.observers import Observer, Observers
from unisono.training.options import Options
from unisono.training.ranks import ALONE, Ranks, launch
from unisono.training.run_folder import RunFolder
from unisono.training.schedule import num_steps

_SAVE_EVERY_S = 300.0  # within an epoch; each epoch ends with a checkpoint anyway


_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_STDERR = 2
_NOTICE = b"\nfinishing the step in flight, then stopping (Ctrl-C%s: at once, without saving)\n"


class StopRequest:
    """While entered, records the first of SIGINT (Ctrl-C), SIGTERM and SIGHUP, instead of letting it act.

    Half a step cannot be saved: some of its numbers would be old, some new. A step takes a few seconds at most, so the
    loop finishes it, saves, and returns. Ctrl-C after that stops at once, and the last checkpoint stays. Another
    SIGTERM or SIGHUP changes nothing: a scheduler sends it to every process of a job, and a launcher that gets one
    passes it on. Not every process may get the signal, and each gets it at another moment; all stop after the same
    step.

    Signals arrive in the main thread, and only it may say what they do. In another thread, such as the one in which Ray
    calls a function, none is recorded: a signal does what the program has chosen.

    `received` is that signal, or None. From then on Ctrl-C acts as usual, and the others do nothing. `ranks` stop
    together.
    """

    received: signal.Signals | None = None

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks

    def __enter__(self) -> "StopRequest":
        self._before = {
            number: signal.signal(number, self._receive)
            for number in (_SIGNALS if in_main_thread() else ())
            if signal.getsignal(number) is not signal.SIG_IGN  # an ignored signal, as under nohup, stays ignored
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived; with several processes, in all of them at the same check."""
        if received := self._ranks.delayed_max(self.received or 0):
            raise Interrupted(signal.Signals(received))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        if signal.SIGINT in self._before:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        if self._ranks.is_first:  # os.write, because the signal may have arrived in the middle of a print
            os.write(_STDERR, _NOTICE % (b" again" if number == signal.SIGINT else b""))


def in_main_thread() -> bool:
    """Return whether this is the thread in which signals arrive."""
    return threading.current_thread() is threading.main_thread()


@dataclass(frozen=True)
class PendingStep:
    """A step that has been queued, and whose loss has not been read yet."""

    number: int  # from 1, as the epoch
    epoch: int
    learning_rate: float
    rows: int  # of all processes
    loss: Callable[[], float]  # waits for this process's part of the loss
    replicas: str  # in words, what those of this process did


class Run:
    """A training in progress, set up from what `loop.train` is given.

    Without `resume` a run in the folder is deleted, once everything else has succeeded.

    Attributes:
        devices, devices_by_rank: one for each replica of this process, and those of all processes. The first one holds
            `live`, each batch before it is split, and the data set, if it is an accelerator and has room for it.
        live, model: the module that is trained, and the same on every device.
        metrics: the records so far, which say how far the run is.
        pending: the steps that have been queued and not recorded, in order.
        should_save: whether the last checkpoint is some minutes old.
    """

    def __init__(
        self,
        options: Options,
        folder: RunFolder,
        progress: Progress,
        ranks: Ranks,
        observers: Mapping[str, Observer],
        *,
        resume: bool,
        profile: bool,
    ) -> None:
        self.options, self.folder, self.progress, self.ranks = options, folder, progress, ranks
        self.devices = ranks.together(lambda: choose_devices(options.devices, among_several=ranks.world_size > 1))
        self.devices_by_rank = ranks.all_gather(self.devices)
        self.dataset = _load(options, progress, ranks)
        checksum = self.dataset.checksum()
        ranks.expect_equal("the data sets", checksum)
        first_device = self.devices[0]

        torch.manual_seed(options.seed)
        live = models.build(options.model, num_classes=self.dataset.num_classes, image_shape=self.dataset.image_shape)
        synchronised = options.sync_batch_norm and any(isinstance(module, _BatchNorm) for module in live.modules())
        options.check_devices(self.devices_by_rank, synchronised=synchronised)
        if options.compile:
            progress.begin("checking that the compiler works")
            ranks.together(lambda: expect_compiler(first_device))
        self.live = live.to(first_device)
        if options.precision != "fp32" and not _devices.computes_on_host(first_device):
            # The fast low-precision convolutions of GPUs need this memory layout.
            self.live = live.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if has_room_for(first_device, sum(tensor.nbytes for tensor in self.dataset.tensors)):
            self.dataset = self.dataset.on(first_device)
        whole = options.compile and len(self.devices) == ranks.world_size == 1
        # `live.compile()` would not do: torch compiles nothing in a Sequential that is called that way.
        module: Any = torch.compile(self.live, dynamic=False) if options.compile and not whole else self.live
        # Even shares: torch's rule may give the last replica a single row, which its batch norm cannot train on.
        # loss="sum": a loss is the sum over this process's shard, divided by the rows of the whole batch.
        self.model = DataParallel(
            module,
            device_ids=self.devices,
            shares="even",
            sync_batch_norm=synchronised,
            loss="sum",
        )
        self.computation = Computation(self.model, self.live, autocast=options.precision == "bf16", whole=whole)

        saved = None
        if not resume:
            ranks.from_first(folder.make_empty)
        else:
            saved = ranks.from_first(lambda: _reopen(folder, checksum))
            self.live.load_state_dict(saved.model)
            for name, momentum in self.computation.momenta.items():
                momentum.copy_(saved.momenta[name])
        self.metrics = Metrics(saved.metrics if saved else b"")
        self.stop = StopRequest(ranks)
        self.pending: deque[PendingStep] = deque()
        self.profile: Profile | None = None
        self._is_profiled = profile and ranks.is_first
        self._config = {
            "unisono": __version__,
            "torch": torch.__version__,
            "launch": launch(),
            "options": asdict(options),
            "processes": ranks.world_size,
            "devices": [str(device) for of_rank in self.devices_by_rank for device in of_rank],
            "parameters": sum(parameter.numel() for parameter in live.parameters()),
            "train_rows": len(self.dataset.train_labels),
            "test_rows": len(self.dataset.test_labels),
            "data_checksum": checksum,
        }
        told = observers if ranks.is_first else {}
        self.observers = Observers(told, progress.say, folder.path, self._config, tuple(self.metrics.records))
        self._begin()

    def _begin(self) -> None:
        """Save the run as it begins or goes on, write the files that follow from that, and say what it is."""
        self.save()
        self.draw()
        if self.ranks.is_first:
            with replaced(self.folder.config) as unfinished:
                unfinished.write_text(json.dumps(self._config, indent=2) + "\n", encoding="utf-8")
            self.metrics.keep_in(self.folder.metrics)
            self._describe()
        if self.options.compile:
            self.progress.begin(
                "compiling the model: some minutes at the first step of each size and at the first test"
            )
        self.start_clock()

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps of an epoch."""
        return num_steps(len(self.dataset.train_labels), self.options.batch_size)

    # ---- records ---------------------------------------------------------------------------------

    @property
    def steps_ahead(self) -> int:
        """How many steps are queued before a loss is read: 1 on accelerators, 0 on the CPU, which queues nothing."""
        return int(not all(map(_devices.all_on_host, self.devices_by_rank)))

    def start_clock(self) -> None:
        """Start the clock of the next step, after evaluating or saving, which are not training."""
        self._recorded_at = self._saved_at = time.perf_counter()
        self.should_save = False

    def record(self, *, all_but: int = 0) -> None:
        """Wait for the pending steps but the last ones, and record them in order; raise DivergedError at a bad loss.

        All processes record the same steps at the same moments, so that their exchanges stay in order.
        """
        while len(self.pending) > all_but:
            step = self.pending.popleft()
            loss = step.loss()  # waits for the accelerator; the sum waits for the other processes
            time_to_save = self.ranks.is_first and time.perf_counter() - self._saved_at > _SAVE_EVERY_S
            mean_loss, save = self.ranks.sum(loss, time_to_save)
            self.should_save = self.should_save or bool(save)
            if not math.isfinite(mean_loss):
                what = f"the training loss is {mean_loss} in step {step.number} (epoch {step.epoch})"
                raise self.diverged(what, step.learning_rate)
            now = time.perf_counter()
            seconds, self._recorded_at = now - self._recorded_at, now
            record = StepRecord(step.number, step.epoch, mean_loss, step.learning_rate, step.rows, seconds)
            self.metrics.add(record)
            self.observers.tell("step", record)
            steps = self.steps_per_epoch
            in_epoch = (step.number - 1) % steps + 1
            text = f"step {in_epoch}/{steps}: loss {mean_loss:.4f}, {record.rows_per_second:,.0f} rows/s"
            self.progress.update(f"epoch {step.epoch}/{self.options.epochs}", in_epoch, steps, text, step.replicas)

    def diverged(self, what: str, rate: float) -> DivergedError:
        """Return the error of a loss that is infinite or not a number, with what to do about it."""
        lower = min(self.options.lr / 2, Options.lr)  # half of a rate that is far too high is so, too
        return DivergedError(
            f"{what}, at learning rate {rate:g}: start again with a lower rate (--lr {lower:g}, with --overwrite or "
            f"another --output); earlier checkpoints stay in {self.folder}"
        )

    # ---- files, which the first process writes ---------------------------------------------------

    def save(self) -> None:
        """Save checkpoint and weights, once all steps have been recorded."""
        self.record()
        if self.ranks.is_first:
            weights = self.live.state_dict()
            saved = Checkpoint(self._config, bytes(self.metrics.lines), weights, self.computation.momenta)
            saved.save(self.folder.checkpoint)
            checkpoint.write_tensors(self.folder.model, weights)

    def draw(self) -> None:
        """Draw curves.png, if an epoch is finished."""
        if self.ranks.is_first and self.metrics.epochs:
            from unisono.training import curves  # here: slow to load, and `make gpu-check` runs without matplotlib

            title = f"{self.options.model} on {self.dataset.name}, {describe(*self.devices_by_rank)}"
            curves.draw(self.folder.curves, self.metrics.epochs, title=title, last_epoch=self.options.epochs)

    def profiled(self) -> contextlib.AbstractContextManager[Profile | None]:
        """Return what profiles the steps of a block, an epoch's, if that is wanted."""
        return self.model.profile() if self._is_profiled else contextlib.nullcontext()

    def write_profile(self) -> None:
        """Write what the profiled steps show, if there are any: none are known of a step that is compiled whole."""
        if self.profile is None or not self.profile.steps():
            return
        self.profile.save(self.folder.trace)
        self.profile.draw(self.folder.timeline)

    def close(self) -> None:
        """Close the file; end the replicas' threads."""
        self.metrics.close()

    # ---- words for the user ----------------------------------------------------------------------

    def summary(self) -> list[str]:
        """Return what the run has come to, in lines for the user."""
        epochs, folder = self.metrics.epochs, self.folder
        seconds = statistics.median_low(record.train_seconds for record in epochs)  # the first may include compiling
        lines = [
            f"test accuracy {epochs[-1].test_accuracy:.4f}, {seconds:.1f} seconds of training an epoch, "
            f"on {describe(*self.devices_by_rank)}"
        ]
        if self.profile is not None:
            lines += str(self.profile).splitlines()
            if self.profile.steps():
                lines.append(f"see {folder.timeline}; chrome://tracing and https://ui.perfetto.dev open {folder.trace}")
        return [*lines, f"see {folder.curves}; the weights are {folder.model}"]

    def _describe(self) -> None:
        say, steps, epochs = self.progress.say, self.metrics.num_steps, len(self.metrics.epochs)
        say(
            f"{self._config['parameters']:,} parameters on {describe(*self.devices_by_rank)}; "
            f"{len(self.dataset.train_labels):,} pictures to train on, {len(self.dataset.test_labels):,} to test on"
        )
        if self.options.precision == "tf32" and not has_tf32(self.devices[0]):
            say(f"{self.devices[0]} has no TF32: float32 stays exact, as with --precision fp32")
        if not in_main_thread():
            say(
                "unisono train runs in another thread than the main one, so Ctrl-C and SIGTERM end it "
                "without saving; to resume from its last checkpoint, start it with --resume"
            )
        if epochs >= self.options.epochs:
            say(f"nothing left to do: {epochs} epochs are finished; to continue: --epochs {2 * epochs}")
        elif steps:
            say(f"resuming after step {steps}, epochs finished: {epochs}")


def has_room_for(device: torch.device, num_bytes: int) -> bool:
    """Return whether data of this size take no more than a quarter of an accelerator's free memory.

    False on the host, where data stay as they are.
    """
    if _devices.computes_on_host(device):
        return False
    return num_bytes <= _devices.free_memory_bytes(device) // 4


def _load(options: Options, progress: Progress, ranks: Ranks) -> data.Dataset:
    """Load the data: in the first process of each machine, so that each file is downloaded once; then in the others."""
    is_first_of_its_host = not environment.local_rank()
    loaded = ranks.together(lambda: data.load(options.data, progress) if is_first_of_its_host else None)
    return ranks.together(lambda: loaded or data.load(options.data, progress))


def _reopen(folder: RunFolder, data_checksum: str) -> Checkpoint:
    """Claim the folder of a run to resume; return its checkpoint."""
    folder.claim()
    saved = checkpoint.read(folder)
    if saved.config["data_checksum"] != data_checksum:  # its steps would have other rows
        raise FolderError(
            f"the data of --data {saved.config['options']['data']} changed since the run in {folder} began: "
            "restore it, or start a new run (--output DIR)"
        )
    return saved
