"""A training in double precision whose ranks have uneven numbers of rows in each step; the oracle is one device.

Scripts made from the pages of launchers take `new_model()` and `loader` from here, and `keep` what they have come to. A
rank that UNISONO_CLUSTERS_KILL names kills itself in its third step.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

NUM_STEPS = 4
_ROWS = (5, 3, 7, 1)
_KILLED_IN = 2
_GOAL = 2.3e-16  # the spacing of doubles from 1 up, rounded up
_LEARNING_RATE = 0.1  # as on the page


def new_model() -> nn.Module:
    """Return the model as it begins; double precision is the default from now on."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def batches_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's batches. Every second rank has one fewer than the others."""
    return [_batch(rank, step) for step in range(NUM_STEPS - rank % 2)]


def _batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(_ROWS[(rank + step) % len(_ROWS)], 5, generator=generator, dtype=torch.float64)
    return x, x[:, :3].argmax(1)


class _Loader:
    """The batches of the rank that this process is, once it is one."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank, _ = _rank_and_world_size()
        for step, batch in enumerate(batches_of(rank)):
            if step == _KILLED_IN and os.environ.get("UNISONO_CLUSTERS_KILL") == str(rank):
                (_folder() / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


loader = _Loader()


def keep(model: nn.Module) -> None:
    """Write the weights of this rank where `largest_difference` finds them."""
    rank, world_size = _rank_and_world_size()
    weights = [parameter.detach() for parameter in model.parameters()]
    torch.save(weights, _folder() / f"{rank} of {world_size}, {os.getpid()}.pt")


def _folder() -> Path:
    return Path(os.environ["UNISONO_CLUSTERS_KEEP"])


def _rank_and_world_size() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def compared(folder: Path, world_size: int) -> str:
    """Return in words by how much the weights of the ranks differ from those of one device; fail above the goal."""
    difference = largest_difference(folder, world_size)
    words = f"largest difference of a weight {difference:.1e}"
    if difference > _GOAL:
        raise AssertionError(f"{words}, expected {_GOAL:.1e} at most")
    return words


def seconds_since_kill(folder: Path) -> str:
    """Return how long ago the rank was killed; fail if it was not, or if another rank has come to its end."""
    if not (folder / "killed").exists() or list(folder.glob("*.pt")):
        raise AssertionError("a rank was to be killed in its third step, and the others were to end with an error")
    return f"{time.time() - (folder / 'killed').stat().st_mtime:.0f} s after it"


def others_ended(folder: Path, output: str) -> str:
    """Return in words how the ranks beside rank 1, which was killed, have ended, from what they have printed."""
    seconds = seconds_since_kill(folder)
    named = re.findall(r"rank 1 has (?:ended|failed)[^\n]*", output)
    if not named:
        raise AssertionError(f"no rank says that rank 1 has ended: {' '.join(output.split())[-200:]}")
    return f'the others have ended {seconds}: "{named[0][:90].strip()}"'


def largest_difference(folder: Path, world_size: int) -> float:
    """Return the largest difference of a weight, of any rank, from that of one device with all rows."""
    kept = sorted(folder.glob("*.pt"))
    ranks = [path.name.partition(",")[0] for path in kept]
    expected = [f"{rank} of {world_size}" for rank in range(world_size)]
    if ranks != expected:
        raise AssertionError(f"ranks that have ended: {', '.join(ranks) or 'none'}; expected {', '.join(expected)}")
    one_device = _train_on_one_device(world_size)
    return max(
        (one - other).abs().max().item()
        for path in kept
        for one, other in zip(torch.load(path), one_device, strict=True)
    )


def _train_on_one_device(world_size: int) -> list[Tensor]:
    default = torch.get_default_dtype()
    model = new_model()
    torch.set_default_dtype(default)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    for step in range(NUM_STEPS):
        batches = [batches[step] for batches in map(batches_of, range(world_size)) if step < len(batches)]
        x, y = map(torch.cat, zip(*batches, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]
