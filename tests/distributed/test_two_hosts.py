"""Two hosts: two network namespaces with a slow link between them, and torchrun on each.

A namespace has a network, a host name and a list of hosts of its own; the two share this machine's processes, clock and
files, as two hosts with a common folder do. The link has 20 ms each way and 100 Mbit/s. The rate is tc's tbf; the delay
is tc's netem, or, where the kernel has none, a thread that carries each packet from one end to the other 20 ms later.

It needs root and iproute2 (`apt-get install iproute2`), and is skipped elsewhere. Nothing is sent but between the two,
which have no way out, and both go when the test ends, with all that runs in them.
"""

import contextlib
import fcntl
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

TOOLS = ("ip", "tc", "unshare", "mount")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
    pytest.mark.skipif(sys.platform == "linux" and os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"not all there of {', '.join(TOOLS)} (iproute2)"),
]

DELAY_S = 0.020
RATE = ("rate", "100mbit", "burst", "64kb", "latency", "100ms")
LIMIT_S = 240  # for one run, on a machine that does other things too
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
RUN = ["--model", "mlp", "--epochs", "4", "--devices", "1"]  # 48 steps, about 0.2 s each on this link


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


class Host:
    """A namespace, its end of the link, and torchrun in it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.namespace = f"manyhands-{os.getpid()}-{name}"
        self.device = f"mh{os.getpid()}{name}"  # 15 letters at most
        self.folder = folder
        self._started: list[subprocess.Popen] = []

    def configure(self) -> None:
        command("ip", "-n", self.namespace, "addr", "add", f"{ADDRESSES[self.name]}/24", "dev", self.device)
        command("ip", "-n", self.namespace, "link", "set", "lo", "up")
        command("ip", "-n", self.namespace, "link", "set", self.device, "up")

    def torchrun(self, *arguments: str) -> subprocess.Popen:
        """Start `manyhands train` in two processes here, and as many on the other host."""
        launch = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES['a']}:29400", "--rdzv-id", "two-hosts"),
            *("--local-addr", ADDRESSES[self.name], "--max-restarts", "3"),
            *("-m", "manyhands", "train", *arguments),
        ]
        hosts = self.folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{at} host-{name}\n" for name, at in ADDRESSES.items()))
        as_host = f'mount --bind "{hosts}" /etc/hosts && hostname host-{self.name} && exec "$@"'
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": self.device,
            "OMP_NUM_THREADS": "1",
            # Without it torchrun (2.13) never tells a host that joins later where to meet the others.
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


def join_by_netem(a: Host, b: Host) -> None:
    """Join the hosts by a veth pair whose ends delay what they send. Raises OSError if the kernel cannot."""
    command(*f"ip link add {a.device} netns {a.namespace} type veth peer name {b.device} netns {b.namespace}".split())
    for host in (a, b):
        end = ("tc", "-n", host.namespace, "qdisc", "add", "dev", host.device)
        command(*end, "root", "handle", "1:", "netem", "delay", f"{1000 * DELAY_S:g}ms", "limit", "10000")
        command(*end, "parent", "1:", "handle", "2:", "tbf", *RATE)


@contextlib.contextmanager
def joined_by_a_thread(a: Host, b: Host) -> Iterator[None]:
    """Join the hosts by two tun devices and a thread that carries packets between them."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(open("/dev/net/tun", "r+b", buffering=0)) for _ in (a, b)]
        for end, host in zip(ends, (a, b), strict=True):
            tun_without_header = 0x0001 | 0x1000
            fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", host.device.encode(), tun_without_header))  # TUNSETIFF
            command("ip", "link", "set", host.device, "netns", host.namespace)
            command("tc", "-n", host.namespace, "qdisc", "add", "dev", host.device, "root", "tbf", *RATE)
        over, ends_now = os.pipe()
        stack.callback(os.close, over)

        def carry() -> None:
            under_way: deque[tuple[float, int, bytes]] = deque()
            other = {ends[0].fileno(): ends[1].fileno(), ends[1].fileno(): ends[0].fileno()}
            while True:
                patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
                readable, _, _ = select.select([over, *other], [], [], patience)
                if over in readable:
                    return
                for end in readable:
                    under_way.append((time.monotonic() + DELAY_S, other[end], os.read(end, 65536)))
                while under_way and under_way[0][0] <= time.monotonic():
                    _, end, packet = under_way.popleft()
                    with contextlib.suppress(OSError):  # a host that is not up loses it
                        os.write(end, packet)

        thread = threading.Thread(target=carry)
        thread.start()
        try:
            yield
        finally:
            os.close(ends_now)
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
        try:
            join_by_netem(a, b)
        except OSError:
            for host in (a, b):
                with contextlib.suppress(OSError):
                    command("ip", "-n", host.namespace, "link", "del", host.device)
            stack.enter_context(joined_by_a_thread(a, b))
        for host in (a, b):
            host.configure()
        yield a, b


