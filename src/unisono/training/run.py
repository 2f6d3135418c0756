"""A run: how it is set up, resumed, and saved. The training itself is in loop.py."""

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono import __version__
from unisono.console.device_option import choose_devices, describe
from unisono.console.errors import DivergedError, FolderError
from unisono.data_parallel import DataParallel
from unisono.engines.processes.engine import Processes
from unisono.profiling.profile import Profile
from unisono.runtime import devices as _devices
from unisono.training import checkpoint, data, models
from unisono.training.checkpoint import Checkpoint, StepCount
from unisono.training.compiling import compiled_module, expect_compiler
from unisono.training.computation import Computation
from unisono.training.device_defaults import advice_on_rows
from unisono.training.display import Display
from unisono.training.metrics import Metrics, Record
from unisono.training.observers import Observer, Observers
from unisono.training.options import Options
from unisono.training.ranks import ALONE, Ranks, is_first_of_its_host, launch
from unisono.training.run_folder import RunFolder, replaced
from unisono.training.schedule import num_steps
from unisono.training.weights import Weights


@dataclass
class Run:
    """A training in progress.

    Args:
        options, folder: what to train and how, and where the results go.
        dataset: on the first device, if that is an accelerator and has room for it.
        ranks: the processes that train together; the first one writes.
        devices: one for each replica of this process; the first one holds `live`, and each batch before it is split.
        devices_by_rank: the devices of each process.
        live: the module that is trained.
        model: `live` on every device.
        weights: those of `live`, and how they are updated.
        computation: what a step computes with these.
        metrics: the records so far.
        observers: those who are told of each new one; none in other processes than the first.
        progress: the steps and epochs that are finished.
        saved: those of the checkpoint; None if there is none.
        compiled: what has been compiled, in words.
        is_profiled: whether each epoch's steps are profiled.
        profile: of the last epoch that was.
    """

    options: Options
    folder: RunFolder
    dataset: data.Dataset
    ranks: Ranks
    devices: Sequence[torch.device]
    devices_by_rank: Sequence[Sequence[torch.device]]
    live: nn.Module
    model: DataParallel
    weights: Weights
    computation: Computation
    metrics: Metrics
    observers: Observers
    progress: StepCount
    saved: StepCount | None
    compiled: set[str] = field(default_factory=set)
    is_profiled: bool = False
    profile: Profile | None = None

    @classmethod
    def begin(
        cls,
        options: Options,
        folder: RunFolder,
        display: Display,
        *,
        resume: bool = False,
        ranks: Ranks = ALONE,
        profile: bool = False,
        observers: Mapping[str, Observer] = MappingProxyType({}),
    ) -> "Run":
        """Set everything up. Without `resume` a run in the folder is deleted, once everything else has succeeded.

        Args:
            options, folder, display, resume, ranks, observers: as `loop.train` has them.

        Raises:
            CommandError: it cannot be set up; the message is one line for the user.
        """
        models.expect_known(options.model, options.init)
        devices = ranks.together(lambda: choose_devices(options.devices, among_several=ranks.world_size > 1))
        devices_by_rank = ranks.all_gather(devices)
        dataset = _load(options, display, ranks)

        random.seed(options.seed)
        torch.manual_seed(options.seed)
        live = models.build(
            options.model, num_classes=dataset.num_classes, image_shape=dataset.image_shape, init=options.init
        )
        synchronised = options.sync_batch_norm and any(isinstance(module, _BatchNorm) for module in live.modules())
        ranks.together(lambda: options.check_devices(devices_by_rank, synchronised=synchronised))
        if options.compile:
            display.begin("checking that the compiler works")
            ranks.together(lambda: expect_compiler(devices[0]))
        live = live.to(devices[0])
        if options.precision != "fp32" and not _devices.computes_on_host(devices[0]):
            # The fast low-precision convolutions of GPUs need this memory layout.
            live = live.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        weights = Weights(
            live,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            in_bfloat16=options.precision == "bf16-weights",
        )
        if _devices.has_room_for(devices[0], dataset.num_bytes):
            dataset = dataset.on(devices[0])
        whole = options.compile and len(devices) == ranks.world_size == 1
        # Even shares: torch's rule may give the last replica a single row, which its batch norm cannot train on.
        # loss="sum": a loss is the sum over this process's shard, divided by the rows of the whole batch.
        model = DataParallel(
            compiled_module(live) if options.compile and not whole else live,
            device_ids=devices,
            engine=Processes(on_worker_loss="retry") if options.engine == "processes" else options.engine,
            shares="even",
            sync_batch_norm=synchronised,
            loss="sum",
        )

        saved: Checkpoint | None = None
        records: list[Record] = []
        if resume:
            saved, records = ranks.from_first(lambda: _read_run(folder, options, dataset, display))
        else:
            ranks.from_first(folder.make_empty)
        progress = StepCount() if saved is None else checkpoint.restore(saved, folder, weights, devices)
        num_parameters = sum(parameter.numel() for parameter in live.parameters())
        config = _config(options, dataset, devices_by_rank, num_parameters)
        if ranks.is_first:
            folder.write_config(config)
        run = cls(
            options=options,
            folder=folder,
            dataset=dataset,
            ranks=ranks,
            devices=devices,
            devices_by_rank=devices_by_rank,
            live=live,
            model=model,
            weights=weights,
            computation=Computation(model, weights, autocast="bf16" in options.precision, whole=whole),
            metrics=Metrics(folder.metrics if ranks.is_first else None, records),
            observers=Observers(observers if ranks.is_first else {}, display.say, folder.path, config, records),
            progress=progress,
            saved=None if saved is None else progress,
            is_profiled=profile and ranks.is_first,
        )
        if ranks.is_first:
            run._describe(display.say, num_parameters, resume=resume)
        return run

    @property
    def num_rows(self) -> int:
        """The number of training pictures."""
        return len(self.dataset.train_labels)

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps of an epoch."""
        return num_steps(self.num_rows, self.options.batch_size)

    @property
    def steps_ahead(self) -> int:
        """How many steps are queued before a loss is read: 1 on accelerators, 0 on the CPU, which queues nothing."""
        on_host = (_devices.computes_on_host(device) for devices in self.devices_by_rank for device in devices)
        return int(not all(on_host))

    def diverged(self, what: str, rate: float) -> DivergedError:
        """Return the error of a loss that is infinite or not a number, with what to do about it."""
        options, saved = self.options, self.saved
        kept = f"the checkpoint of step {saved.steps} stays in {self.folder}" if saved else "nothing had been saved yet"
        longer = options.warmup_epochs + 2
        warm_up = f"a longer warm-up (--warmup-epochs {longer:g}) or " if longer <= options.epochs else ""
        return DivergedError(
            f"{what}, at learning rate {rate:g}: start again with {warm_up}a lower rate (--lr {options.lr / 2:g}); "
            f"{kept}"
        )

    def save(self) -> None:
        """Save metrics, checkpoint and weights. The first process does it."""
        if self.ranks.is_first:
            self.metrics.sync()
            checkpoint.save(self.folder, self.weights, self.progress, self.metrics.written(), self.devices)
            self.write_model()
        self.saved = self.progress

    def write_model(self) -> None:
        """Write model.safetensors. The first process does it."""
        if self.ranks.is_first:
            import safetensors.torch  # here: `make gpu-check`, which saves nothing, runs without it

            weights = {name: tensor.contiguous() for name, tensor in self.weights.state_dict().items()}
            with replaced(self.folder.model) as unfinished:
                # Not save_file: it makes a file that only its owner can read.
                unfinished.write_bytes(safetensors.torch.save(weights))

    def draw(self) -> None:
        """Draw curves.png, if an epoch is finished. The first process does it."""
        if self.ranks.is_first and self.metrics.epochs:
            from unisono.training import curves  # here: as above, and it is slow to load

            curves.draw(
                self.folder.curves,
                self.metrics.epochs,
                title=f"{self.options.model} on {self.dataset.name}, {describe(*self.devices_by_rank)}",
                last_epoch=self.options.epochs,
            )

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """Profile the steps of the block, an epoch's. The first process does it."""
        if not self.is_profiled:
            yield
            return
        with self.model.profile() as self.profile:
            yield

    def write_profile(self) -> None:
        """Write what the profiled steps show, if there are any: none are known of a step that is compiled whole."""
        if self.profile is None or not self.profile.steps():
            return
        with replaced(self.folder.trace) as unfinished:
            self.profile.write_trace(unfinished)
        with replaced(self.folder.timeline) as unfinished:
            self.profile.write_picture(unfinished)

    def close(self) -> None:
        """Close the files; end the replicas' threads or processes; release the folder."""
        self.metrics.close()
        self.model.close()
        self.folder.release()

    def _describe(self, say: Callable[[str], None], num_parameters: int, *, resume: bool) -> None:
        say(
            f"{num_parameters:,} parameters on {describe(*self.devices_by_rank)}; "
            f"{self.num_rows:,} pictures to train on, {len(self.dataset.test_labels):,} to test on"
        )
        if advice := advice_on_rows(self.options, self.devices_by_rank):
            say(advice)
        if self.options.precision == "tf32" and not _devices.has_tf32(self.devices[0]):
            say(f"{self.devices[0]} has no TF32: float32 stays exact, as with --precision fp32")
        progress = self.progress
        if progress.epochs >= self.options.epochs:
            say(f"nothing left to do, {progress.epochs} epochs are finished; --epochs {2 * progress.epochs} goes on")
        elif progress.steps:
            say(f"going on after step {progress.steps}, epochs finished: {progress.epochs}")
        elif resume:
            say("nothing had been saved yet: beginning again")


