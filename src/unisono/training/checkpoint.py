"""The checkpoint: all that a run needs to be resumed as if it had not stopped.

That is the weights, their momenta, and the lines of metrics.jsonl, which say how far the run was. The learning rate and
the order of the rows follow from the number of steps, and a step draws no random numbers.

A checkpoint is a safetensors file, so nothing in it can be code. Its tensors are

    model.NAME     the weights and buffers, by their names in the module
    momentum.NAME  the momenta, by the names of their weights
    metrics        the bytes of metrics.jsonl
    sha256         the digest of all of these, so that damage anywhere is an error
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.console import files
from unisono.console.errors import FolderError
from unisono.training.run_folder import RunFolder, replaced


def save(folder: RunFolder, module: nn.Module, momenta: Mapping[str, Tensor], metrics: bytes | bytearray) -> None:
    """Write the checkpoint of a run; the earlier one is kept under another name."""
    import numpy as np  # here: `make gpu-check`, which saves nothing, runs without numpy and safetensors

    tensors = {
        **{f"model.{name}": tensor for name, tensor in module.state_dict().items()},
        **{f"momentum.{name}": momentum for name, momentum in momenta.items()},
        "metrics": torch.from_numpy(np.frombuffer(bytearray(metrics), dtype=np.uint8)),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(folder.checkpoint, {**tensors, "sha256": _digest(tensors)}, keep_as=folder.previous_checkpoint)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, keep_as: Path | None = None) -> None:
    """Write a safetensors file; with `keep_as`, the one before is kept under that name."""
    import safetensors.torch

    with replaced(path, keep_as=keep_as) as unfinished:
        # Not save_file: it makes a file that only its owner can read.
        unfinished.write_bytes(safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def read(folder: RunFolder, say: Callable[[str], None]) -> dict[str, Tensor]:
    """Return what the last checkpoint holds, on the CPU; if it is damaged, say so and read the one before it."""
    import safetensors.torch

    problems = []
    for path in (folder.checkpoint, folder.previous_checkpoint):
        try:
            tensors: dict[str, Tensor] = safetensors.torch.load(files.contents(path))
            if not torch.equal(tensors.pop("sha256"), _digest(tensors)):
                raise ValueError("its contents do not have the digest that is in it")
        except Exception as error:  # noqa: BLE001  damage can make reading fail in any way
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            problems.append(f"{path.name} cannot be read ({reason})")
            continue
        if problems:
            say(f"{problems[0]}; using {path.name}")
            path.replace(folder.checkpoint)  # else the next save would keep the damaged one and drop this one
        return tensors
    raise FolderError(
        f"no checkpoint in {folder} can be used: {'; '.join(problems)}; put one back, or start again (--output {folder}"
        " --overwrite)"
    )


def restore(saved: Mapping[str, Tensor], folder: RunFolder, module: nn.Module, momenta: Mapping[str, Tensor]) -> None:
    """Load what `read` has returned into what `save` was given; raise FolderError if it does not fit."""
    model = {name.removeprefix("model."): tensor for name, tensor in saved.items() if name.startswith("model.")}
    try:
        module.load_state_dict(model)
        for name, momentum in momenta.items():
            momentum.copy_(saved[f"momentum.{name}"])
    except (LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise FolderError(f"the checkpoint in {folder} does not fit the run in its config.json: {reason}") from error


def metrics_in(saved: Mapping[str, Tensor]) -> bytes:
    """Return the lines of metrics.jsonl up to a checkpoint."""
    return saved["metrics"].numpy().tobytes()


def _digest(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the SHA-256 of the names, forms and bytes of tensors on the CPU."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return torch.tensor([*digest.digest()], dtype=torch.uint8)
