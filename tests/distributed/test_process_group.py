"""Processes that train together: they agree, or each says why they do not; none waits without end."""

import atexit
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import unisono
from helpers.modules import Calls
from helpers.programs import run_scripts, until
from helpers.ranks import Ended, end_ranks, free_port, in_ranks, run_ranks
from unisono.distributed import environment, failures, process_group, waiting
from unisono.distributed.failures import Failures
from unisono.distributed.process_group import Communicator, RankDevice, communicator_for

ROWS = torch.ones(3, 4)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def wrapped(module: nn.Module | None = None, **options) -> unisono.DataParallel:
    return unisono.DataParallel(module or net(), **options)


def step(model: nn.Module) -> None:
    model(ROWS).sum().backward()


def raised_by_all(world_size: int, function: Callable, *args, timeout_s: float = 240) -> list[str]:
    """Return the last line of what each rank has raised."""
    began = time.monotonic()
    ended = end_ranks(world_size, function, *args, timeout_s=timeout_s)
    assert all(end.error for end in ended), ended
    assert time.monotonic() - began < 200, "a rank has waited for the limit, not for an error"
    return [last_error(end) for end in ended]


def last_error(end: Ended) -> str:
    return [line for line in end.error.splitlines() if line and not line.startswith((" ", "raised in"))][-1]


def mixed(rank: int) -> list[torch.Tensor]:
    return [
        torch.full((2, 3), rank, dtype=torch.bfloat16),
        torch.full((2,), rank % 2 == 0),
        torch.full((), rank, dtype=torch.int64),
        torch.zeros(0),
        torch.full((2, 2, 2, 2), float(rank)).to(memory_format=torch.channels_last),
        torch.full((3, 3), float(rank)).t()[::2],
    ]


@in_ranks(3)
def test_a_broadcast_of_tensors_of_all_kinds(rank: int) -> None:
    """C7, C8"""
    communicator = communicator_for()
    group, tensors = communicator.group_for(communicator.agree_on_devices(torch.device("cpu")), "testing"), mixed(rank)
    versions = [tensor._version for tensor in tensors]
    communicator.broadcast(2, tensors, group, "testing")()
    assert versions == [tensor._version for tensor in tensors], "constants may be part of a graph"
    assert all(map(torch.equal, tensors, mixed(2)))


# Models that differ, and steps


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "name": lambda module: module.__setitem__(0, nn.Sequential(module[0])),
    "dtype": lambda module: module[2].double(),
    "requires_grad": lambda module: module[2].bias.requires_grad_(False),
    "buffer": lambda module: module.register_buffer("extra", torch.zeros(2)),
}


def differ(rank: int, change: str) -> None:
    module = net()
    if rank == 1:
        CHANGES[change](module)
    wrapped(module)


@pytest.mark.parametrize(
    ("change", "first", "second"),
    [
        ("name", "parameter 0.weight torch.float32 (4, 4) (4, 1)", "parameter 0.0.weight"),
        ("dtype", "parameter 2.weight torch.float32 (2, 4)", "parameter 2.weight torch.float64 (2, 4)"),
        (
            "requires_grad",
            "parameter 2.bias torch.float32 (2,) (1,) requires_grad=True",
            "parameter 2.bias torch.float32 (2,) (1,) requires_grad=False",
        ),
        ("buffer", "nothing more", "buffer extra"),
    ],
)
def test_models_that_differ(change, first, second):
    """C7, C11"""
    for message in raised_by_all(3, differ, change):
        assert f"the models of the processes differ: rank 0 has {first}" in message
        assert f"rank 1 {second}" in message


def wrap_on_another_device(rank: int) -> None:
    wrapped(nn.Linear(2, 2, device="meta"), device_ids=["cpu"] * 2)


def test_a_model_that_is_not_on_the_first_device():
    """C7, A4: with several devices a process it is not moved; the error came out of the backend, and did not say so."""
    for message in raised_by_all(2, wrap_on_another_device):
        assert "module must have its parameters and buffers on device cpu (device_ids[0]), but weight is on" in message