def _load(options: Options, display: Display, ranks: Ranks) -> data.Dataset:
    """Load the data: in rank 0, then in the first process of each machine, then in the others.

    So each file is downloaded once, and the later processes find it.
    """
    dataset: data.Dataset | None = None
    for my_turn in (ranks.is_first, is_first_of_its_host(), True):

        def load(my_turn: bool = my_turn, dataset: data.Dataset | None = dataset) -> data.Dataset | None:
            if dataset is None and my_turn:
                return data.load(options.data, mirror=options.mirror, progress=display.download)
            return dataset

        dataset = ranks.together(load)
    assert dataset is not None
    ranks.expect_equal("the data sets", {**_sizes_of(dataset), "checksum": ranks.world_size > 1 and _checksum(dataset)})
    return dataset


def _checksum(dataset: data.Dataset) -> int:
    checksum = 0
    for tensor in (dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels):
        checksum = zlib.crc32(tensor.contiguous().numpy().data, checksum)
    return checksum


def _config(
    options: Options, dataset: data.Dataset, devices_by_rank: Sequence[Sequence[torch.device]], num_parameters: int
) -> dict[str, Any]:
    """Return the contents of config.json."""
    return {
        "unisono": __version__,
        "torch": torch.__version__,
        "launch": launch(),
        "options": asdict(options),
        "processes": len(devices_by_rank),
        "devices": [str(device) for devices in devices_by_rank for device in devices],
        "parameters": num_parameters,
        **_sizes_of(dataset),
    }


