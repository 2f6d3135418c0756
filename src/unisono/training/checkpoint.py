"""The checkpoint: all that a run needs to be resumed as if it had not stopped.

That is the weights, their momenta, the states of the random number generators, the numbers of finished steps and
epochs, and how far metrics.jsonl, which has the history, belongs to it. The learning rate and the order of the rows
follow from the number of steps.

A checkpoint is a safetensors file, so nothing in it can be code, and no size in it is believed that the file does not
have. Its tensors are

    model.NAME      the weights and buffers, by their names in the module
    momentum.NUMBER the momenta, in the order of the parameters
    random.DEVICE   the states of torch's generators
    run             the rest, as JSON
    sha256          the digest of all of these, so that damage anywhere is an error

A digest does not stop someone who writes a file on purpose. So what is read is also compared with what the run expects
before anything is loaded.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.console import files
from unisono.console.errors import FolderError
from unisono.runtime import devices, torch_private
from unisono.training.metrics import Written
from unisono.training.run_folder import RunFolder, replaced
from unisono.training.weights import Weights

_FORMAT = 1
_MAX_TEXT_BYTES = 1 << 20  # of the header, and of "run": a ResNet-18's are 20 KB and 8 KB


@dataclass(frozen=True)
class StepCount:
    """How far a run is.

    Args:
        steps: finished optimizer steps.
        epochs: finished epochs, including their evaluation.
    """

    steps: int = 0
    epochs: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, on the CPU.

    Args:
        progress: how far the run was.
        metrics: how much of metrics.jsonl there was.
        tensors: by the names above, without "run" and "sha256".
        python_random: the state of Python's generator, as JSON has it.
    """

    progress: StepCount
    metrics: Written
    tensors: Mapping[str, Tensor]
    python_random: Any


