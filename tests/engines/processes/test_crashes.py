"""The crash table: what can go wrong in each message between the caller and a worker, and what becomes of it.

Each case is a place (in which message, and where in it) and an action (what goes wrong there). After the error that is
expected everything is as before the step, the next step has the plain module's numbers, and nothing is left. The table
is that of docs/crashes.md; what is not marked there runs in `make test-all` only.
"""

import copy
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import leftovers
from helpers.deaths import each_fork_request_runs
from helpers.in_time import in_time
from helpers.programs import until
from helpers.twins import assert_equal, assert_same_gradients, state_of
from unisono import DataParallel, ReplicaDied, ReplicaTimeout
from unisono.engines.processes import fork_server
from unisono.engines.processes.channel import Channel
from unisono.engines.processes.remote_exchange import RemoteExchange

TIMEOUT_S = 1.0

EXPECTED: dict[str, tuple[type[BaseException], str]] = {
    "raise": (ValueError, "as asked"),
    "exit": (SystemExit, "5"),
    "C exit": (ReplicaDied, r"replica 1 on cpu.*: its worker process \d+ exited with status 3"),
    "segmentation fault": (
        ReplicaDied,
        r"replica 1 on cpu.*: its worker process \d+ was ended by SIGSEGV(.|\n)*in act",
    ),
    "SIGKILL": (ReplicaDied, r"replica 1 on cpu.*: its worker process \d+ was ended by SIGKILL"),
    "SIGSTOP": (ReplicaTimeout, r"replica 1 on cpu.*: its worker process \d+ was stopped(.|\n)*in act"),
}


def act(action: str) -> None:
    if action == "raise":
        raise ValueError("as asked")
    if action == "exit":
        sys.exit(5)
    if action == "C exit":
        os._exit(3)
    if action == "segmentation fault":
        ctypes.string_at(0)
    # To this thread: of a signal to the process, another thread may take notice, and this one meanwhile go on.
    signal.pthread_kill(threading.get_ident(), getattr(signal, action))


class Acts:
    """Acts when it is pickled or unpickled: in the caller or in a worker."""

    def __init__(self, action: str, when: str, in_caller: bool, caller: int) -> None:
        self.action, self.when, self.in_caller, self.caller = action, when, in_caller, caller

    def act(self, when: str) -> None:
        if when == self.when and (os.getpid() == self.caller) is self.in_caller:
            act(self.action)

    def __reduce__(self) -> Any:
        self.act("pickling")
        return load, (self.action, self.when, self.in_caller, self.caller)


def load(action: str, when: str, in_caller: bool, caller: int) -> Acts:
    loaded = Acts(action, when, in_caller, caller)
    loaded.act("unpickling")
    return loaded


