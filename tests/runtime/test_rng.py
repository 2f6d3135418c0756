"""Random streams: which draws are intercepted, and which are reported. tests/contract/test_random.py has the rest."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from helpers.contract import in_threads
from helpers.forks import in_a_fork
from helpers.modules import PassingMode
from unisono import data_parallel, parallel_apply
from unisono.runtime import devices, rng
from unisono.runtime.rng import operations_that_draw, own_streams
from unisono.runtime.torch_private import dispatcher

CPU = torch.device("cpu")
WAIT_S = 15.0
Function = Callable[[torch.Tensor], torch.Tensor]


# In older releases of torch, rand_like and its siblings take no generator; see operations_that_draw.
LIKES_TAKE_GENERATORS = hasattr(torch.ops.aten.rand_like, "generator")
needs_likes_that_take_generators = pytest.mark.skipif(
    not LIKES_TAKE_GENERATORS, reason="needs a torch whose rand_like takes a generator"
)


def run(function: Function, num_replicas: int = 3, seed: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return parallel_apply([function] * num_replicas, list(torch.ones(num_replicas, 2, 16, 8)))


def assert_streams(function: Function, same_as: Function | None = None) -> None:
    """Assert that replicas draw different numbers, and the same at every run; those of `same_as`, if given."""
    first = run(same_as or function)
    assert len({tuple(part.flatten().tolist()) for part in first}) == len(first)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(run(function), first, strict=True))
    assert not torch.equal(run(function, seed=2)[0], first[0])


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "unisono"]


# ---- what is caught ------------------------------------------------------------------------------

# Tagged as drawing, present on the CPU, and yet not caught.
_NOT_CAUGHT = {
    "aten::native_dropout": "caught, by a handler of its own",
    "aten::native_dropout.out": "calls native_dropout",
    "aten::_fused_sdp_choice": "draws nothing",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "refuses dropout",
    "aten::_scaled_dot_product_fused_attention_overrideable": "refuses to run",
}
_OF_OTHER_DEVICES = ("_fused_dropout", "_cudnn", "_lstm_mps", "miopen", "_triton")


def operations_with_random_numbers() -> Iterator[tuple[str, Any]]:
    """Yield every operation of torch that the CPU has, and that draws by itself."""
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if (
            not name.startswith("aten::")
            or operation is None
            or torch.Tag.nondeterministic_seeded not in operation.tags
        ):
            continue
        kernels = [
            torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("CPU", "CompositeExplicitAutograd")
        ]
        if any(kernels) and not packet.startswith(_OF_OTHER_DEVICES):
            yield name, operation


def test_every_operation_that_draws_on_the_host_is_caught() -> None:
    """N6: a release of torch with a new one fails here."""
    caught = {operation for operation, _ in operations_that_draw()}
    found = dict(operations_with_random_numbers())
    assert len(found) > 90
    not_caught = {name for name, operation in found.items() if operation not in caught}
    if not LIKES_TAKE_GENERATORS:
        not_caught = {name for name in not_caught if "_like" not in name}
    assert not_caught == set(_NOT_CAUGHT)


DRAWS: dict[str, Function] = {
    "dropout": F.dropout,
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rand": lambda x: torch.rand(9, 9),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "randn with out": lambda x: torch.randn(9, 9, out=torch.empty(9, 9)),
    "normal": lambda x: torch.normal(0.0, 1.0, (9, 9)),
    "binomial": lambda x: torch.binomial(50 * x, 0.5 * x),
    "the default generator by name": lambda x: torch.rand(9, 9, generator=torch.default_generator),
    "that of torch.random by name": lambda x: torch.rand(9, 9, generator=torch.random.default_generator),
    "the default generator in its place": lambda x: torch.poisson(100 * x, torch.default_generator),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_likes_that_take_generators if name.endswith("_like") else ()) for name in DRAWS],
)
def test_in_a_dispatch_mode_the_same_is_drawn(name: str) -> None:
    """N6: a mode runs operations where what they call inside is hidden."""

    def run_in_mode(x: torch.Tensor) -> torch.Tensor:
        with PassingMode():
            return DRAWS[name](x)

    assert_streams(run_in_mode, same_as=DRAWS[name])


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_native_dropout_is_torchs(p: float) -> None:
    """The formula, and its derivative."""

    def dropout(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        output, mask = torch.native_dropout(x, p, True)
        assert torch.equal(torch.native_dropout(x, p, False)[0], x)
        (grad,) = torch.autograd.grad(output.pow(2).sum(), x)
        return torch.stack([output.detach(), mask, grad])

    (output, mask, grad), _ = run(dropout, 2)
    scale = 1 / (1 - p) if p < 1 else 0.0
    torch.testing.assert_close(output, mask * scale)
    torch.testing.assert_close(grad, 2 * output * mask * scale)
    assert mask.mean().item() == pytest.approx(1 - p, abs=0.15)


def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.dropout(x, 0.5, True) + torch.rand_like(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(scripted),  # which calls operations without Python
        lambda: torch.vmap(F.dropout, randomness="same"),
        lambda: torch.vmap(lambda x: torch.native_dropout(x, 0.5, True)[0], randomness="different"),
        lambda: torch.func.grad(lambda x: F.dropout(x).sum()),
    ],
    ids=["TorchScript", "vmap, the same for all", "vmap of native_dropout", "grad"],
)
def test_in_scripts_and_transforms(make: Callable[[], Function]) -> None:
    """N6"""
    assert_streams(make())


def test_selective_checkpoints() -> None:
    """N6, R13: torch implements them with dispatch modes."""
    weight = torch.randn(8, 8)

    def policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        products = operation == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if products else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(x: torch.Tensor, recompute: bool) -> torch.Tensor:
        x = x.requires_grad_()
        layer: Function = lambda x: F.dropout(x @ weight).tanh()  # noqa: E731
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        output = checkpoint(layer, x, use_reentrant=False, context_fn=contexts) if recompute else layer(x)
        (grad,) = torch.autograd.grad(output.pow(2).sum(), x)
        return torch.stack([output.detach(), grad])

    assert_streams(functools.partial(forward, recompute=True), same_as=functools.partial(forward, recompute=False))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """N6, R13: also in the call that compiles; inside replicas and outside of them, one compilation each."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x: F.dropout(x.tanh()) + torch.rand_like(x), backend=counter)
    try:
        assert_streams(compiled)
        inside = counter.frame_count
        for _ in range(2):
            compiled(torch.ones(2, 16, 8))
            assert_streams(compiled)
        assert counter.frame_count <= inside + 1
    finally:
        torch._dynamo.reset()
    assert not logged(caplog)


