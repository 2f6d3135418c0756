"""What launchers set, as they set it, and what follows: ranks, the place where they meet, messages.

Slurm, Open MPI and others are not started here: their variables are, in processes of sh.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import unisono
from helpers.ranks import free_port
from unisono.distributed import launchers
from unisono.distributed.launchers import Launch, first_of_nodes, launch
from unisono.runtime.errors import forget_logged

SLURM = {
    "SLURM_JOB_ID": "1017", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "node[01-03,7],gpu-[1-2]",
    "SLURM_JOB_NODELIST": "node[01-20]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "2834497537",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _hosts_have_addresses(monkeypatch, environment_of):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [()])


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("node[01-03,7],gpu-[1-2]", ("node01", True)),
        ("node7", ("node7", False)),
        ("node[7]", ("node7", False)),
        ("a-1,b", ("a-1", True)),
        ("[3,5-6]x", ("3x", True)),
        ("rack[1-2]n[003-4,6]", ("rack1n003", True)),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes, expected):
    assert first_of_nodes(nodes) == expected


def test_a_step_of_slurm(environment_of):
    environment_of(SLURM)
    assert launch() == Launch(5, 8, 1, "node01", 11017, "Slurm 1017.0")
    environment_of(SLURM, MASTER_ADDR="other", MASTER_PORT="7")
    assert launch() == Launch(5, 8, 1, "other", 7, "Slurm 1017.0")
    environment_of(SLURM, SLURM_STEP_NODELIST="node07")
    assert launch()[3] == "127.0.0.1", "one host need not have a name"
    ports = set()
    for job in range(1000, 1020):
        for step in range(5):
            environment_of(SLURM, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
            ports.add(launch().port)
    assert len(ports) == 100
    assert all(10_000 <= port < 29_000 for port in ports)


def test_a_node_without_an_address(environment_of, monkeypatch):
    def unknown(*_: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    environment_of(SLURM)
    with pytest.raises(RuntimeError, match=r"SLURM_STEP_NUM_TASKS=8: .* Export MASTER_ADDR for all of them"):
        launch()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "SLURM_NTASKS=8: .* srun did not start it"),
        ({**SLURM, "SLURM_PTY_PORT": "7"}, "SLURM_STEP_NUM_TASKS=8: .* srun --pty started it"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE=4"),
        ({"SLURM_NTASKS": "1"}, None),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
    ],
)
def test_one_process_alone(environment_of, caplog, variables, expected):
    """C14: it waits for none, and a log line says so where several may have been started."""
    forget_logged()
    environment_of(variables)
    unisono.DataParallel(nn.Linear(2, 2), ["cpu"], process_group=False)
    assert not caplog.messages
    assert not unisono.DataParallel(nn.Linear(2, 2), ["cpu"]).spans_processes
    expected_messages = [expected] if expected else []
    for pattern, message in zip(expected_messages, caplog.messages, strict=True):
        assert re.match(pattern, message)


def test_open_mpi(environment_of):
    environment_of(OPEN_MPI)
    first = launch()
    assert first[:4] == (1, 2, 1, "127.0.0.1")
    environment_of(OPEN_MPI, PMIX_NAMESPACE="2834497538")
    assert launch().port != first.port
    environment_of(OPEN_MPI, MASTER_ADDR="node01", MASTER_PORT="7")
    assert launch() == Launch(1, 2, 1, "node01", 7, "")


def test_a_process_manager_of_another_user(environment_of, monkeypatch):
    """Slurm's and PBS's are root's: their environment cannot be read, and has no rank."""
    environment_of(HYDRA)
    job = launch().job
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError))
    assert launch().job == job


def test_mpi_on_several_hosts_asks_for_an_address(environment_of):
    """C14"""
    environment_of(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="1")
    with pytest.raises(RuntimeError, match=r"^OMPI_COMM_WORLD_SIZE=2: .* Export MASTER_ADDR and MASTER_PORT .*False"):
        unisono.DataParallel(nn.Linear(2, 2))
    environment_of(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="1", MASTER_ADDR="node01")
    with pytest.raises(RuntimeError, match="Export MASTER_PORT for all"):
        launch()


