"""Replicas that are stuck, wherever others wait for them."""

import copy
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_equal
from helpers.in_time import in_time
from helpers.modules import Calls
from helpers.programs import run_script, until
from helpers.twins import state_of, step
from unisono import DataParallel, ReplicaTimeout

TIMEOUT_S = 1.0
released = threading.Event()  # lets stuck threads end


def gets_stuck() -> None:
    """Wait for something that does not come, as code of a user may."""
    released.wait(100)


class Stuck(nn.Module):
    """Two layers; replica `actor`, the one whose rows begin with its number, is stuck at `place`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(200, 200), nn.BatchNorm1d(200), nn.Linear(200, 200)
        self.actor, self.place = -1, "forward"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        acts = int(x[0, 0]) == self.actor
        y = self.first(torch.tanh(x))
        if acts and self.place == "forward":
            gets_stuck()
        y = torch.tanh(self.norm(y))
        if acts and self.place == "backward":
            y.register_hook(lambda grad: gets_stuck())
        return self.second(y)


def rows(num_replicas: int) -> torch.Tensor:
    x = torch.randn(2 * num_replicas, 200, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.arange(float(num_replicas)).repeat_interleave(2)
    return x


@pytest.fixture(autouse=True)
def _stuck_threads_end() -> Iterator[None]:
    torch.manual_seed(0)
    released.clear()
    yield
    released.set()


def wrap(module: nn.Module, num_replicas: int = 2, **options: Any) -> DataParallel:
    return DataParallel(module, ["cpu"] * num_replicas, **options)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("sync_batch_norm", [False, True], ids=["", "at an exchange"])
def test_a_stuck_replica(sync_batch_norm, place):
    """F7: an error with its number, its stack and how it is stuck; nothing has changed; then the model works."""
    model = wrap(Stuck().train(sync_batch_norm), 3, sync_batch_norm=sync_batch_norm)
    x = rows(3)
    step(model, x)
    model.module.actor, model.module.place = 1, place
    plain = copy.deepcopy(model.module)
    before, model.timeout = state_of(model), TIMEOUT_S
    if place == "backward":  # the forward has updated the running statistics
        output = model(x)
        before[: len(model.state_dict())] = map(torch.clone, model.state_dict().values())
        run = partial(output.square().sum().backward)
    else:
        run = partial(model, x)
    with pytest.raises(ReplicaTimeout, match=r"replica 1 on cpu, rows 2 to 3 of 6.*no progress for 1 s") as raised:
        in_time(run)
    assert (raised.value.replica, raised.value.device, raised.value.timeout) == (1, torch.device("cpu"), TIMEOUT_S)
    assert "in gets_stuck" in raised.value.stack
    assert raised.value.stack in str(raised.value)
    assert_equal(state_of(model), before)
    model.timeout, model.module.actor, plain.actor = None, -1, -1
    plain.load_state_dict(model.module.state_dict())
    torch.testing.assert_close(step(model, x), step(plain, x), rtol=1e-4, atol=1e-4)


def test_a_first_step_that_writes_into_parameters():
    """F7, R22: it is not run again."""
    calls: list[int] = []

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.weight.data.clamp_(-1, 1)
        if int(x[0, 0]) == 1:
            calls.append(len(x))
            gets_stuck()
        return x * module.weight

    model = wrap(Calls(forward, weight=nn.Parameter(torch.full((200,), 2.0))), timeout=TIMEOUT_S)
    with pytest.raises(ReplicaTimeout):
        in_time(lambda: model(rows(2)))
    assert calls == [2]


@pytest.mark.parametrize("actor", [0, 1])
def test_a_lane_of_a_map(actor):
    """F7, I9: the error comes in the batch's turn, and ends the map; a later map computes all of it."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if int(x[0, 0]) == module.stuck_at:
            gets_stuck()
        return x + 1

    model = wrap(Calls(forward, stuck_at=-1))
    batches = [torch.full((2, 1), float(k)) for k in range(6)]
    assert len(list(model.map(batches))) == 6
    model.module.stuck_at, model.timeout = actor, TIMEOUT_S
    outputs = model.map(batches)
    for k in range(actor):
        assert int(in_time(lambda: next(outputs))[0, 0]) == k + 1
    with pytest.raises(ReplicaTimeout) as raised:
        in_time(lambda: next(outputs))
    assert "in gets_stuck" in raised.value.stack
    assert any(f"batch {actor}, by replica" in note for note in raised.value.__notes__)
    assert in_time(lambda: list(outputs)) == []
    model.module.stuck_at, model.timeout = -1, None
    assert [int(output[0, 0]) for output in model.map(batches)] == [1, 2, 3, 4, 5, 6]


def test_all_lanes_of_an_evaluation_are_stuck():
    """F7, I9: the error is raised: what ends the lanes does not wait for them without end."""
    model = wrap(Calls(lambda module, x: gets_stuck()), timeout=TIMEOUT_S)
    with pytest.raises(ReplicaTimeout):
        in_time(lambda: model.evaluate([(torch.zeros(2, 1), None)] * 4, lambda output, target: 0.0))


def test_the_first_replica_is_stuck_and_others_wait_for_it(caplog):
    """F7: it runs in the caller's own thread, where nothing can be raised: the log says where it is."""
    logged = threading.Event()

    class Late(Stuck):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if int(x[0, 0]) == 0 and self.actor == 0:
                logged.wait(100)
            return self.norm(self.first(x))

    model = wrap(Late(), sync_batch_norm=True)
    x = rows(2)
    model(x)
    before = state_of(model)
    model.module.actor, model.timeout = 0, TIMEOUT_S
    with caplog.at_level("ERROR", "unisono"):
        threading.Thread(target=lambda: until(lambda: "logged.wait(100)" in caplog.text) and logged.set()).start()
        with pytest.raises(ReplicaTimeout, match="replica 0 on cpu, rows 0 to 1 of 4"):
            in_time(lambda: model(x))
    assert "logged.wait(100)" in caplog.text
    assert_equal(state_of(model), before)
    model.module.actor, model.timeout = -1, None
    assert model(x).shape == (4, 200)


@pytest.mark.slow
def test_messages_are_progress():
    """F7: a pass that takes longer than the timeout, whose replicas meet at batch norms meanwhile."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for norm in module.norms:
            if x.shape[0] == 2:  # the last replica's
                time.sleep(0.5)  # the pass takes 3 s, each part half of one
            x = norm(x)
        return x

    norms = nn.ModuleList([nn.BatchNorm1d(1) for _ in range(6)])
    model = wrap(Calls(forward, norms=norms), timeout=2.0, sync_batch_norm=True, shares=[3, 2])
    x = torch.randn(5, 1)
    torch.testing.assert_close(model(x), copy.deepcopy(model.module)(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_program_with_an_abandoned_thread_ends():
    """F7, F5: the thread is interrupted at exit, and nothing is printed."""
    done = run_script("""
        import time
        import torch
        import unisono

        class Stuck(torch.nn.Module):
            def forward(self, x):
                while x[0, 0]:
                    time.sleep(0.01)
                return x

        model = unisono.DataParallel(Stuck(), ["cpu"] * 2, timeout=0.2)
        try:
            model(torch.tensor([[0.0], [1.0]]))
        except unisono.ReplicaTimeout as error:
            print(error.replica)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
