"""A run: what training changes, how it begins or is found again, and how it is kept.

Setting up is told here, so that loop.py can tell the training and nothing else.
"""

import importlib.metadata
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.console.device_option import choose_devices
from manyhands.console.errors import DivergedError, FolderError, OptionError
from manyhands.data_parallel import DataParallel
from manyhands.runtime import devices as _devices
from manyhands.training import checkpoint, data, models
from manyhands.training.checkpoint import Progress
from manyhands.training.compiling import compiled, expect_compiler
from manyhands.training.display import Display
from manyhands.training.metrics import Metrics, Record
from manyhands.training.options import Options
from manyhands.training.placement import expect_combination
from manyhands.training.ranks import ALONE, Ranks, is_first_of_its_host, launch
from manyhands.training.run_folder import RunFolder, replaced
from manyhands.training.schedule import num_steps


@dataclass
class Run:
    """A training in progress.

    Args:
        options, folder, dataset: what it does, where to, and on what. The data are on the first device, if that is an
            accelerator and has room for them.
        ranks: the processes that share it; the first one writes.
        devices: one for each replica of this process; the first one holds `live`, and the batches before they are
            split.
        places: the devices of each process.
        live: the module that is trained.
        model: `live`, on every device, compiled or not.
        optimizer: updates `live`.
        metrics: what has been measured.
        progress: how far it is.
        saved: how far the checkpoint is; None if there is none.
        sizes_compiled: the numbers of rows of steps that the model has been compiled for.
    """

    options: Options
    folder: RunFolder
    dataset: data.Dataset
    ranks: Ranks
    devices: Sequence[torch.device]
    places: Sequence[Sequence[torch.device]]
    live: nn.Module
    model: DataParallel
    optimizer: torch.optim.Optimizer
    metrics: Metrics
    progress: Progress
    saved: Progress | None
    sizes_compiled: set[int] = field(default_factory=set)

    @classmethod
    def begin(
        cls, options: Options, folder: RunFolder, display: Display, *, resume: bool = False, ranks: Ranks = ALONE
    ) -> "Run":
        """Set everything up; without `resume` a run in the folder is deleted, after nothing else can go wrong.

        Raises:
            TrainingError, DataError: it cannot be set up; the message is one line for the user.
        """
        _check_names(options)
        devices = ranks.together(lambda: choose_devices(options.devices, among_several=ranks.world_size > 1))
        places = ranks.everybodys(devices)
        dataset = _loaded(options, display, ranks)

        random.seed(options.seed)
        torch.manual_seed(options.seed)
        live = models.build(
            options.model, num_classes=dataset.num_classes, image_shape=dataset.image_shape, init=options.init
        )
        synchronised = options.sync_batch_norm and any(isinstance(module, _BatchNorm) for module in live.modules())
        ranks.together(lambda: expect_combination(options, places, synchronised=synchronised))
        if options.compile:
            display.busy("seeing whether the compiler works")
            ranks.together(lambda: expect_compiler(devices[0]))
        live = live.to(devices[0])
        if options.precision != "fp32" and not _devices.computes_on_host(devices[0]):
            # Fewer bits are for speed, and so is this layout: the fast convolutions of GPUs want it.
            live = live.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if _devices.has_room_for(devices[0], dataset.num_bytes):
            dataset = dataset.on(devices[0])
        # Even shares: torch's rule may leave the last replica a single row, which batch norm cannot train on by itself.
        # Losses are sums over this process's part of a batch, divided by the rows of the whole.
        model = DataParallel(
            compiled(live) if options.compile else live,
            device_ids=devices,
            engine=options.engine,
            shares="even",
            sync_batch_norm=synchronised,
            loss="sum",
        )
        optimizer = torch.optim.SGD(
            live.parameters(),
            lr=options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            fused=_devices.has_fused_optimizers(devices[0]) or None,
        )

        records: list[Record] = []
        progress = Progress()
        if resume:
            state, records = ranks.from_first(lambda: _found(folder, dataset, display))
            progress = checkpoint.restore(state, folder, live, optimizer, devices)
        else:
            ranks.from_first(folder.make_empty)
        run = cls(
            options=options,
            folder=folder,
            dataset=dataset,
            ranks=ranks,
            devices=devices,
            places=places,
            live=live,
            model=model,
            optimizer=optimizer,
            metrics=Metrics(folder.metrics if ranks.is_first else None, records),
            progress=progress,
            saved=progress if resume else None,
        )
        if ranks.is_first:
            run._write_config()
            run._introduce(display.say)
        return run

    @property
    def num_rows(self) -> int:
        """How many pictures an epoch trains on."""
        return len(self.dataset.train_labels)

    @property
    def steps_per_epoch(self) -> int:
        """How many optimizer steps an epoch has."""
        return num_steps(self.num_rows, self.options.batch_size)

    @property
    def steps_ahead(self) -> int:
        """How many steps are queued before the loss of the one before them is read: none where nothing is queued."""
        return int(not all(_devices.computes_on_host(device) for devices in self.places for device in devices))

    def diverged(self, what: str, rate: float) -> DivergedError:
        """Return the error that ends a run whose loss is no number, with what to do about it."""
        options, saved = self.options, self.saved
        kept = f"the checkpoint of step {saved.steps} stays in {self.folder}" if saved else "nothing had been saved yet"
        longer = options.warmup_epochs + 2
        warm_up = f"a longer warm-up (--warmup-epochs {longer:g}) or " if longer <= options.epochs else ""
        return DivergedError(
            f"{what}, at learning rate {rate:g}: start again with {warm_up}a lower rate (--lr {options.lr / 2:g}); "
            f"{kept}"
        )

    def keep(self) -> None:
        """Bring what is on the disk up to this moment: metrics, checkpoint, weights. The first process does it."""
        if self.ranks.is_first:
            import safetensors.torch  # here, because it may be missing where nothing is kept, as in `make gpu-check`

            self.metrics.sync()
            checkpoint.save(self.folder, self.live, self.optimizer, self.progress, self.devices)
            weights = {name: tensor.contiguous() for name, tensor in self.live.state_dict().items()}
            with replaced(self.folder.model) as unfinished:
                unfinished.write_bytes(safetensors.torch.save(weights))  # save_file would make it unreadable to others
        self.saved = self.progress

    def draw(self) -> None:
        """Draw the epochs so far. The first process does it."""
        if self.ranks.is_first:
            from manyhands.training import curves  # as above, and slow to load

            curves.draw(
                self.folder.curves,
                self.metrics.epochs,
                title=f"{self.options.model} on {self.dataset.name}, {describe(*self.places)}",
                last_epoch=self.options.epochs,
            )

    def close(self) -> None:
        """Close the files; end what runs the replicas; leave the folder to other runs."""
        self.metrics.close()
        self.model.close()
        self.folder.release()

    def _write_config(self) -> None:
        self.folder.write_config(
            {
                "manyhands": importlib.metadata.version("manyhands"),
                "torch": torch.__version__,
                "launch": launch(),
                "options": asdict(self.options),
                "processes": self.ranks.world_size,
                "devices": [str(device) for devices in self.places for device in devices],
                "parameters": self._num_parameters(),
                **_facts_of(self.dataset),
            }
        )

    def _introduce(self, say: Callable[[str], None]) -> None:
        say(
            f"{self._num_parameters():,} parameters on {describe(*self.places)}; "
            f"{self.num_rows:,} pictures to train on, {len(self.dataset.test_labels):,} to test on"
        )
        if self.options.precision == "tf32" and not _devices.has_tf32(self.devices[0]):
            say(f"{self.devices[0]} has no TF32: float32 stays exact, as with --precision fp32")
        progress = self.progress
        if progress.epochs >= self.options.epochs:
            say(f"nothing left to do, {progress.epochs} epochs are finished; --epochs {2 * progress.epochs} goes on")
        elif progress.steps:
            say(f"going on after step {progress.steps}, with {progress.epochs} epochs finished")

    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.live.parameters())


