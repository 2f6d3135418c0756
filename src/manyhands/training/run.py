"""A run: what training changes, how it begins or is found again, and how it is kept.

Setting up is told here, so that loop.py can tell the training and nothing else.
"""

import importlib.metadata
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import safetensors.torch
import torch
from torch import nn

from manyhands.data_parallel import DataParallel
from manyhands.training import checkpoint, data, models
from manyhands.training.checkpoint import Progress
from manyhands.training.display import Display
from manyhands.training.errors import FolderError, OptionError
from manyhands.training.metrics import Metrics
from manyhands.training.options import Options
from manyhands.training.placement import choose_devices
from manyhands.training.run_folder import RunFolder, replaced
from manyhands.training.schedule import num_steps


@dataclass
class Run:
    """A training in progress.

    Args:
        options, folder, dataset: what it does, where to, and on what.
        devices: one for each replica; the first one holds `live`, and the batches before they are split.
        live: the module that is trained.
        model: `live`, on every device.
        optimizer: updates `live`.
        metrics: what has been measured.
        progress: how far it is.
        saved: how far the checkpoint is; None if there is none.
    """

    options: Options
    folder: RunFolder
    dataset: data.Dataset
    devices: Sequence[torch.device]
    live: nn.Module
    model: DataParallel
    optimizer: torch.optim.Optimizer
    metrics: Metrics
    progress: Progress
    saved: Progress | None

    @classmethod
    def begin(cls, options: Options, folder: RunFolder, display: Display, *, resume: bool = False) -> "Run":
        """Set everything up; without `resume` a run in the folder is deleted, after nothing else can go wrong.

        Raises:
            TrainingError, DataError: it cannot be set up; the message is one line for the user.
        """
        _check_names(options)
        devices = choose_devices(options.devices, options.engine)
        dataset = data.load(options.data, mirror=options.mirror, progress=display.download)

        random.seed(options.seed)
        torch.manual_seed(options.seed)
        live = models.build(
            options.model, num_classes=dataset.num_classes, image_shape=dataset.image_shape, init=options.init
        ).to(devices[0])
        # Even shares: torch's rule may leave the last replica a single row, which batch norm cannot train on by itself.
        model = DataParallel(
            live, device_ids=devices, engine=options.engine, shares="even", sync_batch_norm=options.sync_batch_norm
        )
        optimizer = torch.optim.SGD(
            live.parameters(), lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay
        )

        if resume:
            _check_same_data(folder, dataset)
            progress = checkpoint.restore(folder, live, optimizer, devices, display.say)
            metrics = Metrics.reopen(folder.metrics, steps=progress.steps, epochs=progress.epochs)
        else:
            folder.make_empty()
            progress = Progress()
            metrics = Metrics(folder.metrics)
        run = cls(
            options, folder, dataset, devices, live, model, optimizer, metrics, progress, progress if resume else None
        )
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

    def keep(self) -> None:
        """Bring what is on the disk up to this moment: metrics, checkpoint, weights."""
        self.metrics.sync()
        checkpoint.save(self.folder, self.live, self.optimizer, self.progress, self.devices)
        weights = {name: tensor.contiguous() for name, tensor in self.live.state_dict().items()}
        with replaced(self.folder.model) as unfinished:
            unfinished.write_bytes(safetensors.torch.save(weights))  # save_file would make it unreadable to others
        self.saved = self.progress

    def close(self) -> None:
        """Close the files; end what runs the replicas."""
        self.metrics.close()
        self.model.close()

    def _write_config(self) -> None:
        self.folder.write_config(
            {
                "manyhands": importlib.metadata.version("manyhands"),
                "torch": torch.__version__,
                "options": asdict(self.options),
                "devices": list(map(str, self.devices)),
                "parameters": self._num_parameters(),
                **_facts_of(self.dataset),
            }
        )

    def _introduce(self, say: Callable[[str], None]) -> None:
        say(
            f"{self._num_parameters():,} parameters on {describe(self.devices)}; "
            f"{self.num_rows:,} pictures to train on, {len(self.dataset.test_labels):,} to test on"
        )
        progress = self.progress
        if progress.epochs >= self.options.epochs:
            say(f"nothing left to do, {progress.epochs} epochs are finished; --epochs {2 * progress.epochs} goes on")
        elif progress.steps:
            say(f"going on after step {progress.steps}, with {progress.epochs} epochs finished")

    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.live.parameters())


def describe(devices: Sequence[torch.device]) -> str:
    """Return the devices of the replicas in words, as in "2 replicas (cpu, cpu)".

    >>> describe([torch.device("cpu")] * 8)
    '8 replicas (8 x cpu)'
    """
    if len(devices) == 1:
        return str(devices[0])
    counts = {device: list(devices).count(device) for device in devices}
    names = [str(device) if count == 1 else f"{count} x {device}" for device, count in counts.items()]
    return f"{len(devices)} replicas ({', '.join(names)})"


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
