"""Processes that train together: they agree, or each says why they do not; nobody waits for what will not come."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import manyhands
from helpers.ranks import Ended, end_ranks, run_ranks
from manyhands.distributed.process_group import communicator_for

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = torch.ones(3, 4)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def wrapped(module: nn.Module | None = None, **options) -> manyhands.DataParallel:
    return manyhands.DataParallel(module or net(), **options)


def step(model: nn.Module) -> None:
    model(ROWS).sum().backward()


def raised_by_all(world_size: int, function: Callable, *args, timeout_s: float = 60) -> list[str]:
    """Return the last line of what each rank has raised."""
    began = time.monotonic()
    ended = end_ranks(world_size, function, *args, timeout_s=timeout_s)
    assert all(end.error for end in ended), ended
    assert time.monotonic() - began < 60, "somebody has waited for the limit, not for an error"
    return [last_error(end) for end in ended]


def last_error(end: Ended) -> str:
    return [line for line in end.error.splitlines() if line and not line.startswith((" ", "raised in"))][-1]


# Exchanges


def exchanges(rank: int, world_size: int) -> None:
    communicator = communicator_for()
    assert (communicator.rank, communicator.world_size) == (rank, world_size)
    assert communicator_for() is communicator
    numbers = communicator.all_gather([rank, 2**52 + 1, 0.1], "testing").wait()
    assert numbers == [[r, 2**52 + 1, 0.1] for r in range(world_size)]
    assert (
        communicator.all_gather_object({"rank": rank, "more": "x" * rank * 1000}, "testing")[-1]["rank"]
        == world_size - 1
    )
    group = communicator.group_for(torch.device("cpu"), "testing")
    for tensor in (torch.ones(3), torch.ones(0, 4), torch.tensor(1.0), torch.ones(2, dtype=torch.complex64)):
        assert torch.equal(communicator.all_reduce(tensor.clone(), group, "testing"), tensor * world_size)
    mixed = [
        torch.full((2, 3), rank, dtype=torch.bfloat16),
        torch.full((2,), rank % 2 == 0),
        torch.full((), rank, dtype=torch.int64),
        torch.zeros(0),
        torch.full((2, 2, 2, 2), float(rank)).to(memory_format=torch.channels_last),
        torch.full((3, 3), float(rank)).t()[::2],
    ]
    versions = [tensor._version for tensor in mixed]
    communicator.broadcast(world_size - 1, mixed, group, "testing")()
    assert versions == [tensor._version for tensor in mixed], "constants may be part of a graph"
    assert all((tensor.to(torch.float64) == float(tensor.dtype != torch.bool) * (world_size - 1)).all() or
               tensor.dtype == torch.bool for tensor in mixed)  # fmt: skip
    assert mixed[1].tolist() == [(world_size - 1) % 2 == 0] * 2
    indices = torch.tensor([[rank, 0, rank]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(3, 2), (5, 2)).coalesce()
    expected = torch.zeros(5, 2)
    for r in range(world_size):
        expected += torch.sparse_coo_tensor(torch.tensor([[r, 0, r]]), torch.ones(3, 2), (5, 2)).to_dense()
    assert torch.equal(communicator.all_reduce_sparse(sparse, group, "testing").to_dense(), expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_exchanges(world_size):
    run_ranks(world_size, exchanges, world_size)


# Models that differ, and steps


def differ(rank: int, change: str) -> None:
    module = net()
    if rank == 1:
        if change == "name":
            module = nn.Sequential(*[nn.Sequential(layer) for layer in module])
        elif change == "shape":
            module[2] = nn.Linear(4, 3)
        elif change == "dtype":
            module[2].double()
        elif change == "count":
            module.append(nn.Linear(2, 2))
        elif change == "requires_grad":
            module[2].bias.requires_grad_(False)
        elif change == "buffer":
            module.register_buffer("extra", torch.zeros(2))
    wrapped(module)


@pytest.mark.parametrize(
    ("change", "first", "second"),
    [
        ("name", "parameter 0.weight torch.float32 (4, 4) (4, 1)", "parameter 0.0.weight"),
        ("shape", "parameter 2.weight torch.float32 (2, 4)", "parameter 2.weight torch.float32 (3, 4)"),
        ("dtype", "parameter 2.weight torch.float32", "parameter 2.weight torch.float64"),
        ("count", "nothing more", "parameter 3.weight"),
        ("requires_grad", "parameter 2.bias torch.float32 (2,) (1,) requires_grad=True", "requires_grad=False"),
        ("buffer", "nothing more", "buffer extra"),
    ],
)
def test_models_that_differ(change, first, second):
    """C7, C11"""
    for message in raised_by_all(3, differ, change):
        assert "the models of the processes differ: rank 0 has" in message
        assert f"rank 0 has {first}" in message
        assert f"rank 1 {second}" in message or ("rank 1 parameter 2.bias" in message and second in message)


def order_of_two(rank: int) -> None:
    models = [wrapped(), wrapped()]
    for model in models[:: 1 if rank else -1]:
        step(model)


def one_forward_more(rank: int) -> None:
    model = wrapped()
    if rank == 1:
        model(ROWS)
    step(model)


def eval_on_one(rank: int) -> None:
    model = wrapped()
    if rank == 1:  # whose next forward then has the number that the other's has
        model(ROWS)
        model.eval()
    step(model)


def no_sync_on_one(rank: int) -> None:
    model = wrapped()
    if rank == 0:
        with model.no_sync():
            step(model)
    else:
        step(model)


def frozen_on_one(rank: int) -> None:
    model = wrapped()
    model.module[0].requires_grad_(rank == 0)
    step(model)


def weight_on_one(rank: int) -> None:
    model = wrapped()
    if rank == 1:
        model.set_batch_weight(3)
    step(model)


def hook_on_one(rank: int) -> None:
    model = wrapped()
    if rank == 1:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    step(model)


def sum_on_one(rank: int) -> None:
    step(wrapped(loss="sum" if rank else "mean"))


def other_classes(rank: int) -> None:
    wrapped(net() if rank else nn.Linear(2, 2))


def backward_and_wrapping(rank: int) -> None:
    model = wrapped()
    step(model) if rank else wrapped()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (order_of_two, "rank 0 is in backward of wrapped model 2, rank 1 in that of 1"),
        (one_forward_more, "rank 0 is in backward of its forward 1, rank 1 of its 2"),
        (eval_on_one, "of ranks 0 and 1, rank 0 has run forward in training mode, the other has not"),
        (no_sync_on_one, "of ranks 0 and 1, rank 0 is inside no_sync(), the other is not"),
        (frozen_on_one, "where rank 0 has 0.weight torch.float32 (4, 4) (4, 1), rank 1 has 2.weight"),
        (weight_on_one, "of ranks 0 and 1, rank 1 has set the weight of its batch, the other has not"),
        (hook_on_one, "of ranks 0 and 1, rank 1 has a communication hook, the other has not"),
        (sum_on_one, 'of ranks 0 and 1, rank 1 has loss="sum", the other has not'),
    ],
)
def test_steps_that_differ(function, expected):
    """C11"""
    for message in raised_by_all(2, function):
        assert message.startswith("RuntimeError: the processes do not sum the same gradients: ")
        assert expected in message


def test_other_models_at_the_same_place():
    """C11"""
    for rank, message in enumerate(raised_by_all(2, other_classes, timeout_s=10)):
        assert "rank 0" in message
        assert "rank 1" in message
        assert "wrapping Linear" in message, rank
        assert "wrapping Sequential" in message, rank


def test_one_wraps_while_the_other_trains():
    """C11"""
    messages = raised_by_all(2, backward_and_wrapping, timeout_s=2)
    assert any("summing gradients over the processes" in message for message in messages)
    assert any("wrapping Sequential" in message for message in messages)


# Waiting for somebody who does not come


def one_batch_norm_more(rank: int) -> None:
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), sync_batch_norm=True)
    if rank == 0:
        model(ROWS)
    step(model)


def test_several_exchanges_begun_before_it_is_noticed():
    """C11, C9: who knows it first tells again until all do."""
    for message in raised_by_all(2, one_batch_norm_more):
        assert "the processes do not do the same" in message
        assert "reporting a mismatch" not in message
        assert "at a batch norm over all processes" in message


def wraps_alone(rank: int) -> str:
    if rank == 1:
        time.sleep(30)
        return ""
    started = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        wrapped()
    assert time.monotonic() - started < 15
    with pytest.raises(RuntimeError, match="did not reach it"):  # and does not wait again
        wrapped()
    os.kill(int(Path(os.environ["PIDS"], "1").read_text()), signal.SIGKILL)
    return str(raised.value)


def notes_its_number(rank: int, function: Callable, *args) -> object:
    path = Path(os.environ["PIDS"], str(rank))
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    return function(rank, *args)


def test_wrapping_in_one_process_only(tmp_path):
    """C11: named within the timeout."""
    ended = end_ranks(2, notes_its_number, wraps_alone, timeout_s=2, env={"PIDS": str(tmp_path)})
    assert ended[0].error is None, ended[0].error
    assert "rank 0 has waited 2 s for the others at a DataParallel that spans processes" in ended[0].value
    assert "rank 1 did not reach it" in ended[0].value
    assert "wrap the same models" in ended[0].value


def hangs(rank: int) -> str:
    model = wrapped()
    step(model)
    if rank == 1:
        time.sleep(30)
        return ""
    with pytest.raises(RuntimeError) as raised:
        step(model)
    for again in (lambda: step(model), wrapped, lambda: list(model.batches([ROWS]))):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 0 has waited"):
            again()
        assert time.monotonic() - started < 1
    with torch.no_grad():
        model(ROWS)  # this process alone
    os.kill(int(Path(os.environ["PIDS"], "1").read_text()), signal.SIGKILL)
    return str(raised.value)


def test_a_process_that_hangs(tmp_path):
    """C12, C11: the timeout names it; afterwards nothing waits again."""
    ended = end_ranks(2, notes_its_number, hangs, timeout_s=2, env={"PIDS": str(tmp_path)})
    assert ended[0].error is None, ended[0].error
    assert "waited 2 s for the others at summing gradients over the processes" in ended[0].value
    assert "rank 1 does not wait for any rank" in ended[0].value


# Processes that fail


class TroubleError(Exception):
    """What goes wrong in these tests."""


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.where = net(), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise TroubleError("no more memory")
        x = self.body(x)
        if self.where == "backward":
            x.register_hook(self.trouble)
        return x

    def trouble(self, grad: torch.Tensor) -> None:
        raise TroubleError("no more memory")


class FailsWithBatchNorm(Fails):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))


def fails(rank: int, where: str, options: dict) -> None:
    model = wrapped((FailsWithBatchNorm if "sync_batch_norm" in options else Fails)(), **options)
    step(model)
    if rank == 1:
        model.module.where = where
        if where == "loading":
            raise TroubleError("no more memory")
        if where == "exit":
            sys.exit(0)
        if where == "exit 3":
            sys.exit(3)
        if where == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "_exit":
            os._exit(0)
    for _ in range(2):
        step(model)


TWO = {"device_ids": ["cpu"] * 2}
PROCESSES = {**TWO, "engine": "processes"}


def each_with_options(*where: str, with_processes: tuple[str, ...]) -> pytest.MarkDecorator:
    """Parametrise over where a rank fails and how its replicas run.

    Each rank with worker processes starts a fork server, which imports torch: three seconds of processor time. Where
    nothing has failed inside of the engine, those who wait cannot tell, and wait as they do for the other failures.
    """
    ways = {"one replica": ({}, where), "threads": (TWO, where), "processes": (PROCESSES, with_processes)}
    cases = [pytest.param(w, options, id=f"{w}-{name}") for name, (options, some) in ways.items() for w in some]
    return pytest.mark.parametrize(("where", "options"), cases)


@each_with_options("forward", "backward", "loading", with_processes=("forward", "backward"))
def test_the_others_learn_why_one_has_failed(where, options):
    """C12"""
    ended = end_ranks(3, fails, where, options)
    assert "TroubleError: no more memory" in ended[1].error
    for rank in (0, 2):
        assert "has failed while this one was at summing gradients over the processes" in ended[rank].error
        assert "TroubleError: no more memory" in ended[rank].error
        assert "rank 1" in ended[rank].error.lower()
        assert ended[rank].exit_code == 1


@each_with_options("forward", "backward", "loading", "kill", with_processes=("backward", "kill"))
def test_who_waits_at_a_batch_norm_learns_it_too(where, options):
    """C12, C9: also replicas in worker processes, which wait for what the caller gets from the other processes."""
    ended = end_ranks(2, fails, where, {**options, "sync_batch_norm": True})
    assert "while this one was at a batch norm over all processes" in last_error(ended[0])
    assert where == "kill" or "TroubleError: no more memory" in ended[0].error


@pytest.mark.parametrize("where", ["exit", "exit 3", "kill", "_exit"])
def test_the_others_learn_that_one_has_ended(where):
    """C12"""
    ended = end_ranks(3, fails, where, {})
    assert ended[1].exit_code == {"exit": 0, "exit 3": 3, "kill": -signal.SIGKILL, "_exit": 0}[where]
    said = [last_error(ended[rank]) for rank in (0, 2)]  # the second of them may see that the first has ended too
    assert all(" ended while" in line or "Rank 2 says" in line or "Rank 0 says" in line for line in said), said
    assert any("rank 1 has ended while this one was at summing gradients over the processes" in line for line in said)


def fails_between_wraps(rank: int) -> None:
    wrapped()
    if rank == 0:
        raise TroubleError("no such file")
    wrapped()


def test_a_process_that_fails_before_it_wraps():
    """C12: found in the store, before there is any connection."""
    ended = end_ranks(2, fails_between_wraps, timeout_s=30)
    assert "TroubleError: no such file" in last_error(ended[1])


# A whole program, as torchrun starts it


PROGRAM = """
import sys, os, torch, manyhands
from torch import nn
rank = int(os.environ["RANK"])
model = manyhands.DataParallel(nn.Linear(4, 2))
data = torch.utils.data.TensorDataset(torch.ones(6, 4))
{body}
print("done", rank, flush=True)
"""


def run_program(tmp_path: Path, body: str, world_size: int = 2, *flags: str) -> list[subprocess.CompletedProcess]:
    """Run a program in several processes that meet at a port, as torchrun's do; return how each has ended."""
    import socket

    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(body=textwrap.dedent(body)))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    own = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *flags, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=90)
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ended