def metrics_of(folder: Path) -> list[dict]:
    if not (folder / "metrics.jsonl").exists():
        return []
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return [{key: value for key, value in line.items() if key != "kind" and "seconds" not in key} for line in lines]


def assert_same_metrics(folder: Path, other: Path) -> None:
    found, expected = metrics_of(folder), metrics_of(other)
    assert len(found) == len(expected) == 52
    for line, oracle in zip(found, expected, strict=True):
        # Of 360 test rows: where two answers of a row are equal within rounding, either may win.
        accuracies = [each.pop("test_accuracy", 0.0) for each in (line, oracle)]
        assert accuracies[0] == pytest.approx(accuracies[1], abs=1.01 / 360)
        assert line == pytest.approx(oracle, rel=1e-4)


def wait_until(holds: Callable[[], bool], folder: Path, *processes: subprocess.Popen) -> None:
    """Wait until something holds; fail with what has been written where it will not."""
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
    arguments = [sys.executable, "-m", "manyhands", "train", *RUN, "--output", "run"]
    subprocess.run(arguments, cwd=folder, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    return folder / "run"


def round_trip_s(a: Host, b: Host) -> float:
    """Return how long a word takes from host a to host b and back, the shortest of five."""
    server = "import socket; s = socket.create_server(('', 5000)); print(flush=True); c, _ = s.accept()\n"
    server += "while word := c.recv(1): c.send(word)"
    client = "import socket, time; s = socket.create_connection(('10.77.0.2', 5000)); times = []\n"
    client += (
        "for _ in range(5): t = time.perf_counter(); s.send(b'.'); s.recv(1); times.append(time.perf_counter() - t)"
    )
    client += "\nprint(min(times))"
    inside = lambda host, code: ["ip", "netns", "exec", host.namespace, sys.executable, "-c", code]  # noqa: E731
    with subprocess.Popen(inside(b, server), stdout=subprocess.PIPE, text=True) as serving:
        try:
            serving.stdout.readline()
            done = subprocess.run(inside(a, client), capture_output=True, text=True, check=True, timeout=60)
        finally:
            serving.kill()
    return float(done.stdout)


def test_two_hosts_train_as_one_process_does(hosts, of_one_process: Path, tmp_path: Path) -> None:
    assert round_trip_s(*hosts) >= 2 * DELAY_S
    running = [host.torchrun(*RUN, "--output", "run") for host in hosts]
    wait_until(lambda: all(process.poll() == 0 for process in running), tmp_path, *running)
    assert_same_metrics(tmp_path / "run", of_one_process)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["processes"] == 4


def test_a_host_that_dies_and_comes_back(hosts, of_one_process: Path, tmp_path: Path) -> None:
    """The other host's torchrun starts its processes anew, and waits; the run goes on from its last checkpoint."""
    a, b = hosts
    running = a.torchrun(*RUN, "--output", "run")
    b.torchrun(*RUN, "--output", "run")
    wait_until(lambda: len(metrics_of(tmp_path / "run")) >= 18, tmp_path, running)  # an epoch and some steps
    b.kill()
    assert len(metrics_of(tmp_path / "run")) < 48, "it was in the middle of it"
    again = b.torchrun(*RUN, "--output", "run")
    wait_until(lambda: running.poll() == again.poll() == 0, tmp_path, running, again)
    assert_same_metrics(tmp_path / "run", of_one_process)
    assert "going on after step" in "".join((tmp_path / f"{name}.log").read_text() for name in "ab")
