"""Torch and Python stay as they are: after an import, a step, a map, an error or Ctrl-C nothing of theirs differs.

The first forward replaced 45 attributes for good, `torch.random.default_generator` and `warnings.catch_warnings` among
them, and each step set signal handlers anew, which lost those of C, such as faulthandler's.

Each act runs in one fresh program, first with the plain module, twice, so that what torch itself keeps (caches, what it
imports when first used) is there already; then with the wrapper, between two snapshots (helpers/outside.py). To see
what each act changes, as the test does:

    PYTHONPATH=src:tests python tests/test_outside.py each
"""

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from helpers.outside import Snapshot, differences, snapshot, system_handler

Wrap = Callable[..., nn.Module]  # from a module, and options, to what is trained
ACTS: dict[str, Callable[[Wrap], None]] = {}


def act(function: Callable[[Wrap], None]) -> Callable[[Wrap], None]:
    ACTS[function.__name__.replace("_", " ")] = function
    return function


class Calls(nn.Module):
    """A module whose forward is a function of it and its input."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.GRU(4, 4))


def rows() -> torch.Tensor:
    return torch.arange(32.0).reshape(8, 4) - 16


def step(model: nn.Module) -> None:
    output = model(rows().requires_grad_())
    (output[0] if isinstance(output, tuple) else output).sum().backward()


@act
def a_step(wrap: Wrap) -> None:
    step(wrap(layers(), sync_batch_norm=False))


@act
def a_step_with_each_option(wrap: Wrap) -> None:
    for options in ({"sync_batch_norm": True}, {"parts": 2}, {"shares": [1, 3]}, {"output_device": "cpu"}):
        step(wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), **options))


def checkpoint_of_layer(reentrant: bool, net: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(net.layer, x, use_reentrant=reentrant)


@act
def checkpoints(wrap: Wrap) -> None:
    for reentrant in (False, True):
        layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        step(wrap(Calls(partial(checkpoint_of_layer, reentrant), layer)))


@contextlib.contextmanager
def settings() -> Iterator[None]:
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    with (
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=False),
        torch.autograd.set_detect_anomaly(True),
        torch.random.fork_rng(),
    ):
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = True
        try:
            torch.manual_seed(0)
            yield
        finally:
            torch.set_default_dtype(before[0])
            torch.set_float32_matmul_precision(before[1])
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.benchmark = False


def with_settings(net: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        with settings():
            x = net.layer(x)
    return x


@act
def settings_in_forward(wrap: Wrap) -> None:
    step(wrap(Calls(with_settings, nn.Linear(4, 4))))


@act
def warnings_in_forward(wrap: Wrap) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                x = net.layer(x)
        return x

    step(wrap(Calls(forward, nn.Linear(4, 4))))


@act
def cached_weights_in_forward(wrap: Wrap) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return net.layer(net.layer(x))

    net = Calls(forward, nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    step(wrap(net))


@act
def forward_mode(wrap: Wrap) -> None:
    with contextlib.suppress(RuntimeError):
        step(wrap(Calls(lambda net, x: torch.func.jvp(net.layer, (x,), (x,))[1], nn.Linear(4, 4))))


@act
def compiled(wrap: Wrap) -> None:
    step(wrap(torch.compile(nn.Sequential(nn.Linear(4, 4), nn.GELU()), backend="eager")))


@act
def a_wrapper_inside(wrap: Wrap) -> None:
    step(wrap(nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4)))))


@act
def two_callers(wrap: Wrap) -> None:
    models = [wrap(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))) for _ in range(2)]

    def train(model: nn.Module) -> None:
        for _ in range(5):
            step(model)

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@act
def a_map(wrap: Wrap) -> None:
    model: Any = wrap(Calls(with_settings, nn.Linear(4, 4)))
    batches = [rows() for _ in range(6)]
    if not hasattr(model, "map"):
        for batch in batches:
            model(batch)
        return
    list(model.map(batches))
    with model.map(batches) as outputs:
        next(outputs)
    model.evaluate([(batch, batch) for batch in batches], nn.functional.mse_loss)


def stopped(
    wrap: Wrap,
    error: type[BaseException],
    in_forward: Callable[[torch.Tensor], None],
    in_backward: Callable[[torch.Tensor], None],
) -> None:
    """Take a step that raises an error in forward, given its rows, and one that does in backward, given a gradient."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        with settings():
            in_forward(x)
            return net.layer(x)

    def forward_with_hook(net: Any, x: torch.Tensor) -> torch.Tensor:
        output = net.layer(x)
        output.register_hook(in_backward)
        return output

    for function in (forward, forward_with_hook):
        with contextlib.suppress(error):
            step(wrap(Calls(function, nn.Linear(4, 4))))


