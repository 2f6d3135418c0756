"""The checkpoint: all that a run needs to be resumed as if it had not stopped, and the only file that a run reads.

That is its configuration, the weights, their momenta, and the lines of metrics.jsonl, which say how far it was. The
learning rate and the order of the rows follow from the number of steps, and a step draws no random numbers.

It is a safetensors file, so nothing in it can be code. Its tensors are

    model.NAME     the weights and buffers, by their names in the module
    momentum.NAME  the momenta, by the names of their weights
    metrics        the bytes of metrics.jsonl
    sha256         the digest of these and of the configuration, so that damage anywhere is an error

The configuration is in its metadata, as JSON.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.console.errors import FolderError
from unisono.console.files import replaced
from unisono.training.run_folder import RunFolder


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run after some steps: `model` is the module's state_dict, `momenta` has one for each parameter, by its name."""

    config: dict[str, Any]
    metrics: bytes
    model: dict[str, Tensor]
    momenta: dict[str, Tensor]

    def save(self, path: Path) -> None:
        """Write it, whole, in the place of the one before."""
        import numpy as np  # here: `make gpu-check`, which saves nothing, runs without numpy and safetensors

        tensors = {
            **{f"model.{name}": tensor for name, tensor in self.model.items()},
            **{f"momentum.{name}": momentum for name, momentum in self.momenta.items()},
            "metrics": torch.from_numpy(np.frombuffer(bytearray(self.metrics), dtype=np.uint8)),
        }
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        config = json.dumps(self.config)
        write_tensors(path, {**tensors, "sha256": _digest(config, tensors)}, {"config": config})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole."""
    import safetensors.torch

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replaced(path) as unfinished:
        # Not save_file: it makes a file that only its owner can read.
        unfinished.write_bytes(safetensors.torch.save(contiguous, metadata))


def read(folder: RunFolder) -> Checkpoint:
    """Return the checkpoint of a run, its tensors on the CPU; raise FolderError if it is damaged."""
    from safetensors import safe_open

    try:
        with safe_open(folder.checkpoint, framework="pt") as file:
            config = file.metadata()["config"]
            # Copies: tensors that share the file's memory would keep it open, and Windows then lets none replace it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  it is no dict
        if not torch.equal(tensors.pop("sha256"), _digest(config, tensors)):
            raise ValueError("its contents do not match its digest")
    except Exception as error:  # damage can make reading fail in any way
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise FolderError(
            f"cannot read {folder.checkpoint} ({reason}): restore the file, or start a new run (--output "
            f"{folder} --overwrite)"
        ) from error
    model, momenta = (
        {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}
        for kind in ("model.", "momentum.")
    )
    return Checkpoint(json.loads(config), tensors["metrics"].numpy().tobytes(), model, momenta)


def launch_of(folder: RunFolder) -> str | None:
    """Return the launch that began the run in a folder; None if there is no run, or none that can be read."""
    from safetensors import safe_open

    try:
        with safe_open(folder.checkpoint, framework="pt") as file:  # which reads the metadata only
            launch: str | None = json.loads(file.metadata()["config"])["launch"]
    except Exception:  # noqa: BLE001  as in `read`
        return None
    return launch


def _digest(config: str, tensors: Mapping[str, Tensor]) -> Tensor:
    digest = hashlib.sha256(config.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return torch.tensor([*digest.digest()], dtype=torch.uint8)
