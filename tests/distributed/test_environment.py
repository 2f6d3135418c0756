"""The processes that torchrun's variables describe, or others: their devices, and their default process group."""

import os
import pickle
import signal
import threading

import pytest
import torch
from torch import nn

import unisono
from helpers.forked import forked
from helpers.ranks import free_port, in_ranks, run_ranks
from unisono.distributed import environment
from unisono.distributed.environment import local_device, start_default_group
from unisono.distributed.launchers import Launch, launch
from unisono.runtime.interrupts import critical

pytestmark = pytest.mark.usefixtures("environment_of")
COMPLETE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NEEDED = [name for name in COMPLETE if name != "LOCAL_RANK"]


def test_without_variables_there_is_no_launcher(environment_of):
    assert launch() is None
    assert not start_default_group()
    assert not unisono.DataParallel(nn.Linear(2, 2), ["cpu"]).spans_processes
    environment_of(COMPLETE)
    assert launch() == (1, 4, 0, "127.0.0.1", 29500, "")


START = r"\. Start the program with torchrun.*process_group=False.*$"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        *(({n: v for n, v in COMPLETE.items() if n != name}, rf"^[^\n]* but not {name}{START}") for name in NEEDED),
        (dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK"), "0"), "^RANK, WORLD_SIZE and LOCAL_RANK are set, "),
        ({"RANK": "0"}, rf"^RANK is set, .* but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT{START}"),
        ({**COMPLETE, "RANK": "one"}, "RANK='one': expected a whole number"),
        ({**COMPLETE, "WORLD_SIZE": ""}, "WORLD_SIZE='': expected a whole number"),
        ({**COMPLETE, "LOCAL_RANK": "1.5"}, "LOCAL_RANK='1.5': expected a whole number"),
        ({**COMPLETE, "MASTER_PORT": "80000"}, "MASTER_PORT=80000: expected a port, 0 to 65535"),
        ({**COMPLETE, "MASTER_PORT": "-1"}, "MASTER_PORT=-1: expected a port"),
        ({**COMPLETE, "RANK": "4"}, "RANK=4, WORLD_SIZE=4, LOCAL_RANK=0: expected 0 <= RANK < WORLD_SIZE"),
        ({**COMPLETE, "RANK": "-1"}, "RANK=-1, WORLD_SIZE=4, LOCAL_RANK=0: expected 0 <= RANK"),
        ({**COMPLETE, "LOCAL_RANK": "-2"}, "LOCAL_RANK=-2: expected 0 <= RANK < WORLD_SIZE and 0 <= LOCAL_RANK"),
    ],
)
def test_variables_that_are_missing_or_wrong(environment_of, variables, message):
    """C14: one line that names them."""
    environment_of(variables)
    with pytest.raises(RuntimeError, match=message):
        unisono.DataParallel(nn.Linear(2, 2))
    local = unisono.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"], process_group=False)
    local(torch.zeros(3, 2)).sum().backward()


def test_a_rank_that_does_not_start(environment_of):
    """C14: the others name it, after `timeout=`."""
    environment_of({**COMPLETE, "RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": str(free_port())})
    with pytest.raises(RuntimeError, match=r"rank 0 has waited 2 s at .* ranks 1, 2 did not connect at 127\.0\.0\.1:"):
        unisono.DataParallel(nn.Linear(2, 2), ["cpu"], timeout=2)


def wraps_first(in_step: bool) -> None:
    environment.SAID_AFTER_S = 0
    wrap = critical(unisono.DataParallel) if in_step else unisono.DataParallel  # as a loaded model's first step does
    wrap(nn.Linear(2, 2), ["cpu"], timeout=200)


