"""Two hosts: two network namespaces with a slow link between them, and torchrun on each.

A namespace has a network, a host name and a list of hosts of its own; the two share this machine's processes, clock and
files, as two hosts with a common folder do. The link has 20 ms each way and 100 Mbit/s: tc's tbf limits the rate, and a
thread carries each packet from one end to the other 20 ms later (tc's netem is not in every kernel).

It needs root and iproute2 (`apt-get install iproute2`), and is skipped elsewhere. Packets go between the two namespaces
only, which have no way out; both are removed when the test ends, with all that runs in them.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.commands import assert_same_metrics, metrics_of
from unisono.cli import main

TOOLS = ("ip", "tc", "unshare", "mount")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.only_on("linux", because="network namespaces are Linux's"),
    pytest.mark.skipif(sys.platform == "linux" and os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="the link needs /dev/net/tun"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)} (iproute2)"),
]

DELAY_S = 0.020
RATE = ("rate", "100mbit", "burst", "64kb", "latency", "100ms")
LIMIT_S = 240  # for one run, on a machine that does other things too
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PROCESSES = {"a": 2, "b": 1}
RUN = ["--model", "mlp", "--epochs", "2", "--devices", "1"]  # 24 steps, about 0.2 s each on this link


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


class Host:
    """A namespace, its end of the link, and torchrun in it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.namespace = f"unisono-{os.getpid()}-{name}"
        self.device = f"un{os.getpid()}{name}"  # 15 letters at most
        self.folder = folder
        self._started: list[subprocess.Popen] = []

    def configure(self) -> None:
        command("ip", "-n", self.namespace, "addr", "add", f"{ADDRESSES[self.name]}/24", "dev", self.device)
        command("ip", "-n", self.namespace, "link", "set", "lo", "up")
        command("ip", "-n", self.namespace, "link", "set", self.device, "up")

    def torchrun(self, *arguments: str) -> subprocess.Popen:
        """Start `unisono train` in so many processes here, and in others on the other host."""
        launch = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", str(PROCESSES[self.name])),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES['a']}:29400", "--rdzv-id", "two-hosts"),
            *("--local-addr", ADDRESSES[self.name], "--max-restarts", "3"),
            *("-m", "unisono", "train", *arguments),
        ]
        hosts = self.folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{at} host-{name}\n" for name, at in ADDRESSES.items()))
        as_host = f'mount --bind "{hosts}" /etc/hosts && hostname host-{self.name} && exec "$@"'
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": self.device,
            "OMP_NUM_THREADS": "1",
            # Without it torchrun (2.13) gives a host that joins later no address of the others.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        into = ("ip", "netns", "exec", self.namespace)
        with (self.folder / f"{self.name}.log").open("a") as log:
            started = subprocess.Popen(
                [*into, "unshare", "--uts", "--mount", "sh", "-c", as_host, "sh", *launch],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._started.append(started)
        return started

    def kill(self) -> None:
        """End every process here, at once."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for process in self._started:
            process.kill()
            process.wait()
        self._started.clear()


@contextlib.contextmanager
def connected(a: Host, b: Host) -> Iterator[None]:
    """Connect the hosts by two tun devices and a thread that carries packets between them."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(open("/dev/net/tun", "r+b", buffering=0)) for _ in (a, b)]
        for end, host in zip(ends, (a, b), strict=True):
            tun_without_header = 0x0001 | 0x1000
            import fcntl  # not on Windows

            fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", host.device.encode(), tun_without_header))  # TUNSETIFF
            command("ip", "link", "set", host.device, "netns", host.namespace)
            command("tc", "-n", host.namespace, "qdisc", "add", "dev", host.device, "root", "tbf", *RATE)
            host.configure()
        stop, stops = os.pipe()
        stack.callback(os.close, stop)

        def carry() -> None:
            in_flight: deque[tuple[float, int, bytes]] = deque()
            other = {ends[0].fileno(): ends[1].fileno(), ends[1].fileno(): ends[0].fileno()}
            while True:
                timeout_s = max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else None
                readable, _, _ = select.select([stop, *other], [], [], timeout_s)
                if stop in readable:
                    return
                for end in readable:
                    in_flight.append((time.monotonic() + DELAY_S, other[end], os.read(end, 65536)))
                while in_flight and in_flight[0][0] <= time.monotonic():
                    _, end, packet = in_flight.popleft()
                    with contextlib.suppress(OSError):  # a host that is not up loses it
                        os.write(end, packet)

        thread = threading.Thread(target=carry)
        thread.start()
        try:
            yield
        finally:
            os.close(stops)
            thread.join()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    a, b = Host("a", tmp_path), Host("b", tmp_path)
    with contextlib.ExitStack() as stack:
        for host in (a, b):
            try:
                command("ip", "netns", "add", host.namespace)
            except OSError as error:
                pytest.skip(f"this machine has no network namespaces for us: {error}")
            stack.callback(command, "ip", "netns", "del", host.namespace)  # and with it its end of the link
            stack.callback(host.kill)
        stack.enter_context(connected(a, b))
        yield a, b


def wait_until(holds: Callable[[], bool], folder: Path, *processes: subprocess.Popen) -> None:
    """Wait until something holds; fail with the logs if a process fails first, or after the limit."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        failed = [process.poll() for process in processes if process.poll()]
        if failed or time.monotonic() > deadline:
            logs = "\n".join(f"---- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*.log")))
            pytest.fail(f"{'ended with ' + str(failed) if failed else 'too late'}\n{logs}")
        time.sleep(0.02)


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    assert main(["train", *RUN, "--output", str(folder / "run")]) == 0
    return folder / "run"


def test_two_hosts_train_as_one_process_does_also_if_one_dies_and_comes_back(
    hosts, of_one_process: Path, tmp_path: Path
) -> None:
    """The other host's torchrun restarts its processes, which wait; the run goes on from its last checkpoint."""
    a, b = hosts
    running = a.torchrun(*RUN, "--output", "run")
    b.torchrun(*RUN, "--output", "run")
    wait_until(
        lambda: len(metrics_of(tmp_path / "run" / "metrics.jsonl")) >= 18, tmp_path, running
    )  # an epoch and some steps
    b.kill()
    assert len(metrics_of(tmp_path / "run" / "metrics.jsonl")) < 24, "it was in the middle of it"
    again = b.torchrun(*RUN, "--output", "run")
    wait_until(lambda: running.poll() == again.poll() == 0, tmp_path, running, again)
    assert len(metrics_of(tmp_path / "run" / "metrics.jsonl")) == 26
    assert_same_metrics(tmp_path / "run" / "metrics.jsonl", of_one_process / "metrics.jsonl", rel=1e-4)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["processes"] == 3
    assert "resuming after step" in "".join((tmp_path / f"{name}.log").read_text() for name in "ab")
