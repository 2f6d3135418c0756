"""`unisono run`: what the script sees of its program, how it ends, the closing line, errors."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from helpers.commands import assert_misused, run_to_the_end
from unisono.scripts.activity import ActivityReport
from unisono.scripts.command import closing_line

SOURCES = str(Path(__file__).parents[2] / "src")
WRAPPED = """
import torch
model = torch.nn.DataParallel(torch.nn.Linear(5, 2))
for _ in range(3):
    model(torch.zeros(30, 5)).sum().backward()
"""


pytestmark = pytest.mark.usefixtures("own_program", "own_folder")


def run_python(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in the current folder, with no variables but these and what it needs to find unisono."""
    command, env = [sys.executable, *arguments], {"PATH": "/usr/bin:/bin", "PYTHONPATH": SOURCES, **environment}
    return subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=200, check=False)


def script(text: str, name: str = "train.py") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_a_script_sees_what_it_would_with_python_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """X6: `__name__`, `__file__`, its folder, its classes for pickle; its arguments, whatever they look like."""
    script("value = 3", "project/beside.py")
    name = script(
        """
import pickle, sys
import beside
class Own: pass
assert pickle.loads(pickle.dumps(Own())).__class__ is Own
print(__name__, __file__, sys.argv, sys.path[0], beside.value, __spec__)
""",
        "project/train.py",
    )
    arguments = ["--", "--lr", "-1", "--devices", "x", "-m", "--help", "--version", "-"]
    assert run_to_the_end(name, *arguments) == 0
    path = Path(name).absolute()
    assert capsys.readouterr().out == f"__main__ {path} {[name, *arguments]} {path.parent} 3 None\n"


def test_a_module_runs_as_with_python_m(capsys: pytest.CaptureFixture[str]) -> None:
    """X6: a package by its `__main__`."""
    script("", "packaged/__init__.py")
    script("import sys\nfrom packaged import other\nprint(__name__, __package__, sys.argv[1:])", "packaged/__main__.py")
    script("", "packaged/other.py")
    assert run_to_the_end("-m", "packaged", "--x") == 0
    assert capsys.readouterr().out == "__main__ packaged ['--x']\n"


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", "no data", ""),
        ("import sys\nsys.excepthook = lambda *_: sys.exit(5)\n1 / 0", 5, ""),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("def f():\n    {}['key']\nf()", 1, "KeyError: 'key'\n"),
        ("x = = 1", 1, "SyntaxError: invalid syntax\n"),
    ],
)
def test_the_end_is_the_scripts(text: str, status: object, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """X7: exit status and traceback, in which no frame is of the command."""
    assert run_to_the_end(script(text)) == status
    before, _, closing = capsys.readouterr().err.rpartition("unisono run: ")
    assert before.endswith(error)
    assert "main_program" not in before
    assert "importlib" not in before
    assert closing.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("import torch\ntorch.distributed.init_process_group('gloo')", True),
        ("import os\nrank = int(os.environ['LOCAL_RANK'])", True),
        ("from torch import nn\nnn.parallel.DistributedDataParallel(nn.Linear(5, 2))", True),
        ("{}['key']", False),
        ("raise RuntimeError('the process group has not been initialized: run prepare.py')", False),
    ],
)
def test_a_script_that_lacks_its_launcher_is_told_so(
    text: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """X5: in the place of advice for scripts that have ended well."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert run_to_the_end(script(text)) == 1
    error = capsys.readouterr().err
    assert ("so unisono changed nothing. It needs several processes: torchrun --nproc-per-node 2" in error) == is_told
    assert "--count-replicas" not in error


def launch(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    """Set what a launcher sets."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    for name, value in {**launched, "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)