@pytest.mark.only_on("linux", "macos", because="Ctrl-C of another process")
@pytest.mark.parametrize(
    ("rank", "launchers_store", "in_step", "missing"),
    [
        (0, False, False, "ranks 1, 2 did not connect at 127.0.0.1:"),
        (0, False, True, "ranks 1, 2 did not connect at 127.0.0.1:"),
        (1, False, False, "rank 0 does not listen at 127.0.0.1:"),
        (0, True, False, "ranks 1, 2 did not connect at 127.0.0.1:"),
        (1, True, False, "rank 0 did not connect at 127.0.0.1:"),
    ],
    ids=["first", "first, in a step", "second", "first, torchrun's store", "second, torchrun's store"],
)
def test_the_first_wrapper_says_for_whom_it_waits_and_ctrl_c_ends_it(rank, launchers_store, in_step, missing):
    """C11, C12: it waited in C++, without a line, and Ctrl-C came when the timeout was over."""
    port = free_port()
    env = {**COMPLETE, "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_PORT": str(port)}
    if launchers_store:
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        _listens = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with forked(wraps_first, in_step, env=env) as program:
        program.wait_for("Every process has to wrap the model")
        assert f"rank {rank} has waited 0 s at a DataParallel that spans processes, and {missing}" in program.err
        os.kill(program.pid, signal.SIGINT)
        assert program.wait() == 1
        assert program.err.splitlines()[-1] == "KeyboardInterrupt"
        places = [line for line in program.err.splitlines() if line.strip().startswith("File ")]
        assert in_step or places[-1].endswith("in wraps_first"), "it ends in the user's line"


