"""On real accelerators: two replicas on one of them, and, where there are two, one on each.

Run by `make gpu-check`; skipped, visibly, where there is none. It runs the contract (tests/contract) on the same
devices, too: here is what depends on streams, the host's memory and several kinds of numbers.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from helpers.accelerators import COMPUTES_ON_HOST, FIRST, on_accelerator, on_two_accelerators
from helpers.comparisons import assert_same_gradients
from helpers.in_time import in_time as _in_time
from helpers.modules import Calls
from helpers.small_buckets import use_small_buckets
from unisono import DataParallel
from unisono.console.errors import OptionError
from unisono.runtime import devices
from unisono.training.computation import expect_compiler

WAIT_S = 60.0
NUM_STRESS_STEPS = 50 if COMPUTES_ON_HOST else 500
WIDTH_OF_WORK = 1000 if COMPUTES_ON_HOST else 2000  # of a matrix whose products keep a stream busy


pytestmark = on_accelerator


@pytest.fixture(autouse=True)
def _seed_and_exact_numbers() -> Iterator[None]:
    """No TF32, neither in products of matrices nor in convolutions; the same kernels for the same shapes."""
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def first() -> torch.device:
    return torch.device(FIRST)


PLACES = [
    pytest.param([0, 0], id="one device twice"),
    pytest.param([0, 0, 0], id="one device three times"),
    pytest.param([0, 1], marks=on_two_accelerators, id="two devices"),
    pytest.param([1, 0, 1], marks=on_two_accelerators, id="two devices, three replicas"),
]
SEPARATE = [pytest.param([0, 0, "separate memory"], id="one device twice, separate memory")]


Places = list[torch.device]


@pytest.fixture(params=PLACES + SEPARATE)
def placed(request: pytest.FixtureRequest, first: torch.device, monkeypatch: pytest.MonkeyPatch) -> Places:
    """The devices of the replicas, each of which may have memory of its own even on one device."""
    use_small_buckets(monkeypatch, 1000)
    monkeypatch.setattr(devices, "_has_separate_memory", "separate memory" in request.param)
    return [torch.device(first.type, index) for index in request.param if isinstance(index, int)]


in_time = functools.partial(_in_time, limit_s=WAIT_S)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)
    ).to(dtype)


def wrapped(plain: nn.Module, placed: Places, **options: Any) -> tuple[nn.Module, DataParallel]:
    """Return the plain module on the first device, and a copy of it wrapped."""
    plain = plain.to(placed[0])
    return plain, DataParallel(copy.deepcopy(plain), placed, **options)


@pytest.mark.filterwarnings("ignore:a hook stores")
def test_each_replica_stands_on_its_device(placed: Places) -> None:
    """R1, S11: shards, parameters and outputs; the current device in each replica is its own."""
    _, model = wrapped(mlp(), placed)
    seen: list[tuple[set[torch.device], int]] = []

    def report(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        where = {t.device for t in (*args, output, *module.parameters())}
        seen.append((where, torch.accelerator.current_device_index()))

    model.module.register_forward_hook(report)
    before = torch.accelerator.current_device_index()
    model(torch.randn(12, 16, dtype=torch.float64))
    expected = sorted((str(device), device.index) for device in placed)
    assert sorted((str(*where), index) for where, index in seen) == expected
    assert torch.accelerator.current_device_index() == before


@pytest.mark.parametrize("where", ["pageable", "pinned", "first device", "last device"])
def test_inputs_from_anywhere(placed: Places, where: str) -> None:
    """S11: pageable and pinned host memory; written into right after the call, which must not matter."""
    plain, model = wrapped(mlp(), placed)
    for _ in range(5):
        x = torch.randn(24, 16, dtype=torch.float64)
        expected = plain(x.to(placed[0]))
        if where == "pinned":
            x = x.pin_memory()
        elif where != "pageable":
            x = x.to(placed[0] if where == "first device" else placed[-1])
        output = model(x)
        x.fill_(float("nan"))
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


def test_outputs_on_the_host(placed: Places) -> None:
    """A6: complete on return."""
    plain, model = wrapped(mlp(), placed, output_device="cpu")
    x = torch.randn(24, 16, dtype=torch.float64, device=placed[0])
    for _ in range(5):
        output = model(x)
        assert output.device.type == "cpu"
        torch.testing.assert_close(output, plain(x).cpu(), rtol=1e-10, atol=1e-10)
    output.pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    assert_same_gradients(model.module, plain, 1e-10)


@pytest.mark.filterwarnings("ignore:a hook stores")
def test_the_callers_side_stream(placed: Places) -> None:
    """R14, S11: work queued on the caller's own stream is waited for, and replicas queue theirs on it."""
    plain, model = wrapped(mlp(), placed)
    stream = torch.Stream(device=placed[0])
    big = torch.randn(WIDTH_OF_WORK, WIDTH_OF_WORK, device=placed[0])
    x = torch.randn(24, 16, dtype=torch.float64, device=placed[0])
    expected = plain(x * 2)
    expected.pow(2).sum().backward()
    torch.accelerator.synchronize(placed[0])
    seen: list[bool] = []
    model.module.register_forward_hook(
        lambda module, args, output: seen.append(
            args[0].device != placed[0] or torch.accelerator.current_stream(args[0].device) == stream
        )
    )
    before = torch.accelerator.current_stream(placed[0])
    torch.accelerator.set_stream(stream)
    try:
        for _ in range(20):
            big = big @ big.softmax(1)  # keeps the stream busy, so that what does not wait reads too early
        late = torch.zeros_like(x)
        late.copy_(x * 2)
        output = model(late)
        output.pow(2).sum().backward()
    finally:
        torch.accelerator.set_stream(before)
    stream.synchronize()
    assert seen == [True] * len(placed)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert_same_gradients(model.module, plain, 1e-10)