def test_a_script_under_a_launcher_is_not_told_to_use_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """X5: it has forgotten init_process_group."""
    launch(monkeypatch, 1)
    assert run_to_the_end(script("import torch\ntorch.distributed.get_rank()")) == 1
    assert "torchrun" not in capsys.readouterr().err.rpartition("unisono run: ")[2]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_script_may_leave_no_stream(
    stream: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """X7: the closing line still goes to standard error."""
    monkeypatch.setattr(sys, stream, getattr(sys, stream))
    assert run_to_the_end(script(f"import sys\nsys.{stream} = None")) == 0
    assert capsys.readouterr().err.startswith("unisono run: ")


def test_threads_and_exit_handlers_of_the_script_count() -> None:
    """X5, X7: they come after its last line; the closing line comes after them. Its end is Python's."""
    name = script(
        """
import atexit, sys, threading, torch
def steps(count):
    model = torch.nn.DataParallel(torch.nn.Linear(5, 2))
    for _ in range(count):
        model(torch.zeros(30, 5))
def later():
    threading.main_thread().join()
    steps(2)
steps(1)  # Python 3.12.1 starts no threads after the last line: later forwards use these
threading.Thread(target=later).start()
atexit.register(steps, 1)
sys.stdout.close()
sys.exit("no data")
"""
    )
    done = run_python("-m", "unisono", "run", "--devices", "cpu*2", name)
    said, closing = done.stderr.splitlines()
    assert closing.startswith("unisono run: 3 wrappers on 2 replicas (2 x cpu); 120 rows in 4 forwards")
    assert (said, done.returncode) == ("no data", 1)


@pytest.mark.slow
def test_under_a_launcher_each_process_runs_the_script() -> None:
    """X5: the parameters are those of one process with all rows; rank 0 has the closing line, of its rows."""
    text = """
import os, sys, torch
rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
torch.manual_seed(0)
model = torch.nn.Linear(5, 2, dtype=torch.float64)
model = torch.nn.DataParallel(model) if world_size > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(12, 5, dtype=torch.float64)[rank::world_size]
for _ in range(3):
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
torch.save([p.detach() for p in model.parameters()], f"{rank}of{world_size}.pt")
"""
    name = script(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_python(*launcher, "-m", "unisono", "run", "--devices", "cpu*2", name, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    (closing,) = [line for line in done.stderr.splitlines() if line.startswith("unisono run: ")]
    assert closing.startswith("unisono run: rank 0 of 2; 1 wrapper on 2 replicas (2 x cpu); 18 rows")
    exec(compile(text, name, "exec"), {"__name__": "__main__"})
    oracle = torch.load("0of1.pt")
    for rank in range(2):
        for found, expected in zip(torch.load(f"{rank}of2.pt"), oracle, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shares", ["measured", "3,1"])
def test_a_rule_of_shares_can_be_given(shares: str, capsys: pytest.CaptureFixture[str]) -> None:
    """X3, S16: as text on the command line."""
    name = script(WRAPPED + "print(model.shares)")
    assert run_to_the_end("--devices", "cpu*2", "--shares", shares, name) == 0
    assert capsys.readouterr().out == ("(3.0, 1.0)\n" if shares == "3,1" else f"{shares}\n")


def test_the_plain_module_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    """X5, A2: its backward is part of the rest."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert run_to_the_end(script(WRAPPED)) == 0
    closing = capsys.readouterr().err.splitlines()[-1]
    assert closing.startswith(
        "unisono run: 1 wrapper on the CPU, without replicas, because there is no accelerator (--devices "
    )
    assert "; 90 rows in 3 forwards, " in closing
    assert "backward and the rest of the script" in closing


def test_a_script_without_a_wrapper_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """X5: and how to have one, if it asks for the number of GPUs. torch itself is told the truth."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    guarded = "import torch\nif torch.cuda.device_count() > 1:" + WRAPPED.replace("\n", "\n    ").rstrip()
    name = script(guarded + "\nprint(torch.cuda.device_count(), torch.cuda.is_available())")
    assert run_to_the_end("--devices", "cpu*2", name) == 0
    error = capsys.readouterr().err
    assert "used neither torch.nn.DataParallel" in error
    assert "so unisono changed nothing. If it wraps only where there are several GPUs: " in error
    assert run_to_the_end("--devices", "cpu*2", "--count-replicas", name) == 0
    captured = capsys.readouterr()
    assert captured.out == f"2 {torch.cuda.is_available()}\n"
    assert captured.err.startswith("unisono run: 1 wrapper on 2 replicas (2 x cpu); 90 rows in 3 ")
    assert torch.cuda.device_count() == 0


def test_rules_for_inputs_and_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    """X3: on the command line in Python's notation; they hold for every wrapper."""
    name = script(
        """
import torch
class Net(torch.nn.Module):
    def forward(self, x, weight):
        return {"loss": (x @ weight).mean(), "weight": weight, "rows": x.shape[0] + x.new_zeros(())}
output = torch.nn.DataParallel(Net())(torch.arange(15.0).view(5, 3), torch.ones(3, 1))
print({name: value.tolist() for name, value in output.items()})
"""
    )
    rules = ["--in-dims", "{'weight': None}", "--out-dims", "{'weight': None}"]
    rules += ["--scalars", "{'loss': 'mean:rows', 'rows': 'sum'}"]
    assert run_to_the_end("--devices", "cpu*2", *rules, name) == 0
    assert capsys.readouterr().out == "{'loss': 21.0, 'weight': [[1.0], [1.0], [1.0]], 'rows': 5.0}\n"
    name = script("import torch\nprint(torch.nn.DataParallel(torch.nn.Identity())(torch.ones(2, 7)[0].mean()).shape)")
    assert run_to_the_end("--devices", "cpu*2", "--scalars", "mean", "--in-dims", "-1", name) == 0
    assert capsys.readouterr().out == "torch.Size([])\n"


@pytest.mark.parametrize(
    ("backward_s", "phases"),
    [
        (0.0, "forward 50%, the rest of the script 50%"),
        (0.004, "forward 50%, the rest of the script 50%"),
        (0.1, "forward 50%, backward 10%, the rest of the script 40%"),
    ],
)
def test_what_is_nothing_is_not_in_the_closing_line(backward_s: float, phases: str) -> None:
    """X5: short runs, and those without a backward, said "backward 0%"."""
    devices = ((torch.device("cpu"),) * 2,)
    report = ActivityReport(devices, forwards=3, rows=9, seconds=1.0, forward_s=0.5, backward_s=backward_s)
    assert closing_line(report).endswith(f" rows/s; {phases}")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "expected a script, or -m module"),
        (["-m"], "expected a script, or -m module"),
        (["absent.py"], "absent.py (No such file or directory): expected a script, or -m module"),
        (["folder"], "folder/__main__.py (No such file or directory)"),
        (
            ["-m", "no_such_module.inner"],
            "(ModuleNotFoundError: No module named 'no_such_module'); expected a module in ",
        ),
        (["-m", "folder"], "-m folder: No module named folder.__main__; 'folder' is a package"),
        (["--devices", "gpu", "train.py"], "--devices gpu: gpu is not a device"),
        (
            ["--shares", "2,1", "--devices", "cpu*3", "train.py"],
            "error: --shares 2,1: 2 weights for 3 devices; give one for each device",
        ),
        (["--shares", "2,x", "train.py"], "argument --shares: expected chunk, even, measured, or weights such as 2,1"),
        # These named the Python argument, and showed axes where --scalars takes words.
        (["--in-dims", "(0, ", "train.py"], "--in-dims: expected Python's notation, such as 1, (0, None)"),
        (["--out-dims", "{0: 'x'}", "train.py"], "--out-dims: DIMS[0]='x': expected an int (the batch dimension"),
        (["--scalars", "median", "train.py"], "--scalars: RULE='median': expected \"stack\", "),
        (["--scalars", "{'a'", "train.py"], "--scalars: expected Python's notation, such as mean, mean:tokens or {'"),
        (["--count-replicas", "train.py"], "--count-replicas needs --devices"),
        (["--speed", "train.py"], "there is no option --speed"),
    ],
)
def test_a_mistake_is_one_line_and_runs_nothing(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """X7: exit status 2."""
    Path("folder").mkdir()
    script("raise SystemExit(9)")
    assert assert_misused(["run", *arguments], error, capsys) == ""


@pytest.mark.only_on("linux", "macos", because="signals and pipes of POSIX")
def test_from_a_shell() -> None:
    """X6, X7: a script on standard input, LANG=C, no HOME, 20 columns, workers that are spawned, a reader who leaves.

    The data loader's workers import the script again, as `__mp_main__`; Ctrl-C ends it with a traceback and 130.
    """
    name = script(
        """
import os, signal, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((5,), float(i))
if __name__ == "__main__":
    model = torch.nn.DataParallel(torch.nn.Linear(5, 2), device_ids=[0, 1])
    loader = DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    print("模型", sum(len(model(rows)) for rows in loader), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
"""
    )
    arguments = ["-W", "error", "-m", "unisono", "run", "--devices", "cpu*2"]
    done = run_python(*arguments, name, LANG="C", COLUMNS="20")
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "模型 8\n")
    *_, last, closing = done.stderr.splitlines()
    assert last == "KeyboardInterrupt"
    assert closing.startswith("unisono run: 1 wrapper on 2 replicas (2 x cpu); 8 rows in 2 forwards")

    reading, writing = os.pipe()
    os.close(reading)
    source = "print('first')\nprint(__name__)"
    command = [sys.executable, *arguments, "-"]
    done = subprocess.run(command, input=source, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


HEAD = """
import warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
batch_norm = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
"""
STEP = "model(torch.randn(30, 5)).square().sum().backward()"


def compared(
    text: str,
    *options: str,
    capsys: pytest.CaptureFixture[str],
    status: int = 0,
    devices: Sequence[str] = ("--devices", "cpu*2"),
) -> str:
    """Run a script with --verify; return what is on standard error, its closing line too."""
    assert run_to_the_end(*devices, "--verify", *options, script(HEAD + text)) == status
    return capsys.readouterr().err


def test_the_first_step_is_compared_with_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    """X10: before it, in the mode in which it is, with a loss of its own."""
    said = compared(WRAPPED, capsys=capsys)
    line = WRAPPED.count("\n") + HEAD.count("\n")
    assert said.startswith(f"unisono run: {Path('train.py').absolute()}:{line}: first step in training, compared with")
    assert "same: 8 comparisons, in training\n" in said
    assert said.count("Linear on cpu, and on 2 replicas") == 1
    assert "unisono run: 1 wrapper on 2 replicas (2 x cpu); 90 rows in 3 forwards" in said
    assert said.endswith("; first steps compared with one device: 1 the same\n")


def test_a_first_step_that_differs_has_the_cause_and_the_option_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    """X10: of each wrapper once."""
    text = f"""
for layers in (batch_norm, nn.Linear(5, 4)):
    model = nn.DataParallel(layers)
    for _ in range(3):
        {STEP}
"""
    said = compared(text, capsys=capsys, status=1)
    assert "first at 1 (BatchNorm1d): batch norm used each replica's own rows" in said
    assert "unisono run: without a change of the script: unisono run --sync-batch-norm ...\n" in said
    assert said.count("comparisons, in training") == 2
    assert "2 wrappers on 2 replicas" in said
    assert said.endswith("; first steps compared with one device: 1 the same, 1 differs\n")


@pytest.mark.parametrize("option", ["--sync-batch-norm", "--no-sync-batch-norm"])
def test_a_difference_that_an_option_explains_is_no_failure(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = compared(f"model = nn.DataParallel(batch_norm)\n{STEP}", option, capsys=capsys)
    assert said.endswith(f" 1 {'the same' if option == '--sync-batch-norm' else 'as expected'}\n")


@pytest.mark.parametrize(
    ("forward", "call", "name", "value"),
    [
        ("x, 2 * x.square().mean()", "x", "--scalars", "mean"),
        ("x, self.table", "x", "--out-dims", "(0, None)"),
        ("x * t.sum()", "x, torch.ones(31, 5)", "--in-dims", "{1: None}"),
        ("x * t.sum()", "x, t=torch.ones(31, 5)", "--in-dims", "{'t': None}"),
    ],
)
def test_the_option_of_each_remedy(
    forward: str, call: str, name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """X10: with it the first step is that of one device."""
    text = f"""
class Net(nn.Linear):
    table = torch.ones(3, 2)
    def forward(self, x, t=None):
        x = super().forward(x)
        return {forward}
model, x = nn.DataParallel(Net(5, 2)), torch.randn(31, 5)
model({call})
"""
    (said,) = re.findall(r"unisono run (--.+) \.\.\.\n", compared(text, capsys=capsys, status=1))
    assert shlex.split(said) == [name, value]
    assert compared(text, name, value, capsys=capsys).endswith(": 1 the same\n")


def test_training_is_compared_after_a_first_call_without_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    """X10: other inputs lead forward another way. The loss of 9 and 10 rows is no mean over 19."""
    text = """
class Net(nn.Linear):
    def forward(self, x, y=None):
        out = super().forward(x)
        return out if y is None else nn.functional.mse_loss(out, y)
model = nn.DataParallel(Net(5, 2)).eval()
for _ in range(2):
    with torch.no_grad():
        model(torch.randn(19, 5))
    model.train()
    model(torch.randn(19, 5), torch.randn(19, 2)).mean().backward()
    model.eval()
"""
    said = compared(text, capsys=capsys, status=1)
    assert "first step in eval, compared" in said
    assert "Fix: scalars='mean'" in said
    assert said.endswith(": 1 the same, 1 differs\n")


def test_a_first_call_with_one_row_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """X10: one that finds out a shape, say. The next call is compared."""
    said = compared(f"model = nn.DataParallel(batch_norm).eval()\nmodel(torch.zeros(1, 5))\n{STEP}", capsys=capsys)
    assert said.count("compared with one device\n") == 1
    assert "(cpu 15 rows, cpu 15 rows)" in said
    said = compared("model = nn.DataParallel(nn.Linear(5, 4))\nmodel(torch.zeros(1, 5))", capsys=capsys, status=2)
    assert "; nothing was compared: no call" in said


@pytest.mark.parametrize(
    ("make", "devices"),
    [
        ("nn.DataParallel(batch_norm)", ()),
        ("nn.DataParallel(batch_norm)", ("--devices", "cpu,")),
        ("lambda x: nn.parallel.data_parallel(batch_norm, x)", ()),
        ("lambda x: nn.parallel.data_parallel(batch_norm, x)", ("--devices", "cpu*2")),
        ("unisono.DataParallel(batch_norm)", ()),
        ("unisono.DataParallel(batch_norm, ['cpu', 'cpu'])", ()),
        ("torch.compile(nn.DataParallel(batch_norm), backend='eager')", ("--devices", "cpu*2")),
    ],
)
def test_whatever_the_script_wraps_with(
    make: str, devices: Sequence[str], no_accelerators: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """X10: a wrapper without a second device is compared as it would be with two replicas."""
    text = f"import unisono\nmodel = {make}\nfor _ in range(2):\n    {STEP}"
    said = compared(text, devices=devices, capsys=capsys, status=1)
    assert said.count("compared with one device\n") == 1
    assert "Sequential on cpu, and on 2 replicas (cpu 15 rows, cpu 15 rows)" in said
    assert "first at 1 (BatchNorm1d)" in said
    assert ("unisono run --sync-batch-norm" in said) == ("unisono." not in make)
    alone = "the wrapper has no second device here, so the comparison has replicas on cpu, cpu"
    assert (alone in said) == ("*2" not in str(devices) and "'cpu'" not in make)


def test_a_call_of_the_own_wrapper_keeps_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = "import unisono\nmodel = unisono.DataParallel(batch_norm, ['cpu'] * 3, sync_batch_norm=True)\n" + STEP
    assert "on 3 replicas (cpu 10 rows, cpu 10 rows, cpu 10 rows)" in compared(text, capsys=capsys)


def test_inputs_by_position_and_by_name_and_those_that_need_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    text = """
class Net(nn.Linear):
    def forward(self, *xs, scale):
        energy = super().forward(xs[0]) * scale
        return energy, torch.autograd.grad(energy.sum(), xs[0], create_graph=True)[0]
model = nn.DataParallel(Net(5, 2))
energy, force = model(torch.randn(30, 5, requires_grad=True), scale=2.0)
"""
    said = compared(text, capsys=capsys)
    assert "  gradient of inputs[0]  30 x 5 " in said


def test_the_script_goes_on_as_without(capsys: pytest.CaptureFixture[str]) -> None:
    """X10: the same draws, inputs and hooks; what copies of the model print is not on its standard output."""
    text = """
import random, threading, types
torch.manual_seed(0)
class Net(nn.Linear):
    def forward(self, x, state, with_lock, kept):
        state.calls.append(len(x))
        state.tensor += 1
        with_lock.seen += 1
        kept["rows"].append(len(x))
        print("in forward", len(x), "\\n", end="")
        return nn.functional.dropout(super().forward(x) + random.random() * 0)
model, optimizer = nn.DataParallel(Net(5, 2)), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = types.SimpleNamespace(calls=[], tensor=torch.zeros(2))
with_lock, kept = types.SimpleNamespace(lock=threading.Lock(), seen=0), {"rows": []}
for _ in range(3):
    model(torch.randn(30, 5), state, with_lock, kept).sum().backward()
    optimizer.step()
print(torch.rand(2), state, with_lock.seen, kept, [p.sum().item() for p in model.parameters()])
"""
    outputs = []
    for options in ((), ("--verify",)):
        assert run_to_the_end("--devices", "cpu*2", *options, script(HEAD + text)) == (2 if options else 0)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert outputs[0].count("in forward") == 6


def test_what_a_wrapper_does_before_the_librarys_forward_is_done_once(capsys: pytest.CaptureFixture[str]) -> None:
    """X10: a hook of the wrapper, and a forward of its class, have changed the inputs that are compared."""
    text = f"""
class Scaling(nn.DataParallel):
    def forward(self, x):
        return super().forward(x * 3)
model = Scaling(nn.Linear(5, 2))
model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
model.register_forward_hook(lambda *_: print("hook"))
{STEP}
"""
    said = compared(text, capsys=capsys)
    assert said.endswith(": 1 the same\n")
    assert "hook" not in said


def test_a_module_that_is_wrapped_in_every_step_is_compared_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = "net = nn.Linear(5, 2)\nfor _ in range(3):\n    model = nn.DataParallel(net)\n    " + STEP
    assert compared(text, capsys=capsys).endswith("; first steps compared with one device: 1 the same\n")


def test_a_call_during_a_comparison_in_another_thread_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """X10: it cannot wait: here the comparison waits for it."""
    text = f"""
import threading
other, first = nn.DataParallel(nn.Linear(5, 2)), iter([True])
class Net(nn.Linear):
    def forward(self, x):
        if next(first, False):
            thread = threading.Thread(target=lambda: other(torch.ones(30, 5)))
            thread.start()
            thread.join()
        return super().forward(x)
model = nn.DataParallel(Net(5, 2))
{STEP}
"""
    said = compared(text, capsys=capsys, status=2)
    assert said.endswith(": 1 the same, 1 called only during comparisons in other threads\n")
    assert compared(f"{text}\nother(torch.ones(30, 5))\n", capsys=capsys).endswith(": 2 the same\n")


@pytest.mark.parametrize(("code", "status"), [(None, 1), (0, 1), (7, 7), ("no data", "no data")])
def test_the_status_of_a_script_that_ends_otherwise_is_its_own(
    code: object, status: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """X10: that of the comparison only after a script that ends well."""
    text = f"import sys\nmodel = nn.DataParallel(batch_norm)\n{STEP}\nsys.exit({code!r})"
    assert run_to_the_end("--devices", "cpu*2", "--verify", script(HEAD + text)) == status


def test_ctrl_c_in_a_comparison_ends_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    """X7, X10: standard output is the script's again."""
    text = """
class Net(nn.Linear):
    def forward(self, x):
        raise KeyboardInterrupt
try:
    nn.DataParallel(Net(5, 2))(torch.randn(30, 5))
finally:
    print("the script's")
"""
    assert run_to_the_end("--devices", "cpu*2", "--verify", script(HEAD + text)) == 130
    captured = capsys.readouterr()
    assert captured.out == "the script's\n"
    assert captured.err.endswith("; first steps compared with one device: 1 not compared\n")


def test_nothing_that_was_compared_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """X10: where no wrapper was called, and where the model cannot be copied, or draws."""
    assert "; nothing was compared: no call" in compared("", capsys=capsys, status=2)
    uncopied = f"""
class Net(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("only one")
model = nn.DataParallel(Net(5, 2))
for _ in range(3):
    {STEP}
"""
    said = compared(uncopied, capsys=capsys, status=2)
    assert said.count(":13: not compared with one device: TypeError: verify runs each step on a copy of the model") == 1
    assert said.endswith(": 1 not compared\n")
    draws = f"""
import random
class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()
model = nn.DataParallel(Net(5, 2))
{STEP}
"""
    said = compared(draws, capsys=capsys, status=2)
    assert "not compared: training\n" in said
    assert said.endswith(": 1 not compared\n")


def test_verify_is_for_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """X10."""
    launch(monkeypatch, 2)
    assert_misused(["run", "--verify", script(WRAPPED)], "--verify compares within one process", capsys)