@act
def an_error(wrap: Wrap) -> None:
    def in_backward(_: torch.Tensor) -> None:
        raise ValueError("the user's")

    def in_forward(x: torch.Tensor) -> None:
        if x[-1].sum() > 0:  # in the second half of the rows, and the whole batch
            raise ValueError("the user's")

    stopped(wrap, ValueError, in_forward, in_backward)


@act
def ctrl_c_in_a_step(wrap: Wrap) -> None:
    def ctrl_c(_: torch.Tensor) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)

    stopped(wrap, KeyboardInterrupt, ctrl_c, ctrl_c)


@act
def handlers_in_c(wrap: Wrap) -> None:
    """faulthandler's, in the place of one of Python's, and one of Python's that lets system calls go on."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    own = signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR2, False)
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR1, file)
        found = [system_handler(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
        during: list[tuple[int, int]] = []

        def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
            during.append(system_handler(signal.SIGUSR1))
            os.kill(os.getpid(), signal.SIGUSR1)
            return net.layer(x)

        step(wrap(Calls(forward, nn.Linear(4, 4))))
        file.seek(0)
        assert file.read().count(b"in forward") >= len(during)
        assert {*during} == {found[0]}
        assert [system_handler(number) for number in (signal.SIGUSR1, signal.SIGUSR2)] == found
        faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    signal.signal(signal.SIGUSR2, own)


# ---- the exceptions, and what is none --------------------------------------------------------------------

# docs/rules.md, "Torch and Python stay as they are": inert kernels on a dispatch key that nothing else uses.
KERNELS = (
    *("._dispatch_cache (entries)", ".non_fallthrough_keys", "torch.library._impls (entries)"),
    "torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS (entries)",
)
# Caches, counters and registries, which change with any call.
CACHES = (
    *("re._cache (entries)", "re._cache2 (entries)", "sys.path_importer_cache (entries)", "sys.modules (entries)"),
    *("torch.utils.hooks.RemovableHandle.next_id", "torch.jit._builtins._builtin_table (entries)"),
    *("weakref.finalize._registry (entries)", "threading._active (entries)"),
    *("torch.nn.utils.parametrize._cache", "torch._ops.cached_ops (entries)"),
    "ast._Unparser",  # what ast.unparse has imported, since Python 3.14
    "torch._prims.broadcast_in_dim._namespace",  # set at its first use, since torch 2.15
)
SEEDS = "._lazy_seed_tracker."  # calls of `torch.manual_seed`, for devices that have not been used yet
# What torch.compile writes into when it compiles. Its settings are one of the flags.
COMPILER = (
    *("torch._dynamo", "torch._library", "torch._logging", "torch._subclasses", "torch.utils._stats"),
    *("torch.fx.graph_module", "torch.fx.operator_schemas"),
)


def is_an_exception(name: str) -> bool:
    return name in CACHES or name.endswith(KERNELS) or name.startswith(COMPILER) or SEEDS in name


def program(*, each_act: bool) -> dict[str, list[str]]:
    """Return the names of what differs, after each act, or after all of them."""
    found: dict[str, list[str]] = {}
    before: Snapshot = {}

    def compare(name: str) -> None:
        nonlocal before
        after = snapshot()
        found[name] = sorted(each for each in differences(before, after) if not is_an_exception(each))
        before = after

    def run(wrap: Wrap, name: str) -> None:
        try:
            ACTS[name](wrap)
        except Exception as error:  # noqa: BLE001 - reported
            raised.append(f"{name}: {error!r}")

    raised: list[str] = []
    for _ in range(2):
        for name in ACTS:
            run(lambda module, **_: module, name)
    before = snapshot()
    for name in ACTS:
        run(lambda module, **_: module, name)
    compare("the plain module")
    import unisono

    compare("an import")
    for name in ACTS:
        for _ in range(2):
            run(lambda module, **options: unisono.DataParallel(module, ["cpu", "cpu"], **options), name)
        if each_act:
            compare(name)
    compare("all acts")
    return {"raised": raised, **found}


@pytest.mark.only_on("linux", because="reads the system's handlers as glibc has them")
def test_torch_and_python_stay_as_they_are() -> None:
    """R17, F3: but for what an import registers: a function that is called when the program ends, and overloads."""
    here = Path(__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(here.parent)])}
    command = [sys.executable, str(here)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    found = json.loads(run.stdout)
    of_import = ["flag: exit functions", "typing._overload_registry (entries)"]  # the latter: for `get_overloads`
    assert found == {"raised": [], "the plain module": [], "an import": of_import, "all acts": []}


if __name__ == "__main__":
    print(json.dumps(program(each_act="each" in sys.argv), indent=1))
