"""Slurm on this machine, as two nodes: munge, the controller and a slurmd for each node, none of them the system's.

Each slurmd is in a namespace with a host name and a list of hosts of its own, so that the nodes have names that resolve
and a job sees two hosts. They share network, processes and files. A node pretends to have 128 CPUs and four GPUs, which
are four of the null devices: the page's script asks for GPUs, and torch does not look at these.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from clusters import mpi, page, trainings, uneven_rows
from clusters.part import Check, Part
from clusters.site import SYSTEM_PATH, CheckError, Site, free_port

_NODES = {"node1": "127.0.0.2", "node2": "127.0.0.3"}
_GPUS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

_CONFIGURATION = """\
ClusterName=unisono
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
# No cgroups: a container has none to give.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MpiDefault=none
SchedulerParameters=sched_interval=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The daemons, and commands of Slurm's."""

    def __init__(self, site: Site) -> None:
        self.site = site
        ports = [free_port() for _ in range(1 + len(_NODES))]
        nodes = [
            f"NodeName={name} NodeAddr={address} Port={port} CPUs=128 RealMemory=1000 Gres=gpu:{len(_GPUS)}"
            for (name, address), port in zip(_NODES.items(), ports[1:], strict=True)
        ]
        for name in ("state", *_NODES):
            site.new_folder(name)
        text = _CONFIGURATION.format(
            host=socket.gethostname(), port=ports[0], folder=site.folder, nodes="\n".join(nodes)
        )
        self._configuration = site.write("slurm.conf", text)
        site.write("gres.conf", "".join(f"Name=gpu File={path}\n" for path in _GPUS))
        hosts = [f"127.0.0.1 localhost {socket.gethostname()}", *(f"{at} {name}" for name, at in _NODES.items())]
        self._hosts = site.write("hosts", "\n".join(hosts) + "\n")
        site.environment["SLURM_CONF"] = str(self._configuration)

    def start(self) -> None:
        """Start the daemons, and wait until the nodes are ready."""
        folder, site = self.site.folder, self.site
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        paths = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
        site.start("munged", "--foreground", "--force", *paths, to=folder / "munged.log")
        site.wait_until((folder / "munge.socket").exists, "munged is ready", 20)
        site.start("slurmctld", "-D", "-f", str(self._configuration), to=folder / "slurmctld.out")
        for name in _NODES:
            as_host = f'mount --bind "{self._hosts}" /etc/hosts && hostname {name} && exec slurmd -D -f "$SLURM_CONF"'
            site.start("unshare", "--uts", "--mount", "sh", "-c", as_host, to=folder / f"{name}.out")
        try:
            site.wait_until(self._nodes_are_ready, "two idle nodes", 60)
        except CheckError:
            for name in ("munged.log", "slurmctld.log", *(f"{node}.log" for node in _NODES)):
                site.read_log(folder / name)
            raise
        site.expect("sinfo", "--Node", "--long")

    def _nodes_are_ready(self) -> bool:
        found = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=self.site.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return found.stdout.split() == ["idle"] * len(_NODES)

    def submit(self, script: Path, *options: str) -> "Job":
        """Submit a batch script."""
        log = self.site.folder / f"{script.stem}.log"
        how = ("--parsable", "--open-mode=append", f"--output={log}", f"--job-name={script.stem}")
        ended = self.site.expect("sbatch", *how, *options, str(script))
        return Job(self.site, ended.output.split()[-1], log)