def test_which_launcher_counts(environment_of):
    environment_of(SLURM, TORCHRUN)
    assert launch() == Launch(1, 4, 0, "first", 29500, "")
    environment_of(SLURM, OPEN_MPI)
    assert launch()[:2] == (1, 2), "mpirun starts its daemons with srun, one a node"
    environment_of(SLURM, HYDRA, MASTER_PORT="7")
    assert launch()[:5] == (1, 2, 1, "127.0.0.1", 7)
    environment_of(SLURM, PMI_RANK="5", PMI_SIZE="8")
    assert launch().job == "Slurm 1017.0"
    environment_of({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, OPEN_MPI)
    assert launch()[:2] == (1, 2)
    environment_of(SLURM, WORLD_SIZE="8")
    assert launch()[:3] == (5, 8, 1)
    # Processes that a task of the step has started by itself.
    environment_of(SLURM, RANK="1", WORLD_SIZE="4", MASTER_ADDR="first", MASTER_PORT="7")
    assert launch()[:5] == (1, 4, None, "first", 7)


def test_numbers_that_are_none(environment_of):
    environment_of(SLURM, SLURM_PROCID="8")
    with pytest.raises(RuntimeError, match="RANK=8, WORLD_SIZE=8, LOCAL_RANK=1: expected 0 <= RANK < WORLD_SIZE"):
        launch()
    environment_of(SLURM, SLURM_STEP_NUM_TASKS="two")
    with pytest.raises(RuntimeError, match="SLURM_STEP_NUM_TASKS='two': expected a whole number"):
        launch()


def test_the_name_of_a_step(environment_of):
    assert launchers.slurm_step() is None
    environment_of(SLURM, SLURM_STEP_NODELIST="node07")
    assert launchers.slurm_step() == "Slurm 1017.0"
    environment_of(SLURM, TORCHRUN)
    assert launchers.slurm_step() is None


PROGRAM = """
import torch, unisono
from unisono.distributed.environment import local_rank
model = unisono.DataParallel(torch.nn.Linear(2, 2), ["cpu"], timeout=70)
rank = torch.distributed.get_rank()
model(torch.full((1 + rank, 2), float(rank))).mean().backward()
gradient = model.module.weight.grad[0, 0].item()
communicator = model._ranks._gradient_sync.communicator
print(rank, local_rank(), torch.distributed.get_backend(), communicator.timeout_s, f"{gradient:.3f}")
"""
LAUNCHERS = {
    "Slurm": "SLURM_JOB_ID={port} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID={rank} SLURM_LOCALID={rank} "
    "SLURM_STEP_NODELIST=here",
    "Hydra": "PMI_RANK={rank} PMI_SIZE=2 MPI_LOCALRANKID={rank} MPI_LOCALNRANKS=2",
    "by hand, without LOCAL_RANK": "RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}",
}


ON_LINUX = pytest.mark.only_on("linux", because="Hydra's job is the process that began it")


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[ON_LINUX] if name == "Hydra" else []) for name in LAUNCHERS]
)
def test_processes_find_each_other(launcher):
    """C1, C14: a shell, which has no rank, starts them; each by way of another shell, which has one."""
    port = free_port()
    starts = [LAUNCHERS[launcher].format(rank=rank, port=port) for rank in range(2)]
    script = "".join(f'{start} sh -c "$PYTHON -c \\"\\$PROGRAM\\"; exit \\$?" & ' for start in starts) + "wait"
    env = {**os.environ, "PYTHON": sys.executable, "PROGRAM": PROGRAM}
    done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True)
    gradient = f"{(0 * 1 + 1 * 2) / 3 / 2:.3f}"
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.9 prints there
    assert sorted(lines) == [f"{rank} {rank} gloo 70.0 {gradient}" for rank in range(2)], done.stderr


def test_a_port_that_is_taken(environment_of):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        environment_of(OPEN_MPI, OMPI_COMM_WORLD_RANK="0", MASTER_PORT=port)
        with pytest.raises(
            RuntimeError, match=f"rank 0 of 2 cannot listen at 127.0.0.1:{port}.*MASTER_PORT for another"
        ):
            unisono.DataParallel(nn.Linear(2, 2))
    assert not torch.distributed.is_initialized()