def _read_run(
    folder: RunFolder, options: Options, dataset: data.Dataset, display: Display
) -> tuple[Checkpoint | None, list[Record]]:
    """Claim the folder of a run to resume; return its checkpoint, and the records up to it.

    A run that had saved nothing yet has no checkpoint, and begins again.
    """
    folder.claim()
    _check_same_data(folder, dataset)
    if not folder.has_checkpoint():
        return None, []
    saved = checkpoint.read(folder, display.say)
    steps, epochs = saved.progress.steps, saved.progress.epochs
    steps_per_epoch = num_steps(len(dataset.train_labels), options.batch_size)
    if not epochs * steps_per_epoch <= steps <= (epochs + 1) * steps_per_epoch:
        raise FolderError(
            f"the checkpoint in {folder} does not fit the run in its config.json: it is after {steps} steps and "
            f"{epochs} epochs, of {steps_per_epoch} steps each; put back the file that is not this run's"
        )
    return saved, Metrics.read(folder.metrics, steps=steps, epochs=epochs, written=saved.metrics)


def _check_same_data(folder: RunFolder, dataset: data.Dataset) -> None:
    """Check that the data have the sizes that the run began with; otherwise its steps would have other rows."""
    saved = folder.saved_config()
    for name, now in _sizes_of(dataset).items():
        if saved.get(name) != now:
            raise FolderError(
                f"{folder} began on data with {name.replace('_', ' ')} {saved.get(name)}, and {dataset.name} now "
                f"has {now}: put the data back as it was, or start another run (--output DIR)"
            )


def _sizes_of(dataset: data.Dataset) -> dict[str, Any]:
    return {
        "train_rows": len(dataset.train_labels),
        "test_rows": len(dataset.test_labels),
        "num_classes": dataset.num_classes,
        "image_shape": list(dataset.image_shape),
    }