def differ_in(rank: int, what: str) -> None:
    model = wrapped(loss="sum" if what == "loss" and rank else "mean")
    if what == "order":
        other = wrapped()
        if rank == 0:
            step(other)
    if what == "frozen":
        model.module[0].requires_grad_(rank == 0)
    if rank == 1:
        if what in ("forwards", "mode"):
            model(ROWS)
        if what == "mode":  # the next forward of rank 1 then has the number that rank 0's has
            model.eval()
        if what == "weight":
            model.set_batch_weight(3)
        if what == "hook":
            model.register_comm_hook(None, default_hooks.allreduce_hook)
    with model.no_sync() if what == "no_sync" and rank == 0 else contextlib.nullcontext():
        step(model)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("order", "rank 0 is in backward of wrapped model 2, rank 1 in backward of wrapped model 1"),
        ("forwards", "rank 0 is in backward of its forward 1, rank 1 of its 2"),
        ("mode", "of ranks 0 and 1, rank 0 ran forward in training mode, the other did not"),
        ("no_sync", "of ranks 0 and 1, rank 0 is inside no_sync(), the other is not"),
        ("frozen", "where rank 0 has 0.weight torch.float32 (4, 4) (4, 1), rank 1 has 2.weight"),
        ("weight", "of ranks 0 and 1, rank 1 set the weight of its batch, the other did not"),
        ("hook", "of ranks 0 and 1, rank 1 has a communication hook, the other has not"),
        ("loss", 'of ranks 0 and 1, rank 1 has loss="sum", the other has not'),
    ],
)
def test_steps_that_differ(what, expected):
    """C11"""
    for message in raised_by_all(2, differ_in, what):
        assert message.startswith("RuntimeError: the processes do not sum the same gradients: ")
        assert expected in message


def other_classes(rank: int) -> None:
    wrapped(net() if rank else nn.Linear(2, 2))


def backward_and_wrapping(rank: int) -> None:
    model = wrapped()
    step(model) if rank else wrapped()


@pytest.mark.parametrize(
    ("function", "timeout_s", "expected"),
    [
        (other_classes, 10, ["wrapping Linear", "wrapping Sequential"]),
        # Found before the timeout: neither can go on.
        (backward_and_wrapping, 240, ["summing gradients over the processes", "wrapping Sequential"]),
    ],
    ids=["other classes", "backward and wrapping"],
)
def test_ranks_that_wait_at_different_places(function, timeout_s, expected):
    """C11"""
    messages = "\n".join(raised_by_all(2, function, timeout_s=timeout_s))
    assert all(text in messages for text in ("rank 0", "rank 1", *expected)), messages


def receives_slowly(rank: int, received: Path) -> None:
    """Have rank 0 go on to a barrier while rank 1 still waits for what rank 0 has sent, as in a broadcast."""
    communicator = communicator_for()
    get, looks = communicator.failures.store.get, []

    def look(key: str) -> str:
        text = get(key)
        if key == "at/1" and text:
            looks.append(text)
            if len(looks) > 5:
                received.touch()
        return text

    communicator.failures.store.get = look
    if rank == 1:
        communicator.waits.until(received.exists, "receiving buffers")
    communicator.barrier("wrapping Linear")


def test_a_rank_that_waits_for_what_was_sent_does_not_wait_for_another(tmp_path):
    """C11: after two seconds at one place it was said to wait for the rank at the barrier, and training ended."""
    run_ranks(2, receives_slowly, tmp_path / "received")


def one_batch_norm_more(rank: int, synchronised: bool) -> None:
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), sync_batch_norm=True)
    if rank == 0:
        model(ROWS)
    with contextlib.nullcontext() if synchronised else model.no_sync():
        step(model)


def sums_or_takes_a_batch(rank: int) -> None:
    model = wrapped()
    list(model.batches([ROWS]))
    step(model) if rank else list(model.batches([ROWS]))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # The rank that notices it first reports it until all have noticed.
        (
            partial(one_batch_norm_more, synchronised=False),
            ["processes do different things", "at a batch norm over all"],
        ),
        (
            partial(one_batch_norm_more, synchronised=True),
            ["rank 0 at batch norm 1 of its forward", "rank 1 at batch norm 2 of its backward"],
        ),
        # They are in different process groups, so the store says that both wait for the other.
        (sums_or_takes_a_batch, ["do different things: rank 0 is at taking the next batch, rank 1 at summing"]),
    ],
    ids=["several exchanges begun", "forward and backward", "a sum and an all-gather"],
)
def test_different_collectives(function, expected):
    """C11, C9"""
    for message in raised_by_all(2, function):
        assert all(text in message for text in expected), message
        assert "reporting a mismatch" not in message