def describe(*places: Sequence[torch.device]) -> str:
    """Return in words the devices of the replicas of each process, as in "2 replicas (cpu, cpu)".

    >>> cpu = torch.device("cpu")
    >>> describe([cpu] * 8)
    '8 replicas (8 x cpu)'
    >>> describe([cpu] * 2, [cpu] * 2)
    '2 processes, 4 replicas (4 x cpu)'
    """
    devices = [device for process in places for device in process]
    processes = f"{len(places)} processes, " if len(places) > 1 else ""
    if len(devices) == 1:
        return str(devices[0])
    counts = {device: devices.count(device) for device in devices}
    names = [str(device) if count == 1 else f"{count} x {device}" for device, count in counts.items()]
    return f"{processes}{len(devices)} replicas ({', '.join(names)})"


def _loaded(options: Options, display: Display, ranks: Ranks) -> data.Dataset:
    """Load the data: first in the first process, then in the first of each machine, then in the others.

    So each file is downloaded once, and the others find it.
    """
    dataset: data.Dataset | None = None
    for my_turn in (ranks.is_first, is_first_of_its_host(), True):

        def load(my_turn: bool = my_turn, dataset: data.Dataset | None = dataset) -> data.Dataset | None:
            if dataset is None and my_turn:
                return data.load(options.data, mirror=options.mirror, progress=display.download)
            return dataset

        dataset = ranks.together(load)
    assert dataset is not None
    loaded = dataset
    ranks.expect_alike("the data sets", {**_facts_of(loaded), "checksum": ranks.world_size > 1 and _checksum(loaded)})
    return loaded


def _checksum(dataset: data.Dataset) -> int:
    checksum = 0
    for tensor in (dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels):
        checksum = zlib.crc32(tensor.contiguous().numpy().data, checksum)
    return checksum


def _found(folder: RunFolder, dataset: data.Dataset, display: Display) -> tuple[dict[str, Any], list[Record]]:
    """Claim the folder of a run that is resumed; return its checkpoint, and the records up to it."""
    folder.claim()
    _check_same_data(folder, dataset)
    state = checkpoint.read(folder, display.say)
    return state, Metrics.read(folder.metrics, steps=state["steps"], epochs=state["epochs"])


def _check_same_data(folder: RunFolder, dataset: data.Dataset) -> None:
    """Check that a run is resumed on data of the size that it began with; else its steps would be other rows."""
    began_with = folder.saved_config()
    for name, now in _facts_of(dataset).items():
        if began_with.get(name) != now:
            raise FolderError(
                f"{folder} began on data with {name.replace('_', ' ')} {began_with.get(name)}, and {dataset.name} now "
                f"has {now}: put the data back as it was, or start another run (--output DIR)"
            )


def _facts_of(dataset: data.Dataset) -> dict[str, Any]:
    return {
        "train_rows": len(dataset.train_labels),
        "test_rows": len(dataset.test_labels),
        "num_classes": dataset.num_classes,
        "image_shape": list(dataset.image_shape),
    }


def _check_names(options: Options) -> None:
    """Check the names that other files define. The rest of the options has been checked when they were made."""
    for option, name, known in (
        ("--model", options.model, models.MODELS),
        ("--init", options.init, models.INITS),
    ):
        if name not in known:
            raise OptionError(f"{option} {name}: expected one of {', '.join(known)}")
