"""What launchers say of the processes that they start: which one this is, how many there are, and where they meet.

    launcher                      rank, world size, local rank           the others are found at
    torchrun, and those like it   RANK, WORLD_SIZE, LOCAL_RANK           MASTER_ADDR, MASTER_PORT
    Open MPI                      OMPI_COMM_WORLD_RANK, _SIZE, ...       this host, if it has all of them
    MPICH, Intel MPI              PMI_RANK, PMI_SIZE, MPI_LOCALRANKID    the same
    Slurm's srun                  SLURM_PROCID, SLURM_STEP_NUM_TASKS,    the first node of SLURM_STEP_NODELIST
                                  SLURM_LOCALID

The first of them that has started several processes counts: mpirun may itself be started by srun, and torchrun by
either. A variable of torchrun's wins over what another launcher says, one by one. Slurm's are those of a step: a batch
script runs outside of steps, and has SLURM_NTASKS and SLURM_PROCID=0 too. A launcher other than torchrun that has
started one process has started a program of one process, with all devices that it sees.

Ports follow from the job, so that two jobs on one host do not meet.

Sources: the manual pages of srun (OUTPUT ENVIRONMENT VARIABLES) and of Open MPI's mpirun; PMI_* and MPI_LOCALRANKID as
Hydra, the launcher of MPICH and Intel MPI, sets them.
"""

import os
import re
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_FIRST_PORT, _NUM_PORTS = 10_000, 19_000  # below those that systems give away, and torch's 29400 and 29500
_LAST_PORT = 65_535
_PORTS_BETWEEN_STEPS = 7919
_THIS_HOST = "127.0.0.1"
_REMEDY = (
    "Start the program with torchrun, which sets all of them; or unset the others; or train in this process "
    "alone, with DataParallel(..., process_group=False)."
)
_WHERE_TO_MEET = (
    "{name}={number}: there are several processes, but the address of rank 0 is missing. Export {missing} "
    "for all of them (MASTER_ADDR is the host of rank 0, MASTER_PORT a free port there); or train in this "
    "process alone, with DataParallel(..., process_group=False)."
)
_ALONE = (
    "{name}={number}: there may be several processes, but this one trains alone, because {reason}. To train "
    "with all of them, start {instead}. If it should train alone: DataParallel(..., process_group=False)."
)


class Launch(NamedTuple):
    """One of the processes that a launcher has started."""

    rank: int
    world_size: int
    local_rank: int | None  # None: the launcher does not say
    address: str
    port: int
    job: str  # differs from that of every other job; "" where the launcher is the one that keeps the store


class _Names(NamedTuple):
    """The variables of a launcher, with 0-based ranks."""

    rank: str
    world_size: str
    local_rank: str
    local_size: str  # the number of processes of this host