LIMIT_S = 5


def maps(model: unisono.DataParallel) -> None:
    list(model.map([ROWS] * 4))


def waits_alone(rank: int, steps: Callable[..., object] | None, seen: Path) -> str:
    """Have rank 0 wait for rank 1, which hangs until that is seen; return the error of rank 0."""
    said: list[str] = []
    waiting.log_once = said.append
    environment.SAID_AFTER_S = failures.PATIENCE_S = 1
    if steps:
        model = wrapped()
        steps(model)
    if rank == 1:
        until(seen.exists)
        os._exit(0)
    said.clear()
    with pytest.raises(RuntimeError) as raised:
        steps(model) if steps else wrapped()
    # Afterwards nothing waits again.
    for again in (lambda: step(model), wrapped, lambda: list(model.batches([ROWS]))) if steps else (wrapped,):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=f"rank 0 has waited {LIMIT_S} s"):
            again()
        assert time.monotonic() - started < LIMIT_S
    if steps:
        with torch.no_grad():
            model(ROWS)  # this process alone
        assert "rank 0 has waited 1 s for the others at " in said[0]
        assert "; rank 1 is in no collective. It goes on when they come, or fails after" in said[0]
    else:
        assert "rank 0 has waited 1 s at a DataParallel that spans processes, and rank 1 did not reach it" in said[0]
    assert len(said) == 1, said
    seen.touch()
    return str(raised.value)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (None, ["at a DataParallel that spans processes", "rank 1 did not reach it", "Wrap the same models"]),
        (step, ["at summing gradients over the processes", "rank 1 is in no collective"]),
        (maps, ["at the outputs of a map", "rank 1 is in no collective"]),
    ],
    ids=["wrapping", "backward", "map"],
)
def test_a_process_that_hangs(tmp_path, steps, expected):
    """C11, C12: the timeout names it. In collectives nothing was said before."""
    ended = end_ranks(2, waits_alone, steps, tmp_path / "seen", timeout_s=LIMIT_S)
    assert ended[0].error is None, ended[0].error
    for text in [f"rank 0 has waited {LIMIT_S} s for the others", *expected]:
        assert text in ended[0].value


# Processes that fail


class TroubleError(Exception):
    """What goes wrong in these tests."""


def trouble(*_: object) -> None:
    raise TroubleError("no more memory")