def test_branches_on_streams_of_their_own(placed: Places) -> None:
    """R14, N1: gradients of one bucket are made on several streams; an odd-sized parameter comes first."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        here, side = torch.accelerator.current_stream(x.device), torch.Stream(device=x.device)
        side.wait_stream(here)
        torch.accelerator.set_stream(side)
        try:
            right = model.right(x)
        finally:
            torch.accelerator.set_stream(here)
        left = model.left(x)
        here.wait_stream(side)
        right.record_stream(here)
        x.record_stream(side)
        return (left + right) * model.scale

    branches = Calls(forward, scale=nn.Parameter(torch.ones(())), left=mlp(), right=mlp()).double()
    plain, model = wrapped(branches, placed)
    for _ in range(20):
        x = torch.randn(24, 16, dtype=torch.float64, device=placed[0])
        for module in (plain, model):
            module.zero_grad()
            in_time(lambda module=module, x=x: module(x).pow(2).sum().backward())
        assert_same_gradients(model.module, plain, 1e-10)


def stress(placed: Places, *, waits: bool) -> list[torch.Tensor]:
    """Take 500 steps of random sizes on ever other streams; return all losses and the final parameters.

    Every tensor is given up as early as it can be, and its memory at once overwritten with NaN by its next owner:
    what was still to be read from it, on whatever stream, would show. With `waits`, all devices are waited for after
    each part of a step, so that nothing can come too early.
    """
    torch.manual_seed(1)
    model = DataParallel(mlp(torch.float32).to(placed[0]), placed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    before = torch.accelerator.current_stream(placed[0])
    streams = [before, torch.Stream(device=placed[0]), torch.Stream(device=placed[0])]
    losses = torch.zeros(NUM_STRESS_STEPS, device=placed[0])

    def part_ends() -> None:
        if waits:
            for device in dict.fromkeys(placed):
                torch.accelerator.synchronize(device)

    def overwrite(*like: tuple[int, ...]) -> None:
        for shape in like:
            for device in dict.fromkeys(placed):
                torch.full(shape, float("nan"), device=device)
        part_ends()

    sizes = torch.randint(1, 400, (NUM_STRESS_STEPS,), generator=torch.Generator().manual_seed(2)).tolist()
    try:
        for number, rows in enumerate(sizes):
            stream = streams[(number * 7 // 3) % 3]
            stream.wait_stream(torch.accelerator.current_stream(placed[0]))  # the caller's own duty
            torch.accelerator.set_stream(stream)
            where = ("cpu", placed[0], placed[-1])[number % 3]
            x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(number)).to(where)
            part_ends()
            output = model(x)
            part_ends()
            if x.device.type != "cpu":
                x.fill_(float("nan"))
            del x
            overwrite((rows, 16), ((rows + 1) // 2, 16))
            loss = output.pow(2).mean()
            del output
            overwrite((rows, 4), ((rows + 1) // 2, 4))
            optimizer.zero_grad()
            loss.backward()
            part_ends()
            overwrite((rows, 32), ((rows + 1) // 2, 32), (32, 32), (32, 16))
            optimizer.step()
            losses[number] = loss.detach()
            del loss  # its graph was made on this step's stream, and torch warns if it is alive in a later one
            part_ends()
    finally:
        torch.accelerator.set_stream(before)
        for stream in streams:
            before.wait_stream(stream)
    return [losses.cpu(), *(p.detach().cpu() for p in model.parameters())]


# The node that adds to a parameter's `grad` is kept from step to step, as with DDP; here each step has another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_500_steps_bit_for_bit(placed: Places) -> None:
    """R14, S11: random sizes, side streams, memory that is reused at once; as a run that waits after each part."""
    expected = stress(placed, waits=True)
    assert all(tensor.isfinite().all() for tensor in expected)
    for mine, theirs in zip(stress(placed, waits=False), expected, strict=True):
        assert torch.equal(mine, theirs)


@on_two_accelerators
def test_steps_that_nothing_waits_for_need_no_more_memory() -> None:
    """N10, S11: the host runs ahead, and copies that GPUs wait for must not pile up on the others."""
    second = devices.accelerators()[1]
    width = 128 if COMPUTES_ON_HOST else 1024
    model = DataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(16))).to(devices.accelerators()[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(256 * len(model.device_ids), width, device=devices.accelerators()[0])

    def peak_bytes(num_steps: int) -> int:
        torch.accelerator.synchronize(second)
        torch.accelerator.reset_peak_memory_stats(second)
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        torch.accelerator.synchronize(second)
        return int(torch.accelerator.max_memory_allocated(second))

    peak_bytes(3)
    single = peak_bytes(1)
    assert peak_bytes(50) <= 2 * single


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_compiled_by_the_default_compiler(placed: Places) -> None:
    """R13: code for each device; replicas reach their first backward, which compiles too, at the same time."""
    try:
        expect_compiler(placed[0])
    except OptionError as error:
        pytest.skip(str(error))
    torch.compiler.reset()
    plain = mlp().to(placed[0])
    model = DataParallel(cast(Any, torch.compile(copy.deepcopy(plain))), placed)
    for rows in (24, 24, 12):
        x = torch.randn(rows, 16, dtype=torch.float64, device=placed[0])
        for module in (plain, model):
            module.zero_grad()
            in_time(lambda module=module, x=x: module(x).pow(2).sum().backward(), limit_s=300)
        assert_same_gradients(model.module._orig_mod, plain, 1e-8)


def graphed(module: nn.Module, x: torch.Tensor) -> nn.Module:
    """Have forward and backward of a module replayed from CUDA graphs."""
    torch.cuda.make_graphed_callables(module, (x.clone(),))
    return module


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")


@needs_cuda
@pytest.mark.filterwarnings("ignore:.*AccumulateGrad:UserWarning")
def test_cuda_graphs_on_one_device(first: torch.device) -> None:
    """A3, R13: a module that replays CUDA graphs trains as it would without; the wrapper around it changes nothing."""
    plain = mlp().to(first)
    x = torch.randn(12, 16, dtype=torch.float64, device=first)
    model = DataParallel(graphed(copy.deepcopy(plain), x), [first])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, model)]
    for _ in range(5):
        x = torch.randn(12, 16, dtype=torch.float64, device=first)
        for module, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).pow(2).mean().backward()
            optimizer.step()
    for mine, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@needs_cuda
@pytest.mark.filterwarnings("ignore:.*AccumulateGrad:UserWarning")
def test_cuda_graphs_on_several_replicas_are_refused(first: torch.device) -> None:
    """R13: a graph has one place for its input, and all replicas would write there."""
    x = torch.randn(6, 16, dtype=torch.float64, device=first)
    model = DataParallel(graphed(mlp().to(first), x), [first, first])
    with pytest.raises(RuntimeError, match="CUDA graph"):
        model(torch.cat([x, x]))


def test_copies_between_all_devices_arrive() -> None:
    """S11: where they do not, unisono copies through the host, and this machine needs attention."""
    present = devices.accelerators()
    assert [(a, b) for a in present for b in present if not devices.arrives(a, b)] == []