def test_a_program_ends_without_a_word(tmp_path):
    """With warnings as errors, loaders with workers, an own excepthook, and ranks that end at different times."""
    body = """
    for _ in range(2):
        for (x,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=2):
            model(x).sum().backward()
    pid = os.fork()
    if pid == 0:
        try:
            model(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            assert "forked by rank" in str(error), error
        sys.exit(3)  # a child that ends, or fails, is nobody else's affair
    os.waitpid(pid, 0)
    model(x).sum().backward()
    if rank == 0:
        model(x).sum().backward() if False else None
        sys.exit(0)
    torch.distributed.destroy_process_group()
    """
    ended = run_program(tmp_path, body, 2, "-W", "error")
    assert [end.returncode for end in ended] == [0, 0], [end.stderr for end in ended]
    assert [end.stderr for end in ended] == ["", ""]


def test_a_program_that_fails_in_the_first_process(tmp_path):
    """C12: which is the one that holds the store."""
    body = """
    hook = sys.excepthook
    sys.excepthook = lambda *error: (print("mine", flush=True), hook(*error))
    model(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        raise ValueError("bad line in the file")
    model(torch.ones(2, 4)).sum().backward()
    """
    ended = run_program(tmp_path, body)
    assert [end.returncode for end in ended] == [1, 1]
    assert [end.stdout for end in ended] == ["mine\n"] * 2
    assert "ValueError: bad line in the file" in ended[0].stderr
    last = ended[1].stderr.strip().splitlines()[-1]
    assert "rank 0" in last.lower()
    assert "ended" in last or "bad line in the file" in last