class Model(nn.Module):
    """A model whose second replica acts at a place; the other places are those of `Acts`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 200), nn.BatchNorm1d(200), nn.Linear(200, 200)
        self.place, self.action, self.caller = "", "", os.getpid()
        self.payload: Any = None
        self.acted: Path | None = None  # a file that the worker makes before it acts in a map

    def forward(self, x: torch.Tensor, payload: Any = None) -> Any:
        in_worker = os.getpid() != self.caller
        if self.acted is not None:
            if in_worker and not self.acted.exists():
                self.acted.touch()
                act(self.action)
            until(self.acted.exists)
        place = self.place if in_worker else ""
        if place == "forward":
            act(self.action)
        if place in ("request", "response", "withdrawal"):
            self.act_in_exchange(place)
        y = torch.tanh(self.norm(self.first(x)))
        if place == "draw":
            act(self.action)
        if place == "backward":
            y.register_hook(lambda grad: act(self.action))
        y = self.second(torch.dropout(y, 0.25, self.training))
        if place == "pickling the output":
            return y, Acts(self.action, "pickling", False, self.caller)
        if place == "unpickling the output":
            return y, Acts(self.action, "unpickling", True, self.caller)
        return y

    def act_in_exchange(self, place: str) -> None:
        """Act before the next request or withdrawal is sent, or once the next response has come."""
        cls: Any = RemoteExchange if place == "withdrawal" else Channel
        method = {"request": "send", "response": "receive", "withdrawal": "withdraw"}[place]
        original = getattr(cls, method)

        def instead(*args: Any, **kwargs: Any) -> Any:
            setattr(cls, method, original)
            received = original(*args, **kwargs) if place == "response" else None
            act(self.action)
            return received if place == "response" else original(*args, **kwargs)

        setattr(cls, method, instead)


IN_WORKER = [
    *("unpickling the module", "unpickling an update", "unpickling the inputs", "forward", "pickling the output"),
    *("backward", "request", "response", "withdrawal", "draw", "lane"),
]
CASES = [(place, action) for place in IN_WORKER for action in EXPECTED]
CASES += [(f"{what} in the caller", "raise") for what in ("pickling the inputs", "unpickling the output")]
CASES += [("pickling the module in the caller", "raise"), ("pickling an update in the caller", "raise")]
FAST = {
    ("unpickling the module", "segmentation fault"),
    ("unpickling an update", "raise"),
    ("unpickling the inputs", "C exit"),
    ("pickling the output", "raise"),
    ("backward", "SIGSTOP"),
    ("request", "exit"),
    ("response", "SIGKILL"),
    ("withdrawal", "raise"),
    ("draw", "C exit"),
    ("lane", "SIGSTOP"),
    ("unpickling the output in the caller", "raise"),
}


def marked(cases: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow, id=" - ".join(case)) for case in cases]


def momenta(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["momentum_buffer"].clone() for state in optimizer.state.values()]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    output = model(x)
    output.square().mean().backward()
    optimizer.step()
    return output.detach()


def fail(model: DataParallel, place: str, action: str, x: torch.Tensor, acted: Path) -> Callable[[], Any]:
    """Prepare the failure; return what fails."""
    module = model.module
    module.action = action
    in_caller = place.endswith(" in the caller")
    what = place.removesuffix(" in the caller")
    if what in ("unpickling the module", "pickling the module"):
        module.payload = Acts(action, what.split()[0], in_caller, os.getpid())
        model.refresh()
    elif what in ("unpickling an update", "pickling an update"):
        module.payload = Acts(action, what.split()[0], in_caller, os.getpid())
    elif what in ("unpickling the inputs", "pickling the inputs"):
        return lambda: model(x, Acts(action, what.split()[0], in_caller, os.getpid()))
    elif place == "lane":
        module.acted = acted
        return lambda: list(model.map([x] * 4))
    else:
        module.place = "unpickling the output" if in_caller else place
    if place != "backward":
        return lambda: model(x)
    output = model(x)
    return lambda: output.square().mean().backward()


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("place", "action"), marked(CASES))
def test_what_goes_wrong_in_a_message(place: str, action: str, tmp_path: Path) -> None:
    """F1, F4, F7, F8: the error, the state after it, and the next step."""
    torch.manual_seed(0)
    exchanges = place in ("request", "response", "withdrawal")
    draws = place == "draw"
    model = DataParallel(
        Model().train(exchanges or draws),
        ["cpu"] * 2,
        engine="processes",
        sync_batch_norm=exchanges or draws,
        randomness="one_device" if exchanges or draws else "per_replica",
    )
    plain = copy.deepcopy(model.module)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (model, plain)]
    x = torch.randn(5, 4)
    states = torch.get_rng_state()
    train_step(model, optimizers[0], x)
    torch.set_rng_state(states)
    train_step(plain, optimizers[1], x)

    run = fail(model, place, action, x, tmp_path / "acted")
    before = [*state_of(model), *momenta(optimizers[0])]
    if action == "SIGSTOP":
        model.engine.timeout = TIMEOUT_S
        model._engine._worker_group.set_timeout(TIMEOUT_S)  # a backward has that of its forward
    error, message = EXPECTED[action]
    if (place, action) == ("pickling the output", "raise"):
        error, message = TypeError, r"cannot gather the output, which cannot leave the worker process \(as asked\)"
    if place in ("pickling the module in the caller", "pickling an update in the caller"):
        error, message = TypeError, r"attribute 'payload' \(Acts\) cannot be pickled \(ValueError: as asked\)"
    with pytest.raises(error, match=message) as raised:
        in_time(run)
    assert_equal([*state_of(model), *momenta(optimizers[0])], before)

    module, model.engine.timeout = model.module, None
    module.place, module.action, module.payload, module.acted = "", "", None, None
    states = torch.get_rng_state()
    output = train_step(model, optimizers[0], x)
    torch.set_rng_state(states)
    torch.testing.assert_close(output, train_step(plain, optimizers[1], x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    assert_same_gradients(module, plain, rtol=1e-4, atol=1e-5)
    model.close()
    raised.value.__traceback__ = None
    del raised, run


# What the server does, and how the error names it. Each of them starts three fork servers: the other actions differ in
# how the server's end is named only.
IN_SERVER = {
    "C exit": ("os._exit(3)", "exited with status 3"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
    "SIGSTOP": ("os.kill(os.getpid(), signal.SIGSTOP)", "was stopped for 1 s"),
}


@pytest.mark.slow
@pytest.mark.parametrize("action", IN_SERVER)
def test_what_goes_wrong_in_a_fork_request(action: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """F4, F7, F8: in the fork server, and in the one that is started in its place."""
    monkeypatch.setenv("UNISONO_PUBLISH", "0")  # else the wrapper opens a file in its second second
    model = DataParallel(nn.Linear(4, 2), ["cpu"] * 2, engine="processes")
    x = torch.randn(4, 4)

    def num_descriptors() -> int:
        model.close()
        until(lambda: leftovers.num_workers() == 0)
        gc.collect()
        return leftovers.of_this_process()[1]

    model(x)
    descriptors, before = num_descriptors(), state_of(model)
    error = ReplicaTimeout if action == "SIGSTOP" else ReplicaDied
    model.engine.timeout = TIMEOUT_S if action == "SIGSTOP" else None
    code, how = IN_SERVER[action]
    with (
        each_fork_request_runs(f"import os, signal; {code}"),
        pytest.raises(error, match=f"could not be started: the fork server .* {how}"),
    ):
        in_time(lambda: model(x))
    assert not fork_server.server.is_running
    model.engine.timeout = None
    torch.testing.assert_close(model(x), model.module(x))
    assert num_descriptors() == descriptors
    assert_equal(state_of(model), before)
    capfd.readouterr()  # the server's traceback
