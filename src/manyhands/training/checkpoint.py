"""The checkpoint: all that a run needs to be resumed as if it had not stopped.

That is the weights, their momenta, the states of the random number generators, and the numbers of finished
steps and epochs. The learning rate and the order of the rows follow from the number of steps; the history is in
metrics.jsonl.

A checkpoint is a file of `torch.save`, which is a zip archive. `torch.load` does not compare its checksums, so they
are compared here. It loads plain values only (`weights_only`), so a checkpoint from elsewhere cannot run code.
"""

import io
import random
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyhands.console.errors import FolderError
from manyhands.runtime import devices
from manyhands.training.run_folder import RunFolder, replaced
from manyhands.training.weights import Weights

_FORMAT = 1


@dataclass(frozen=True)
class StepCount:
    """How far a run is.

    Args:
        steps: finished optimizer steps.
        epochs: finished epochs, including their evaluation.
    """

    steps: int = 0
    epochs: int = 0


def save(
    folder: RunFolder,
    weights: Weights,
    progress: StepCount,
    on: Sequence[torch.device],
) -> None:
    """Write checkpoint.pt; the earlier one becomes checkpoint.previous.pt."""
    state = {
        "format": _FORMAT,
        "steps": progress.steps,
        "epochs": progress.epochs,
        "model": weights.state_dict(),
        "momenta": weights.momenta,
        "random": _random_state(on),
    }
    archive = io.BytesIO()  # torch cannot say why a file cannot be written ("unexpected pos"); Python can
    torch.save(state, archive)
    with replaced(folder.checkpoint, keep_as=folder.previous_checkpoint) as unfinished:
        unfinished.write_bytes(archive.getbuffer())


def restore(
    state: dict[str, Any],
    folder: RunFolder,
    weights: Weights,
    on: Sequence[torch.device],
) -> StepCount:
    """Load what `read` has returned into weights and generators; return how far the run was.

    Args:
        folder: where the state was read from.
        on: the devices of the run's replicas. A device without a random state in the checkpoint keeps its own.

    Raises:
        FolderError: it does not fit.
    """
    try:
        weights.load(state["model"], state["momenta"])
        _set_random_state(state["random"], on)
        return StepCount(steps=state["steps"], epochs=state["epochs"])
    except (KeyError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise FolderError(f"the checkpoint in {folder} does not fit the run in its config.json: {reason}") from error


def read(folder: RunFolder, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the contents of the last checkpoint; if it is damaged, those of the one before.

    Args:
        say: called with a line when the last checkpoint cannot be used.

    Raises:
        FolderError: no checkpoint can be used.
    """
    problems = []
    for path in (folder.checkpoint, folder.previous_checkpoint):
        try:
            state = _read(path)
        except _UnusableError as error:
            problems.append(f"{path.name} {error}")
            continue
        if problems:
            say(f"{problems[0]}; using {path.name}, of step {state['steps']}")
            path.replace(folder.checkpoint)  # else the next save would keep the damaged one and drop this one
        return state
    raise FolderError(f"no checkpoint in {folder} can be used: {'; '.join(problems)}")


class _UnusableError(Exception):
    """A checkpoint cannot be read; says why."""


def _read(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU."""
    if not path.exists():
        raise _UnusableError("is missing")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise _UnusableError(f"is damaged (in {damaged})")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except _UnusableError:
        raise
    except OSError as error:
        raise _UnusableError(f"cannot be read ({error.strerror})") from error
    except Exception as error:  # damage can make unzipping and unpickling fail in any way
        raise _UnusableError(f"is damaged ({type(error).__name__})") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise _UnusableError("is not a checkpoint of this version of manyhands")
    return state


def _random_state(on: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of Python's generator and torch's: that of the CPU, and those of the accelerators in use."""
    return {
        "python": random.getstate(),
        "cpu": torch.get_rng_state(),
        **{str(device): torch.get_device_module(device).get_rng_state(device) for device in _accelerators_in(on)},
    }


def _set_random_state(state: dict[str, Any], on: Sequence[torch.device]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    for device in _accelerators_in(on):
        if str(device) in state:
            torch.get_device_module(device).set_rng_state(state[str(device)], device)


def _accelerators_in(on: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in dict.fromkeys(on) if not devices.computes_on_host(device)]