def test_a_torch_without_distributed(monkeypatch, environment_of):
    """C14: processes that a launcher has started do not train alone, each for itself."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert not start_default_group()
    environment_of(COMPLETE)
    with pytest.raises(RuntimeError, match="WORLD_SIZE=4, but this torch is built without"):
        start_default_group()


@pytest.mark.parametrize("local_rank", [None, "3"])
def test_the_device_of_a_process(environment_of, sim, monkeypatch, local_rank):
    environment_of({"LOCAL_RANK": local_rank} if local_rank else {})
    assert local_device() == sim[int(local_rank or 0)]
    environment_of({"LOCAL_RANK": "4"})
    with pytest.raises(ValueError, match=r"LOCAL_RANK=4, but this machine has only 4 accelerators: start at most 4"):
        local_device()
    # As with Slurm's --gpus-per-task: each process sees its own, as number 0.
    monkeypatch.setattr("unisono.runtime.devices.accelerators", lambda: sim[:1])
    assert local_device() == sim[0]
    monkeypatch.setattr("unisono.runtime.devices.accelerators", list)
    assert local_device() == torch.device("cpu")


def joins(rank: int, world_size: int, port: int) -> tuple:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    model = unisono.DataParallel(nn.Linear(2, 2))
    assert torch.distributed.is_initialized()
    model(torch.ones(1 + rank, 2)).sum(1).mean().backward()
    return model.spans_processes, [str(device) for device in model.devices], model.module.weight.grad.tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_line_joins_what_a_launcher_has_started(world_size):
    """C7, C14"""
    ends = run_ranks(world_size, joins, world_size, free_port(), init=False)
    assert ends == [(world_size > 1, ["cpu"], [[1, 1], [1, 1]])] * world_size


@in_ranks(3)
def test_process_groups(rank: int) -> None:
    model = unisono.DataParallel(nn.Linear(2, 2))  # of a default group that the program has made
    assert model.spans_processes
    pair = torch.distributed.new_group([1, 2])
    values = torch.tensor(float(rank))
    for options in ({}, {"device_ids": ["cpu"] * 2}):
        if rank == 0:
            with pytest.raises(ValueError, match="process_group: this process is not a member"):
                unisono.DataParallel(nn.Linear(1, 1), process_group=pair)
            local = unisono.DataParallel(nn.Linear(1, 1), process_group=False, **options)
            assert not local.spans_processes
            local(torch.ones(2, 1)).sum().backward()
            continue
        module = nn.Linear(1, 1)
        of_two = unisono.DataParallel(module, process_group=pair, **options)
        for buffers in (True, False):
            module.register_buffer("mine", values.clone()) if buffers else None
            module.zero_grad()
            of_two(torch.full((rank, 1), float(rank))).mean().backward()
            assert module.weight.grad.item() == pytest.approx((1 * 1 + 2 * 2) / 3)
            assert module.mine == 1  # of the first process of the group
        loaded = pickle.loads(pickle.dumps(of_two))
        with torch.no_grad():
            loaded(torch.ones(2, 1))
        with pytest.raises(RuntimeError, match="was pickled with its own process_group"):
            loaded(torch.ones(2, 1))  # not silently among all three
    model(torch.ones(2, 2)).sum().backward()


def bound(rank: int) -> tuple[list[torch.device | None], bool]:
    default = torch.distributed.group.WORLD
    pair = torch.distributed.new_group([1, 2])
    default.bound_device_id = device = torch.device("cuda", rank)
    new_group, seen = torch.distributed.new_group, []

    def noted(*args, **options):
        seen.append(default.bound_device_id)
        return new_group(*args, **options)

    torch.distributed.new_group = noted
    if rank:
        unisono.DataParallel(nn.Linear(1, 1), process_group=pair)
    return seen, default.bound_device_id == device


def test_a_group_of_some_processes_is_not_split_off_a_bound_default_group():
    """C7: init_process_group(device_id=...). NCCL splits with all ranks only, and rank 0 is not there."""
    (none, _), (first, first_restored), (second, second_restored) = run_ranks(3, bound)
    assert not none
    assert set(first) == set(second) == {None}
    assert first_restored
    assert second_restored


def test_arguments_that_cannot_be_used():
    """A13"""
    module = nn.Linear(2, 2)
    for loss, error in (("max", ValueError), (None, TypeError), (3, TypeError)):
        with pytest.raises(error, match=r"loss=.*: expected one of \['mean', 'sum'\]"):
            unisono.DataParallel(module, ["cpu"], loss=loss)
    for group in (3, "nccl", True, [0, 1]):
        with pytest.raises(TypeError, match=r"process_group=.*: expected a ProcessGroup, None or False"):
            unisono.DataParallel(module, ["cpu"], process_group=group)
    model = unisono.DataParallel(module, ["cpu"])
    for weight in (-1, float("nan"), float("inf"), torch.tensor(-2.0), "many", None, torch.ones(3), [1]):
        with pytest.raises((ValueError, TypeError), match=r"weight=.*: expected a number, 0 or more"):
            model.set_batch_weight(weight)
    with pytest.raises(TypeError, match="hook=None: expected a function"):
        model.register_comm_hook(None, None)


def test_an_only_process_has_its_own_device(monkeypatch, environment_of, sim):
    """C14: LOCAL_RANK selects the device also if the launcher has started no other process."""
    environment_of({**COMPLETE, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "2"})
    monkeypatch.setattr("unisono.distributed.process_group.start_default_group", bool)
    current = []
    monkeypatch.setattr("unisono.runtime.devices.make_current", current.append)
    assert unisono.DataParallel(nn.Linear(2, 2)).devices == [sim[2]]
    assert current == [sim[2]], 'NCCL, and "cuda" without an index, would take memory on another GPU'
    assert len(unisono.DataParallel(nn.Linear(2, 2).to(sim[0]), process_group=False).devices) == 4


# ---- torchrun's store, which outlives the processes that it starts; a TCPStore here stands for it ----


def start(launchers_store: torch.distributed.TCPStore, world_size: int, late: int) -> list:
    """Start so many ranks, here threads, and `late` last; return each one's store."""
    stores: list = [None] * world_size

    def begin(rank: int) -> None:
        process = Launch(rank, world_size, None, "127.0.0.1", launchers_store.port, "")
        stores[rank] = environment._store_of_this_restart(process)

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(world_size)]
    for thread in [*threads[:late], *threads[late + 1 :], threads[late]]:
        thread.start()
    for thread in threads:
        thread.join()
    return stores


@pytest.mark.parametrize("late", [0, 1, 2])
def test_each_restart_has_a_fresh_prefix(late) -> None:
    """As tests/training/test_torchrun.py, which restarts processes, with one that is late."""
    launchers_store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for time in range(3):
        stores = start(launchers_store, 3, late)
        assert not any(store.check(["key"]) for store in stores)
        stores[1].set("key", str(time))
        assert [store.get("key").decode() for store in stores] == [str(time)] * 3
