"""Worker processes that die at a chosen place of a step, and a training loop in which they do."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from unisono import DataParallel
from unisono.engines.processes import fork_server
from unisono.engines.processes.engine import Processes

PLACES = ("before", "forward", "batch norm", "between", "backward", "batch norm's backward")


class Dies(nn.Module):
    """A classifier of which one worker dies at `place`, once for each file in `folder`.

    Its first layer is large enough to be summed during backward.
    """

    def __init__(self, folder: Path, width: int = 300, dropout: float = 0.2) -> None:
        super().__init__()
        self.folder, self.place, self.caller = folder, "", os.getpid()
        self.large = nn.Linear(20, width)
        self.first, self.second = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.middle, self.last, self.dropout = nn.Linear(width, width), nn.Linear(width, 3), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(self.large(x)).relu()
        if self.place == "batch norm":  # the other replicas wait at the second one
            self.die()
        h = self.second(self.middle(self.dropout(h)))
        if self.place == "batch norm's backward" and h.requires_grad:  # and here at that of the second
            h.register_hook(self.die)
        output: torch.Tensor = self.last(h)
        if self.place == "forward":
            self.die()
        if self.place == "backward" and output.requires_grad:
            output.register_hook(self.die)
        return output

    def die(self, _: object = None) -> None:
        """Be killed, if a death is still to be died and this is a worker."""
        if os.getpid() == self.caller:
            return
        for file in sorted(self.folder.iterdir()):
            try:
                file.unlink()
            except FileNotFoundError:  # it was another worker's
                continue
            os.kill(os.getpid(), signal.SIGKILL)


def workers_of(model: DataParallel) -> list[int]:
    """Return the process ids of a model's workers."""
    engine = model._engine
    while not isinstance(engine, Processes):
        engine = engine._engine  # type: ignore[attr-defined]
    return [handle.pid for handle in engine._worker_group.workers] if engine._worker_group is not None else []


def train(
    model: DataParallel,
    deaths: Mapping[int, str | tuple[str, int]],
    steps: int = 6,
    loss_of: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> tuple[list[float], dict[str, Any]]:
    """Train a wrapped `Dies`; return the losses, and all state in the end.

    Args:
        deaths: where a worker dies in a step, and how many times one after the other.
    """
    torch.manual_seed(3)
    module: Any = model.module
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        x, y = torch.randn(17, 20), torch.randint(0, 3, (17,))
        death = deaths.get(step, "")
        module.place, times = death if isinstance(death, tuple) else (death, 1)
        if module.place in ("before", "between"):
            times = 0
        for number in range(times if module.place else 0):
            (module.folder / str(number)).touch()
        if module.place == "before":
            os.kill(workers_of(model)[-1], signal.SIGKILL)
        optimizer.zero_grad()
        if loss_of is not None:
            loss = loss_of(model, x, y)
        else:
            output = model(x)
            if module.place == "between":
                os.kill(workers_of(model)[0], signal.SIGKILL)
            loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert not list(module.folder.iterdir()), "nobody has died there"
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state |= {f"grad of {name}": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return losses, {**state, "random state": torch.get_rng_state()}


def differences(state: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Sequence[str]:
    """Return what is not equal, bit for bit."""
    assert state.keys() == other.keys()
    return [name for name in state if not torch.equal(state[name], other[name])]


class _Runs:
    """Runs code where it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return exec, (self.code,)


@contextlib.contextmanager
def each_fork_request_runs(code: str) -> Iterator[None]:
    """Have the fork server run code when it unpickles a request for a worker, before it starts one."""
    request = fork_server.ForkServer._request

    def with_code(self: Any, message: Any, *args: Any) -> Any:
        return request(self, (*message[:-1], _Runs(code)), *args)

    with mock.patch.object(fork_server.ForkServer, "_request", with_code):
        yield