def fails_at(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a body; `where` it fails is "forward", or the number of the layer at whose output backward does."""
    if module.where == "forward":
        trouble()
    for number, layer in enumerate(module.body):
        x = layer(x)
        if module.where == number:
            x.register_hook(trouble)
    return x


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))


def fails(rank: int, where: str, options: dict) -> None:
    body = with_batch_norm() if "sync_batch_norm" in options else net()
    model = wrapped(Calls(fails_at, body=body, where=""), **options)
    step(model)
    if rank == 1:
        model.module.where = len(body) - 1 if where == "backward" else where
        if where == "loading":
            trouble()
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
SIGKILL = pytest.mark.only_on("linux", "macos", because="SIGKILL")


@pytest.mark.parametrize(
    ("where", "options"), [("forward", {}), ("loading", {}), ("backward", {}), ("backward", TWO)], ids=str
)
def test_the_others_learn_why_one_has_failed(where, options):
    """C12"""
    ended = end_ranks(3, fails, where, options)
    assert "TroubleError: no more memory" in ended[1].error
    for rank in (0, 2):
        assert "failed while this one was at summing gradients over the processes" in ended[rank].error
        assert "TroubleError: no more memory" in ended[rank].error
        assert "rank 1" in ended[rank].error.lower()
        assert ended[rank].exit_code == 1


def trains_on(rank, where, options):
    body = nn.Sequential(nn.Linear(4, 300), *[nn.Linear(300, 300) for _ in range(4)], nn.Linear(300, 4))
    model = wrapped(Calls(fails_at, body=body, where=None), **options)
    step(model)
    if rank == 1:
        model.module.where = where
        with pytest.raises(TroubleError):
            step(model)
        model.module.where = None
    step(model)


@pytest.mark.parametrize(
    ("where", "options", "reason"),
    [
        (0, {}, "a backward has raised an exception after the ranks had begun to sum its gradients"),
        (5, {}, "a backward has raised an exception after the ranks had begun to sum its gradients"),
        (0, TWO, "TroubleError: no more memory"),
    ],
    ids=["after buckets", "before all buckets", "two replicas"],
)
def test_a_program_that_goes_on_after_a_failed_backward(where, options, reason):
    """C12: its next collective ends with the reason, on all ranks, before anything of it is summed."""
    for each in end_ranks(2, trains_on, where, options):
        assert reason in last_error(each)


@pytest.mark.parametrize(
    ("where", "options"),
    [("forward", {}), ("backward", {}), pytest.param("kill", {}, marks=SIGKILL), ("backward", TWO)],
    ids=str,
)
def test_a_rank_that_waits_at_a_batch_norm_learns_it_too(where, options):
    """C12, C9"""
    ended = end_ranks(2, fails, where, {**options, "sync_batch_norm": True})
    assert "while this one was at a batch norm over all processes" in last_error(ended[0])
    assert where == "kill" or "TroubleError: no more memory" in ended[0].error


@pytest.mark.parametrize("where", ["exit", "exit 3", pytest.param("kill", marks=SIGKILL), "_exit"])
def test_the_others_learn_that_one_has_ended(where):
    """C12"""
    ended = end_ranks(3, fails, where, {})
    assert ended[1].exit_code == {"exit": 0, "exit 3": 3, "kill": -9, "_exit": 0}[where]
    found = [last_error(ended[rank]) for rank in (0, 2)]  # the second of them may see that the first has ended too
    assert all(" ended while" in line or "Rank 2 says" in line or "Rank 0 says" in line for line in found), found
    assert any("rank 1 has ended while this one was at summing gradients over the processes" in line for line in found)


def net_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.net(x)


def fails_on_three_rows(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if len(x) == 3:
        raise TroubleError("no such file")
    return module.net(x)


def lives_on(rank: int, folder: str) -> None:
    failures.PATIENCE_S = 0.5
    model = wrapped(Calls(fails_on_three_rows if rank == 1 else net_of, net=net()))
    if rank == 1:
        with pytest.raises(TroubleError):
            model(ROWS)
        assert until(Path(folder, "raised").exists)  # an actor: its process waits for what it is told next
        return
    try:
        step(model)
    finally:
        Path(folder, "raised").touch()


def test_a_rank_that_has_raised_and_lives_on(tmp_path):
    """C12: only what ended a process was published, and the others waited for the timeout."""
    first, second = end_ranks(2, lives_on, str(tmp_path), timeout_s=30)
    assert second.exit_code == 0, second.error
    assert "rank 1 raised an exception and has not continued for 0.5 s" in last_error(first)
    assert "Rank 1 says: TroubleError: no such file" in last_error(first)


@in_ranks(2)
def test_a_rank_that_has_raised_and_goes_on(rank: int) -> None:
    """C12: as one that tries a step again with fewer rows."""
    model = wrapped(Calls(fails_on_three_rows if rank == 1 else net_of, net=net()))
    for _ in range(2):
        if rank == 1:
            with pytest.raises(TroubleError):
                model(ROWS)
        model(ROWS[:2]).sum().backward()
    failures.PATIENCE_S = 0.5
    if rank == 1:
        time.sleep(1)
    model(ROWS[:2]).sum().backward()


def fails_between_wraps(rank: int) -> None:
    wrapped()
    if rank == 0:
        raise TroubleError("no such file")
    wrapped()


def test_a_process_that_fails_before_it_wraps():
    """C12: found in the store, before there is any connection."""
    ended = end_ranks(2, fails_between_wraps, timeout_s=30)
    assert "TroubleError: no such file" in last_error(ended[1])


def ends_slowly(rank: int, exits: bool) -> None:
    failures._EXIT_S = 1 if exits else failures._EXIT_S
    if rank == 1:
        atexit.register(time.sleep, 3)  # as where much memory of a GPU is freed
    model = wrapped(Calls(fails_on_three_rows if rank == 1 else net_of, net=net()))
    model(ROWS[:2]).sum().backward()
    try:
        step(model)
    except TroubleError:
        if exits:
            sys.exit(1)  # which no excepthook sees
        raise


@pytest.mark.parametrize("exits", [False, True], ids=["an exception", "exit 1 after an exception"])
def test_torchrun_blames_the_rank_that_has_failed(tmp_path, exits):
    """C12: it blames the process that ends first. The other one waited for two seconds only; later, for ten seconds."""
    script = tmp_path / "train.py"
    script.write_text(f"""
import os, sys
sys.path[:0] = {sys.path!r}
from {__name__} import ends_slowly
ends_slowly(int(os.environ["RANK"]), {exits})
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    blamed = ended.stderr.partition("Root Cause")[2]
    assert re.search(r"rank +: (\d)", blamed)[1] == "1", ended.stderr


# A whole program, as torchrun starts it


PROGRAM = """
import signal, sys, os, threading, time, torch, unisono
rank = int(os.environ["RANK"])
model = unisono.DataParallel(torch.nn.Linear(4, 2))
def step():
    model(torch.ones(2, 4)).sum().backward()
{body}
print("done", rank, flush=True)
"""


def run_program(body: str, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in two processes that connect at a port, as torchrun's do; return how each has ended."""
    script = PROGRAM.format(body=textwrap.dedent(body))
    own = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return run_scripts([(script, {**own, **variables, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"])


@pytest.mark.only_on("linux", "macos", because="forks")
def test_a_program_ends_without_messages():
    """With warnings as errors, loaders with workers, and ranks that end at different times.

    Python 3.14 frees the process groups when it ends. In a forked child that was a wait without end: their destructors
    wait for threads, which a fork does not copy.
    """
    body = """
    data = torch.utils.data.TensorDataset(torch.ones(6, 4))
    for _ in range(2):
        for (x,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=2):
            model(x).sum().backward()
    pid = os.fork()
    if pid == 0:
        try:
            step()
        except RuntimeError as error:
            assert "forked by rank" in str(error), error
        sys.exit(3)  # the end or failure of a child is not reported to the other ranks
    os.waitpid(pid, 0)
    step()
    if rank == 0:
        sys.exit(0)
    torch.distributed.destroy_process_group()
    """
    ended = run_program(body)
    assert [(end.returncode, end.stderr) for end in ended] == [(0, "")] * 2


OPEN = """
def num_open():
    return [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
"""


@pytest.mark.only_on("linux", because="counts in /proc")
def test_the_groups_end_before_the_interpreter():
    """C18: with a group made by hand and not destroyed: gloo's threads freed tensors too late, an abort."""
    body = """
    import atexit
    step()
    atexit.unregister(unisono.distributed.process_group._end_communicators)
    before = num_open()
    def check():
        (files, threads), (now, threads_now) = before, num_open()
        assert now < files, (before, num_open())
        assert threads_now < threads, (before, num_open())
        try:
            step()
        except RuntimeError as error:
            print(error, flush=True)
    atexit.register(check)  # after unisono's
    atexit.register(unisono.distributed.process_group._end_communicators)
    """
    ended = run_program(OPEN + textwrap.dedent(body))
    assert [(end.returncode, end.stderr) for end in ended] == [(0, "")] * 2
    assert all("no longer connected: the program ends" in end.stdout for end in ended)


@pytest.mark.only_on("linux", because="counts in /proc")
def test_groups_leave_no_files_and_threads():
    """C7: neither the default group of the line, nor one that it was given, nor steps."""
    body = """
    import gc
    def settled(expected=None):
        gc.collect()
        deadline = time.monotonic() + 20  # threads end a little after their group
        found, since = num_open(), time.monotonic()
        while found != expected and time.monotonic() < deadline:
            if expected is None and time.monotonic() > since + 1:  # as many for a second
                break
            time.sleep(0.01)
            if (now := num_open()) != found:
                found, since = now, time.monotonic()
        return found
    def train(model, num_steps):
        for _ in range(num_steps):
            model(torch.ones(2, 4)).sum().backward()
    distributed = torch.distributed
    train(model, 2)
    in_steps = settled()
    train(model, 20)
    assert settled(in_steps) == in_steps, (in_steps, settled())

    given = distributed.new_group([0, 1])
    distributed.barrier(given)
    first = None
    for _ in range(3):
        other = unisono.DataParallel(torch.nn.Linear(4, 2), process_group=given)
        train(other, 2)
        distributed.barrier(given)
        distributed.destroy_process_group(given)
        del other, given
        distributed.barrier()
        first = first or settled()
        assert settled(first) == first, (first, settled())
        given = distributed.new_group([0, 1])
    del given

    def end(model):
        distributed.barrier()
        distributed.destroy_process_group()
    end(model)
    del model
    ends = []
    for port in os.environ["PORTS"].split():
        os.environ["MASTER_PORT"] = port
        model = unisono.DataParallel(torch.nn.Linear(4, 2))
        train(model, 2)
        end(model)
        del model
        ends.append(settled(ends[0] if ends else None))
    assert ends == [ends[0]] * 3, ends
    assert ends[0][1] == 1, f"threads: {ends}"
    """
    ports = " ".join(str(free_port()) for _ in range(3))
    ended = run_program(OPEN + textwrap.dedent(body), PORTS=ports)
    assert [(end.returncode, end.stderr) for end in ended] == [(0, "")] * 2


@in_ranks(2, timeout_s=20)
def test_groups_that_ranks_have_ended_do_not_count(rank: int) -> None:
    """C12: torch names a group after the number of those that its process has; ranks looked for each other in vain.

    Here each makes and ends another number of groups than the other, between models that they have in common.
    """
    for number in range(3):
        given = torch.distributed.new_group([0, 1])
        model = wrapped(process_group=given)
        step(model)
        torch.distributed.barrier(given)
        if rank == number % 2:
            torch.distributed.destroy_process_group(given)
            del model, given
            gc.collect()


def test_groups_made_anew_at_the_same_port():
    """C14: while the model of an earlier group lives. The port was taken, or an earlier group's addresses found."""
    body = """
    for number in range(3):
        step()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        before, model = model, unisono.DataParallel(torch.nn.Linear(4, 2))
    step()
    """
    ended = run_program(body)
    assert [(end.returncode, end.stderr) for end in ended] == [(0, "")] * 2


def test_a_program_that_fails_in_the_first_process():
    """C12: that process hosts the store. An excepthook of the program's own runs too."""
    body = """
    hook = sys.excepthook
    sys.excepthook = lambda *error: (print("mine", flush=True), hook(*error))
    step()
    if rank == 0:
        raise ValueError("bad line in the file")
    step()
    """
    ended = run_program(body)
    # Some releases of torch print before that the processes are connected.
    assert [(end.returncode, end.stdout.splitlines()[-1]) for end in ended] == [(1, "mine")] * 2
    assert "ValueError: bad line in the file" in ended[0].stderr
    last = ended[1].stderr.strip().splitlines()[-1]
    assert "rank 0" in last.lower()
    assert "ended" in last or "bad line in the file" in last


def test_a_program_that_exits_after_an_exception_in_forward():
    """C12: the others said that it had ended, and not why."""
    body = """
    if rank == 1:
        try:
            model(torch.ones(2, 5))
        except RuntimeError:
            sys.exit(1)
    step()
    """
    ended = run_program(body)
    assert [end.returncode for end in ended] == [1, 1]
    assert "RuntimeError: rank 1 failed while this one was at summing gradients" in ended[0].stderr
    assert "Rank 1 says: RuntimeError: mat1 and mat2 shapes cannot be multiplied" in ended[0].stderr


@pytest.mark.only_on("linux", "macos", because="SIGKILL")
def test_a_first_process_that_is_killed():
    """C12: the store ends with it."""
    ended = run_program("step()\nif rank == 0:\n    os.kill(os.getpid(), 9)\nstep()")
    assert [end.returncode for end in ended] == [-9, 1]
    assert "RuntimeError: rank 0 has ended while this one was at summing gradients" in ended[1].stderr


@pytest.mark.only_on("linux", because="counts in /proc")
def test_ctrl_c_while_waiting(tmp_path):
    """C12: it ends the wait at once, and is reported to the other rank, which has no part in that."""
    pid = tmp_path / "pid"
    body = f"""
    step()
    if rank == 0:
        open({str(pid)!r}, "w").write(str(os.getpid()))
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        while not os.path.exists({str(pid)!r}) or os.path.exists("/proc/" + open({str(pid)!r}).read()):
            time.sleep(0.01)
    step()
    """
    ended = run_program(body)
    assert "KeyboardInterrupt" in ended[0].stderr
    assert "KeyboardInterrupt" in ended[1].stderr.strip().splitlines()[-1] or "rank 0 has ended" in ended[1].stderr


# Accelerators


@pytest.fixture
def communicator(monkeypatch):
    """A communicator of two ranks, whose groups are names of backends and purposes, and what the ranks' devices are."""
    made = Communicator.__new__(Communicator)
    made.world_size, made._groups, made._control, made._made = 2, {}, None, []
    on_break = partial(process_group._abort_groups, made._groups, made._made)
    made.failures = Failures(Mock(), 0, 2, on_break)
    found = [RankDevice("host", f"cuda at 0:{number}:0", "cuda") for number in (1, 2)]
    monkeypatch.setattr(Communicator, "all_gather_object", lambda self, value, doing: found)
    monkeypatch.setattr(Communicator, "_new_group", lambda self, backend, purpose: (backend, purpose))
    monkeypatch.setattr(Communicator, "waits_on_host", lambda self, group: group[0] == "gloo")
    monkeypatch.setattr(process_group._devices, "identity", str)
    monkeypatch.setattr(process_group._devices, "computes_on_host", lambda device: device.type == "cpu")
    monkeypatch.setattr(torch.distributed, "get_default_backend_for_device", lambda device: "nccl")
    return made, found


GPU = torch.device("cuda", 0)


def test_all_collectives_of_a_gpu_have_one_group(communicator):
    """C9: two of NCCL's on one GPU wait for each other for ever if two ranks start them in different orders."""
    made, _ = communicator
    devices = made.agree_on_devices(GPU)
    groups = [made.group_for(devices, purpose) for purpose in ("gradients", "batch norm", "gradients")]
    assert groups == [("nccl", "gradients")] * 3
    assert devices.are_of_one_kind


def test_ranks_that_agree_on_other_devices_make_another_group(communicator, monkeypatch):
    """C9: one rank's device may be the same as in an earlier wrapper, another's may not."""
    made, found = communicator
    monkeypatch.setattr(Communicator, "_new_group", lambda self, backend, purpose: (backend, len(self._groups)))
    first = made.group_for(made.agree_on_devices(GPU), "gradients")
    found[1] = RankDevice("host", "cuda at 0:3:0", "cuda")
    second = made.group_for(made.agree_on_devices(GPU), "gradients")
    found[1] = RankDevice("host", "cuda at 0:2:0", "cuda")
    assert made.group_for(made.agree_on_devices(GPU), "gradients") == first != second


@pytest.mark.parametrize(
    ("second", "one_kind", "is_said"),
    [
        (RankDevice("host", "cuda at 0:1:0", "cuda"), True, True),
        (RankDevice("host", "cpu", "cpu"), False, False),
    ],
    ids=["the same GPU, or a slice of it", "a CPU"],
)
def test_ranks_that_nccl_cannot_connect_use_gloo(communicator, caplog, second, one_kind, is_said):
    """C1, C9: gloo's collectives may overlap, so each purpose has a group."""
    made, found = communicator
    found[1] = second
    devices = made.agree_on_devices(GPU)
    groups = [made.group_for(devices, purpose) for purpose in ("gradients", "batch norm")]
    assert groups == [("gloo", "gradients"), ("gloo", "batch norm")]
    assert devices.are_of_one_kind == one_kind
    assert ("several processes share one GPU" in caplog.text) == is_said


def test_a_failure_aborts_the_groups_of_accelerators(communicator, monkeypatch):
    """C12: once each; at exit nothing waits for what will never end."""
    made, _ = communicator
    aborted, ended = [], []
    devices = made.agree_on_devices(GPU)
    for purpose in ("gradients", "batch norm"):
        made.group_for(devices, purpose)
    monkeypatch.setattr(process_group.process_groups, "abort_group", aborted.append)
    monkeypatch.setattr(environment, "failed", threading.Event())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: ended.append(True))
    environment._end_default_group()
    assert ended == [True]
    made.failures.failure("rank 1 has failed")
    environment._end_default_group()
    assert ended == [True]
    assert aborted == [("nccl", "gradients")]