_OPEN_MPI = _Names(*(f"OMPI_COMM_WORLD_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
_PMI = _Names("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
_LAUNCHERS = (_OPEN_MPI, _HYDRA, _SLURM, _PMI)

# The number of processes where no rank is found: by variable, why there is none, and what to start instead.
_ASKS = "it with torchrun, or export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
_UNNOTICED: Mapping[str, tuple[str, str]] = {
    "SLURM_STEP_NUM_TASKS": ("srun --pty started it", "it with srun, without --pty"),
    "SLURM_NTASKS": ("srun did not start it", "it with srun (srun python train.py)"),
    **dict.fromkeys(
        ("PMI_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE"),
        ("no environment variable has a rank that unisono knows", _ASKS),
    ),
}


def launch() -> Launch | None:
    """Return which of the processes this is that a launcher has started; None if none has started several.

    Raises:
        RuntimeError: some of the variables are missing, or a value is invalid.
    """
    names = _launcher()
    given = [name for name in _RANK_VARIABLES if name in os.environ]
    if names is None:
        if not given:
            return None
        missing = [name for name in ("RANK", "WORLD_SIZE", *_MASTER_VARIABLES) if name not in os.environ]
        if missing:
            named = ", ".join(given[:-1]) + " and " * (len(given) > 1) + given[-1]
            raise RuntimeError(
                f"{named} {'is' if len(given) == 1 else 'are'} set, as by a launcher, but not "
                f"{', '.join(missing)}. {_REMEDY}"
            )
    own = _RANK_VARIABLES if names is None else names
    rank, world_size = (
        number(torchruns if torchruns in os.environ else name)
        for torchruns, name in zip(_RANK_VARIABLES[:2], own[:2], strict=True)
    )
    own_rank = local_rank()
    if not (0 <= rank < world_size and (own_rank is None or own_rank >= 0)):
        raise RuntimeError(
            f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={own_rank}: expected 0 <= RANK < WORLD_SIZE and "
            f"0 <= LOCAL_RANK. {_REMEDY}"
        )
    return Launch(rank, world_size, own_rank, *_meeting_place(names))


def local_rank() -> int | None:
    """Return this process's rank among those of its host; None if no launcher says it.

    Raises:
        RuntimeError: it is no number.
    """
    if "LOCAL_RANK" in os.environ:
        return number("LOCAL_RANK")
    names = _launcher()
    if names is None or names.local_rank not in os.environ:
        return None
    # A process of the launcher's may have started others, each with a RANK: then its local rank is not theirs.
    own = zip(_RANK_VARIABLES[:2], names[:2], strict=True)
    is_its = all(number(torchruns) == number(name) for torchruns, name in own if torchruns in os.environ)
    return number(names.local_rank) if is_its else None


def slurm_step() -> str | None:
    """Return the name of the Slurm step that has started this process; a job that is requeued keeps its names."""
    process = launch() if _launcher() is _SLURM else None
    return process.job if process is not None else None


def unnoticed() -> str | None:
    """Return, for a process that trains alone, a message if a variable says that there may be several; else None."""
    for name, (reason, instead) in _UNNOTICED.items():
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text) > 1:
            return _ALONE.format(name=name, number=text, reason=reason, instead=instead)
        if text and name == _SLURM.world_size:  # a step of one task, whatever the job has
            return None
    return None


def number(name: str) -> int:
    """Return the number in a variable; raise RuntimeError if it is none."""
    try:
        return int(os.environ[name])
    except ValueError:
        raise RuntimeError(f"{name}={os.environ[name]!r}: expected a whole number. {_REMEDY}") from None


def _launcher() -> _Names | None:
    """Return the variables of the launcher, other than torchrun, that has started several processes."""
    if all(name in os.environ for name in (*_RANK_VARIABLES, *_MASTER_VARIABLES)):
        return None
    for names in _LAUNCHERS:
        if names is _SLURM and "SLURM_PTY_PORT" in os.environ:
            continue  # srun --pty: a person's shell, and the other tasks do not run what is typed into it
        is_there = names.rank in os.environ and names.world_size in os.environ
        if names is _HYDRA:  # Slurm has PMI_RANK and PMI_SIZE too, and starts Hydra, which has more processes
            is_there = is_there and names.local_rank in os.environ
        if is_there and number(names.world_size) > 1:
            return names
    return None


def _meeting_place(names: _Names | None) -> tuple[str, int, str]:
    """Return the address and the port where the ranks meet, and a name that no other job has."""
    address, port = os.environ.get("MASTER_ADDR"), number("MASTER_PORT") if "MASTER_PORT" in os.environ else None
    if port is not None and not 0 <= port <= _LAST_PORT:
        raise RuntimeError(f"MASTER_PORT={port}: expected a port, 0 to {_LAST_PORT}. {_REMEDY}")
    if names is None:
        assert address is not None
        assert port is not None
        return address, port, ""
    if names is _SLURM:
        numbers = job, step = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        if port is None and all(map(str.isdecimal, numbers)):
            # Successive jobs, and successive steps of a job, have different ports.
            port = _FIRST_PORT + (int(job) + _PORTS_BETWEEN_STEPS * int(step)) % _NUM_PORTS
        job, address = f"Slurm {job}.{step}", address or _address_of_nodes()
    else:
        job = ""
        if os.environ.get(names.local_size) == os.environ[names.world_size]:  # of one host
            address = address or _THIS_HOST
            if port is None and (job := _job_of_mpi(names)):
                port = _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    missing = [name for name, value in zip(_MASTER_VARIABLES, (address, port), strict=True) if value is None]
    if address is None or port is None:
        raise RuntimeError(
            _WHERE_TO_MEET.format(
                name=names.world_size, number=os.environ[names.world_size], missing=" and ".join(missing)
            )
        )
    return address, port, job


def _address_of_nodes() -> str | None:
    """Return the first node of a Slurm step, where rank 0 runs; this host if it is the only one."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return None
    first, has_others = first_of_nodes(nodes)
    try:
        return first if has_others and socket.getaddrinfo(first, None) else _THIS_HOST
    except OSError:  # nodes may have names that only Slurm knows
        return None


def first_of_nodes(nodes: str) -> tuple[str, bool]:
    """Return the first host that a list of Slurm's names, and whether it names others.

    A list is names with commas between them; in brackets are numbers and ranges of them.

    >>> first_of_nodes("node[01-03,7],gpu-[1-2]")
    ('node01', True)
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)  # up to a comma that is not in brackets
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else nodes)
    return host, host != re.sub(r"[\[\]]", "", nodes)


def _job_of_mpi(names: _Names) -> str:
    """Return a name for the job that all its processes of this host derive, and no other job; "" if there is none.

    Open MPI names its jobs. Elsewhere it is the process that has started them: the nearest ancestor without a rank.
    """
    if names is _OPEN_MPI and "PMIX_NAMESPACE" in os.environ:
        return f"PMIx {os.environ['PMIX_NAMESPACE']}"
    pid, variable = os.getpid(), f"\0{names.rank}=".encode()
    try:
        while pid and variable in b"\0" + _environment_of(pid):
            pid = int(_stat_of(pid)[1])
        return f"process {pid} {_stat_of(pid)[19]}" if pid else ""
    except (OSError, IndexError, ValueError):  # a system without /proc
        return ""


def _environment_of(pid: int) -> bytes:
    """Return the variables that a process began with; none if it is another user's, as a launcher may be."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return b""


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: the parent is [1], the time of its start [19]."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