def test_recording_is_not_disturbed() -> None:
    """N6: no generator is recorded where operations are recorded rather than carried out."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    graphs = []
    lock = threading.Lock()  # torch records in one thread at a time

    def record(x: torch.Tensor) -> torch.Tensor:
        with lock:
            graphs.append(make_fx(lambda x: torch.native_dropout(x, 0.5, True)[0] + torch.rand(8))(x))
            with FakeTensorMode():
                F.dropout(torch.rand(3))
        return torch.rand(3)

    assert_streams(record)
    for graph in graphs:
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert torch.ops.aten.native_dropout.default in targets
        assert torch.ops.aten.rand.default in targets


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_higher_order_operators() -> None:
    """N6: they are dispatched in Python, which has no fallback for the key on which draws are caught."""
    lock = threading.Lock()  # torch runs them by its compiler, in one thread at a time

    def draw(x: torch.Tensor) -> torch.Tensor:
        with lock:
            torch.cond(torch.ones(()) > 0, torch.sin, torch.cos, (torch.ones(3),))
            flex_attention(*[torch.ones(1, 1, 4, 8)] * 3)
        return F.dropout(x)

    assert_streams(draw, same_as=F.dropout)
    assert dispatcher.catch_operations({}) is None, "the key is taken"


def test_simulated_accelerators(sim: Sequence[torch.device]) -> None:
    """N6: simulated devices draw on the host."""
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(sim[0])
    x = torch.ones(6, 16, 8).to(sim[0])
    outputs = []
    for _ in range(3):
        torch.manual_seed(1)
        outputs.append(data_parallel(module, x, sim[:3]).cpu())
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert len({tuple(part.flatten().tolist()) for part in outputs[0].chunk(3)}) == 3


def test_draws_for_an_accelerator_are_its_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """N6: the CPU's generators cannot be used there. Here the meta device represents one."""
    monkeypatch.setattr(devices, "computes_on_host", lambda device: device.type == "cpu")
    named = []

    class Recorder:
        def redispatch(self, keys: object, *args: object, **kwargs: object) -> None:
            named.append("generator" in kwargs)

    with own_streams("Test", [CPU, CPU]) as streams, streams(0):
        for device in ("cpu", "meta"):
            rng._draw(Recorder(), Recorder(), 9, None, (3,), device=torch.device(device))
            rng._draw(Recorder(), Recorder(), 9, None, torch.empty(3, device=device))
    assert named == [True, True, False, False]