class Job:
    """A batch job."""

    def __init__(self, site: Site, number: str, log: Path) -> None:
        self.site, self.number, self.log = site, number, log

    @property
    def folder(self) -> Path:
        """Where the page's script writes."""
        return self.site.folder / "shared" / "runs" / self.number

    def shown(self, name: str) -> str:
        """Return one value of `scontrol show job`."""
        found = subprocess.run(
            ["scontrol", "show", "--oneliner", "job", self.number],
            env=self.site.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        value = re.search(rf"\b{name}=(\S*)", found.stdout)
        return value[1] if value else ""

    def wait(self, state: str, limit_s: float = 180) -> str:
        """Wait until it has ended in this state; return what it has printed."""
        with contextlib.suppress(CheckError):
            self.site.wait_until(lambda: self.shown("JobState") in _ENDED, "the job has ended", limit_s)
        text = self.site.read_log(self.log)
        if (found := self.shown("JobState")) != state:
            raise CheckError(f"the job is {found}, expected {state}")
        return text

    def wait_until_begun(self) -> None:
        """Wait until the run has taken some steps."""
        self.site.wait_until(
            lambda: len(trainings.records_of(self.folder)) >= trainings.BEGUN or self.shown("JobState") in _ENDED,
            "the training has begun",
        )
        if (state := self.shown("JobState")) != "RUNNING":
            self.site.read_log(self.log)
            raise CheckError(f"the job is {state} before it could be interrupted")


class _Checks:
    """What is run, in this order: the later ones compare with the runs of the earlier ones."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.site = cluster, cluster.site
        self.shared = self.site.folder / "shared"
        trainings.write_data(self.shared / "fashion")
        self.train_py = self.site.write("train.py", page.training_script())
        self._undisturbed: Job | None = None

    def _script(self, name: str, given: dict[str, str], options: str = trainings.OPTIONS) -> Path:
        """Write the page's batch script: two processes a node, and a small model."""
        changes = {"/shared/": f"{self.shared}/", "--nproc-per-node 4": "--nproc-per-node 2"}
        changes |= {"29400": str(free_port()), **given}
        text = page.changed(page.block("slurm", "With torchrun, to restart after a failure"), changes)
        return self.site.write(f"{name}.sh", text.rstrip() + f" {options}\n" if options else text)

    def numbers(self) -> str:
        kept = self.site.new_folder("numbers")
        command = f'-m unisono train --data {self.shared}/fashion --output "{self.shared}/runs/$SLURM_JOB_ID"'
        job = self.cluster.submit(
            self._script("numbers", {command: str(self.train_py)}, options=""),
            f"--export=ALL,UNISONO_CLUSTERS_KEEP={kept}",
        )
        job.wait("COMPLETED")
        return uneven_rows.compared(kept, 4)

    def undisturbed(self) -> str:
        job = self.cluster.submit(self._script("train", {}))
        job.wait("COMPLETED")
        self._undisturbed = job
        alone = self.site.folder / "alone"
        trainings.run_alone(self.site, self.shared / "fashion", alone)
        return f"losses of one process, within {trainings.loss_difference(job.folder, alone):.0e}, in float32"

    def killed_under_torchrun(self) -> str:
        job = self.cluster.submit(self._script("killed", {}))
        job.wait_until_begun()
        (rank,) = self.site.processes(RANK="1", SLURM_JOB_ID=job.number)
        rank.kill()
        return self._went_on(job, job.wait("COMPLETED"), "torchrun starts all of them again")

    def requeued(self) -> str:
        job = self.cluster.submit(self._script("requeued", {}))
        job.wait_until_begun()
        self.site.expect("scontrol", "requeue", job.number)
        text = job.wait("COMPLETED")
        if job.shown("Restarts") != "1":
            raise CheckError(f"{job.shown('Restarts')} restarts, expected 1")
        return self._went_on(job, text, "the same job number")

    def cancelled_and_resumed(self) -> str:
        job = self.cluster.submit(self._script("cancelled", {}))
        job.wait_until_begun()
        self.site.expect("scancel", job.number)
        text = job.wait("CANCELLED")
        self._expect_saved(job, text)
        output = f'--data {self.shared}/fashion --output "{self.shared}/runs/$SLURM_JOB_ID"'
        script = self._script("resumed", {output: f"--resume {job.folder}"}, options="")
        text = self.cluster.submit(script).wait("COMPLETED")
        return self._went_on(job, text, "saved after the step in flight; a job with --resume")

    def out_of_time(self) -> str:
        options = trainings.OPTIONS.replace(f"--epochs {trainings.NUM_EPOCHS}", "--epochs 100000")
        job = self.cluster.submit(self._script("time", {}, options), "--time=1")
        job.wait_until_begun()
        text = job.wait("TIMEOUT", limit_s=240)
        self._expect_saved(job, text)
        return "saved after the step in flight"

    def _expect_saved(self, job: Job, text: str) -> None:
        stopped = re.search(r"stopped after step (\d+)", text)
        steps = sum(record["kind"] == "step" for record in trainings.records_of(job.folder))
        if not stopped or int(stopped[1]) != steps:
            raise CheckError(f"{stopped[0] if stopped else 'no line says after which step it stopped'}; {steps} steps")

    def _went_on(self, job: Job, text: str, how: str) -> str:
        if "going on after step" not in text:
            raise CheckError("it did not go on with its run")
        if self._undisturbed is None:
            raise CheckError("there is no undisturbed run to compare with")
        trainings.expect_same_bytes(job.folder, self._undisturbed.folder)
        return f"{how}; weights: the bytes of the undisturbed run"

    def numbers_of_tasks(self) -> str:
        kept = self.site.new_folder("tasks")
        self._tasks_script("tasks")
        job = self.cluster.submit(self.site.folder / "tasks.sh", f"--export=ALL,UNISONO_CLUSTERS_KEEP={kept}")
        job.wait("COMPLETED")
        return uneven_rows.compared(kept, 4)

    def killed_task(self) -> str:
        kept = self.site.new_folder("killed-task")
        self._tasks_script("killed-task")
        job = self.cluster.submit(
            self.site.folder / "killed-task.sh", f"--export=ALL,UNISONO_CLUSTERS_KEEP={kept},UNISONO_CLUSTERS_KILL=1"
        )
        return uneven_rows.others_ended(kept, job.wait("FAILED", limit_s=100))

    def _tasks_script(self, name: str) -> Path:
        changes = {"--ntasks-per-node=4": "--ntasks-per-node=2", "python train.py": f"python {self.train_py}"}
        return self.site.write(f"{name}.sh", page.changed(page.block("slurm"), changes))

    def requeued_tasks(self) -> str:
        command = page.changed(page.block("slurm", number=1).strip(), {"/shared/": f"{self.shared}/"})
        changes = {"--ntasks-per-node=4": "--ntasks-per-node=2", "srun python train.py": command}
        text = page.changed(page.block("slurm"), changes).rstrip() + f" {trainings.OPTIONS}\n"
        job = self.cluster.submit(self.site.write("requeued-tasks.sh", text))
        job.wait_until_begun()
        self.site.expect("scontrol", "requeue", job.number)
        return self._went_on(job, job.wait("COMPLETED"), "the same job number")

    def numbers_of_mpi(self) -> str:
        kept = self.site.new_folder("mpi")
        first, second = _NODES
        changes = {"first-machine": first, "second-machine": second, ":4": ":2", "29500": str(free_port())}
        command = page.changed(page.block("mpi", number=1), changes)
        command = command.replace("train.py", str(self.train_py))
        # The two nodes are one machine, where Open MPI refuses the loopback device.
        allowed = {**mpi.ALLOWED, "OMPI_MCA_btl_tcp_if_include": "lo", "OMPI_MCA_oob_tcp_if_include": "lo"}
        exports = "".join(f"export {name}={value}\n" for name, value in allowed.items())
        head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n"
        job = self.cluster.submit(
            self.site.write("mpi.sh", f"{head}{exports}{command}"), f"--export=ALL,UNISONO_CLUSTERS_KEEP={kept}"
        )
        job.wait("COMPLETED")
        return uneven_rows.compared(kept, 4)

    def numbers_without_srun(self) -> str:
        """The batch script has four tasks and runs python without srun: it must not wait for three others."""
        kept = self.site.new_folder("without-srun")
        script = self.site.write("without-srun.sh", f"#!/bin/bash\n#SBATCH --ntasks=4\npython {self.train_py}\n")
        text = self.cluster.submit(script, f"--export=ALL,UNISONO_CLUSTERS_KEEP={kept}").wait("COMPLETED", limit_s=120)
        if "this one trains alone" not in text:
            raise CheckError("it does not say that it trains alone")
        return f"trains alone, and says so; {uneven_rows.compared(kept, 1)}"


@contextlib.contextmanager
def _open(site: Site) -> Iterator[Sequence[Check]]:
    cluster = Cluster(site)
    cluster.start()
    checks = _Checks(cluster)
    has_mpi = mpi.PART.why_not() is None
    yield [
        Check("torchrun on 2 nodes, 4 ranks with uneven rows, against one device", checks.numbers),
        Check("torchrun on 2 nodes, `unisono train`", checks.undisturbed),
        Check("a rank is killed", checks.killed_under_torchrun),
        Check("`scontrol requeue`", checks.requeued),
        Check("`scancel`, then resumed by another job", checks.cancelled_and_resumed),
        Check("the time limit", checks.out_of_time),
        Check(
            "`srun python train.py`, 4 tasks on 2 nodes with uneven rows, against one device", checks.numbers_of_tasks
        ),
        Check("`srun python train.py`, a task is killed", checks.killed_task),
        Check("`srun python -m unisono train`, `scontrol requeue`", checks.requeued_tasks),
        Check("`python train.py` in a batch script, without srun", checks.numbers_without_srun),
        *([Check("`mpirun` in a job, 4 ranks on 2 nodes with uneven rows", checks.numbers_of_mpi)] if has_mpi else []),
    ]


def _obstacle() -> str | None:
    if os.geteuid() != 0:
        return "it needs root: its nodes have host names of their own"
    found = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, text=True, check=False)
    return f"this machine has no namespaces for us: {found.stderr.strip()}" if found.returncode else None


def _version() -> str:
    slurmctld = shutil.which("slurmctld", path=SYSTEM_PATH) or "slurmctld"
    return subprocess.run([slurmctld, "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]


PART = Part(
    "slurm",
    "Slurm",
    _version,
    _open,
    programs={"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"},
    obstacle=_obstacle,
)