def save(
    folder: RunFolder,
    weights: Weights,
    progress: StepCount,
    metrics: Written,
    on: Sequence[torch.device],
) -> None:
    """Write the checkpoint; the earlier one is kept under another name."""
    import safetensors.torch  # here: `make gpu-check`, which saves nothing, runs without it

    rest = {
        "format": _FORMAT,
        "progress": asdict(progress),
        "metrics": asdict(metrics),
        "python_random": random.getstate(),
    }
    tensors = {
        **_state_of(weights),
        **{f"random.{device}": state for device, state in _random_states(on).items()},
        "run": torch.frombuffer(bytearray(json.dumps(rest).encode()), dtype=torch.uint8),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    tensors["sha256"] = _digest(tensors)
    with replaced(folder.checkpoint, keep_as=folder.previous_checkpoint) as unfinished:
        # Not save_file: it makes a file that only its owner can read.
        unfinished.write_bytes(safetensors.torch.save(tensors))


def restore(saved: Checkpoint, folder: RunFolder, weights: Weights, on: Sequence[torch.device]) -> StepCount:
    """Load what `read` has returned into weights and generators; return how far the run was.

    Args:
        saved: the checkpoint.
        folder: where it was read from.
        weights: of the run.
        on: the devices of the run's replicas. A device without a random state in the checkpoint keeps its own.

    Raises:
        FolderError: it does not fit.
    """
    try:
        _expect_same_form(saved.tensors, _state_of(weights))
        momenta = [saved.tensors[f"momentum.{i}"] for i in range(len(weights.momenta))]
        weights.load({name: saved.tensors[f"model.{name}"] for name in weights.state_dict()}, momenta)
        _set_random_states(saved, on)
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FolderError(f"the checkpoint in {folder} does not fit the run in its config.json: {reason}") from error
    return saved.progress


def read(folder: RunFolder, say: Callable[[str], None]) -> Checkpoint:
    """Return the last checkpoint; if it is damaged, the one before.

    Args:
        folder: of the run.
        say: called with a line when the last checkpoint cannot be used.

    Raises:
        FolderError: no checkpoint can be used.
    """
    problems = []
    for path in (folder.checkpoint, folder.previous_checkpoint):
        try:
            found = _read(path)
        except _UnusableError as error:
            problems.append(f"{path.name} {error}")
            continue
        if problems:
            say(f"{problems[0]}; using {path.name}, of step {found.progress.steps}")
            path.replace(folder.checkpoint)  # else the next save would keep the damaged one and drop this one
        return found
    raise FolderError(
        f"no checkpoint in {folder} can be used: {'; '.join(problems)}; put one back, or start again (--output {folder}"
        " --overwrite)"
    )


class _UnusableError(Exception):
    """A checkpoint cannot be read; says why."""


def _read(path: Path) -> Checkpoint:
    import safetensors.torch  # here: as above

    try:
        content = files.contents(path)
    except FileNotFoundError:
        raise _UnusableError("is missing") from None
    except OSError as error:
        raise _UnusableError(f"cannot be read ({error.strerror})") from error
    try:
        if int.from_bytes(content[:8], "little") > _MAX_TEXT_BYTES:  # begins with the size of the header
            raise ValueError
        tensors = safetensors.torch.load(content)
        digest, run = tensors.pop("sha256", None), tensors.get("run", torch.empty(0))
        rest = json.loads(run.numpy().tobytes()) if run.dtype == torch.uint8 and len(run) <= _MAX_TEXT_BYTES else {}
    except Exception as error:  # damage can make reading fail in any way
        raise _UnusableError(f"is damaged ({type(error).__name__})") from error
    if not isinstance(rest, dict) or rest.get("format") != _FORMAT or digest is None:
        raise _UnusableError("is not a checkpoint of this version of unisono")
    if not torch.equal(digest, _digest(tensors)):
        raise _UnusableError("is damaged (its contents do not have the digest that is in it)")
    del tensors["run"]
    try:
        progress, metrics = StepCount(**rest["progress"]), Written(**rest["metrics"])
        for number in (progress.steps, progress.epochs, metrics.num_bytes):
            if type(number) is not int or number < 0:
                raise ValueError(number)
        return Checkpoint(progress, metrics, tensors, rest["python_random"])
    except (LookupError, TypeError, ValueError) as error:
        raise _UnusableError(f"is damaged ({type(error).__name__})") from error


def _digest(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the SHA-256 of the names, forms and bytes of tensors on the CPU."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def _state_of(weights: Weights) -> dict[str, Tensor]:
    return {
        **{f"model.{name}": tensor for name, tensor in weights.state_dict().items()},
        **{f"momentum.{i}": momentum for i, momentum in enumerate(weights.momenta)},
    }


def _expect_same_form(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Check that a checkpoint has the weights and momenta that the run has, and no others.

    Raises:
        ValueError: it has not; names the first that differs.
    """

    def form(tensors: Mapping[str, Tensor], name: str) -> str:
        return f"{tuple(tensors[name].shape)} {tensors[name].dtype}" if name in tensors else "nothing"

    for name in {**own, **saved}:
        if not name.startswith("random.") and form(saved, name) != form(own, name):
            raise ValueError(f"{name} is {form(saved, name)} in it, and {form(own, name)} in the run")


def _random_states(on: Sequence[torch.device]) -> dict[str, Tensor]:
    """Return the states of torch's generators: that of the CPU, and those of the accelerators in use."""
    accelerators = _accelerators_in(on)
    states = {str(device): torch.get_device_module(device).get_rng_state(device) for device in accelerators}
    return {"cpu": torch.get_rng_state(), **states}


def _set_random_states(saved: Checkpoint, on: Sequence[torch.device]) -> None:
    version, numbers, gauss = saved.python_random
    random.setstate((version, tuple(numbers), gauss))
    torch_private.set_cpu_rng_state(saved.tensors["random.cpu"])
    for device in _accelerators_in(on):
        if f"random.{device}" in saved.tensors:
            torch.get_device_module(device).set_rng_state(saved.tensors[f"random.{device}"], device)


def _accelerators_in(on: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in dict.fromkeys(on) if not devices.computes_on_host(device)]