def test_a_first_process_that_is_killed(tmp_path):
    """C12: the store goes with it."""
    body = """
    model(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        os.kill(os.getpid(), 9)
    model(torch.ones(2, 4)).sum().backward()
    """
    ended = run_program(tmp_path, body)
    assert [end.returncode for end in ended] == [-9, 1]
    assert "RuntimeError: rank 0 has ended while this one was at summing gradients" in ended[1].stderr


def test_ctrl_c_while_waiting(tmp_path):
    """C12: it ends the wait at once, and the other is told."""
    body = """
    import signal, threading, time
    model(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        model(torch.ones(2, 4)).sum().backward()
    else:
        time.sleep(2)
        model(torch.ones(2, 4)).sum().backward()
    """
    ended = run_program(tmp_path, body)
    assert "KeyboardInterrupt" in ended[0].stderr
    assert "KeyboardInterrupt" in ended[1].stderr.strip().splitlines()[-1] or "rank 0 has ended" in ended[1].stderr


def joined_twice(rank: int, folder: str) -> list[bool]:
    import gc
    import weakref

    spans = []
    communicator = weakref.ref(communicator_for())
    for attempt in range(2):
        model = wrapped()
        step(model)
        spans.append(model.spans_processes)
        del model
        torch.distributed.destroy_process_group()
        gc.collect()
        if attempt == 0:
            assert communicator() is None, gc.get_referrers(communicator())
            store = torch.distributed.FileStore(str(Path(folder, "second")), 2)
            torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return spans


def test_the_group_of_a_program_can_be_made_anew(tmp_path):
    assert run_ranks(2, joined_twice, str(tmp_path)) == [[True, True]] * 2