# ---- what is left as it was ----------------------------------------------------------------------


def test_after_an_interrupt_the_caller_draws_from_torchs_generator_again() -> None:
    """N6, F3"""

    def draws(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(draws, seed=0)
    assert torch.equal(torch.rand(9), torch.rand(9, generator=torch.Generator().manual_seed(0)))
    assert torch.manual_seed(4) is torch.default_generator


def test_under_a_mode_replicas_draw_from_torchs_generator() -> None:
    """N6: one after the other, because other threads cannot join the mode."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    with PassingMode():
        drawn = parallel_apply([torch.rand] * 3, [(3,)] * 3)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(3, generator=generator) for _ in range(3)]))


@pytest.mark.only_on("linux", "macos", because="forks")
def test_a_fork_inside_a_replica() -> None:
    """F5: the child is no replica: it draws from torch's generator."""
    fork_lock = threading.Lock()  # filelock, which torch imports, raises an error in a fork during another one

    def child() -> int:
        torch.manual_seed(5)
        drawn = torch.rand(3)
        torch.default_generator.manual_seed(5)
        return int(torch.equal(drawn, torch.rand(3)))

    def forks(x: torch.Tensor) -> torch.Tensor:
        with fork_lock:
            return torch.tensor(in_a_fork(child))

    assert [int(is_torchs) for is_torchs in run(forks)] == [1, 1, 1]


# ---- what is reported ----------------------------------------------------------------------------


class Stubborn(torch.Tensor):
    """A subclass that knows `rand_like` without a generator only."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is getattr(torch.ops.aten.rand_like, "generator", None):
            raise NotImplementedError(func)
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def test_a_subclass_that_knows_no_generator_works_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """N6"""
    run(lambda x: torch.rand_like(x.as_subclass(Stubborn)))
    (message,) = logged(caplog)
    assert "a tensor subclass" in message


def test_where_torch_offers_no_way(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """N6: everything runs, on one generator; what draws is reported."""
    monkeypatch.setattr(dispatcher, "catch_operations", lambda handlers: None)
    monkeypatch.setattr(rng, "_process", rng._Process())
    run(torch.tanh)
    assert not logged(caplog)
    before = torch.get_rng_state()
    run(F.dropout)
    run(F.dropout)
    assert not torch.equal(torch.get_rng_state(), before)
    (message,) = logged(caplog)
    assert "this release of torch cannot" in message


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, torch.Generator]:
    """Have the CPU represent an accelerator; return the generators of those that several replicas share."""
    generators: dict[torch.device, torch.Generator] = {}
    monkeypatch.setattr(devices, "computes_on_host", lambda device: False)
    monkeypatch.setattr(devices, "seed_differently", lambda devices: None)
    monkeypatch.setattr(devices, "shared_generators", lambda devices: generators)
    return generators


@pytest.mark.usefixtures("shared")
def test_replicas_on_accelerators_have_no_streams_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """N6: what they draw there is reported."""
    expected = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    for draws in (False, True):
        with own_streams("Net", [CPU, CPU]) as streams, streams(1):
            assert torch.equal(torch.get_rng_state(), expected.get_state())
            if draws:
                assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
        assert ["an operation on the CPU" in message for message in logged(caplog)] == [True] * draws
    assert torch.equal(torch.get_rng_state(), expected.get_state())


def test_passes_at_the_same_time_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """N6, F5: each moves torch's random state on while the others run."""

    def call(_: int) -> None:
        for _ in range(30):
            parallel_apply([F.dropout] * 2, list(torch.ones(2, 9)))

    in_threads(3, call)
    assert not logged(caplog)


@pytest.fixture
def generator(shared: dict[torch.device, torch.Generator]) -> torch.Generator:
    """The one generator of an accelerator on which all replicas are."""
    return shared.setdefault(CPU, torch.Generator().manual_seed(5))


def draw(generator: torch.Generator) -> list[float]:
    return torch.rand(3, generator=generator).tolist()


def test_replicas_on_one_accelerator_have_a_random_state_each(generator: torch.Generator) -> None:
    """N6, A12, R13: an activation checkpoint draws again what it drew, although another replica drew in between."""
    runs = []
    for _ in range(2):
        generator.manual_seed(5)
        with own_streams("Net", [CPU, CPU]) as streams, streams(0):
            saved = generator.get_state()
            with rng.waiting_for_others(), streams(1):
                others = draw(generator)
            first = draw(generator)
            generator.set_state(saved)
            assert draw(generator) == first != others
            runs.append((first, others, draw(generator)))
    assert runs[0] == runs[1], "equal seeds, equal runs"
    generator.manual_seed(5)
    assert [*runs[0][0], *runs[0][2]] == [*draw(generator), *draw(generator)], "the first replica's is torch's own"


def test_replicas_on_one_accelerator_take_turns(generator: torch.Generator) -> None:
    """N6, A12: one begins when another has ended, or waits for it in an exchange."""
    at_the_door = threading.Event()
    order: list[int] = []

    def second() -> None:
        at_the_door.set()
        with streams(1):
            order.append(1)

    with own_streams("Net", [CPU, CPU]) as streams, ThreadPoolExecutor(1) as pool:
        with streams(0):
            ended = pool.submit(second)
            assert at_the_door.wait(WAIT_S)
            order.append(0)
        ended.result(WAIT_S)
    assert order == [0, 1]


@pytest.mark.parametrize("which", [0, 1, None])
def test_the_generator_after_a_pass_of_replicas_on_one_accelerator(
    generator: torch.Generator, which: int | None
) -> None:
    """N6: it has moved if a replica has drawn; a pass that fails leaves it as it was."""

    def run_pass(error: type[Exception] | None = None) -> torch.Tensor:
        with contextlib.suppress(KeyError), own_streams("Net", [CPU, CPU]) as streams:
            for index in range(2):
                with streams(index):
                    if index == which:
                        draw(generator)
            if error is not None:
                raise error
        return generator.get_state()

    before = generator.get_state()
    for _ in range(2):
        assert torch.equal(run_pass(KeyError), before)
    states = {bytes(state.tolist()) for state in (before, run_pass(), run_pass())}
    assert len(states) == (1 if which is None else 3)


@pytest.mark.parametrize("draws", [True, False])
def test_replicas_on_one_accelerator_that_wait_for_each_other(
    generator: torch.Generator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, draws: bool
) -> None:
    """N6, A12: they cannot take turns; they run, and what they draw is reported."""
    monkeypatch.setattr(rng, "_PATIENCE_S", 0.01)
    with own_streams("Net", [CPU, CPU]) as streams, streams(0), ThreadPoolExecutor(1) as pool:

        def second() -> None:
            with streams(1):
                if draws:
                    draw(generator)

        pool.submit(second).result(WAIT_S)
    assert ["several replicas of Net are on cpu" in message for message in logged(caplog)] == [True] * draws
