"""Graphs of kernels (graphs=True): bits, gradients and state are those of the steps without them, and what cannot be
captured runs without, for a reason that is logged once.

The asynchronous device counts the graphs that are launched, and fills memory that a graph uses again with NaN.
"""

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuzz.contract import programs
from fuzz.program import ASYNCHRONOUS
from fuzz.servers import ProgramServer
from helpers.contract import DEVICES, ON_CPU
from helpers.modules import Calls
from unisono import DataParallel
from unisono.runtime import devices

needs_graphs = pytest.mark.skipif(ON_CPU, reason="the CPU has no graphs")
NUM_FIRST = 4  # steps of a kind that run without graphs

# Programs of the contract that have graphs: some of each kind, because there are many.
NAMES = (
    *("linear/silu_inplace", "tied/weight, layer", "norm/layer", "normed weight/parametrized weight_norm"),
    *("views/strided", "random/dropout", "unused/parameters", "attribute tensors/plain", "a shared layer in a mode"),
    *("forwards_one_backward", "backward_twice", "gradients_of_some", "gradient_scaler", "two_threads"),
    *("another_optimizer", "backward_of_each_output", "no_grad_between", "writes_into_output", "clipped_gradients"),
    *("inputs: nested", "inputs: with a table", "outputs: column", "outputs: strided", "outputs: 0-dim"),
)


class CountedGraph(devices.Graph):
    """Counts what is launched."""

    num_launches = 0

    def launch(self) -> None:
        CountedGraph.num_launches += 1
        super().launch()


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "Graph", CountedGraph)


class Net(nn.Module):
    """What a graph could get wrong: buffers that forward writes, random numbers, a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(2, 2)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        return {"output": self.last(hidden), "size": hidden.square().sum(1)}


class WithoutStatistics(Net):
    """Has none that forwards on streams that nothing orders would write at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)


class Training:
    """A model that is trained on all devices, and all that its steps have shown."""

    def __init__(
        self, *, graphs: bool, make: Callable[[], nn.Module] = Net, device_ids: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.module = make().to(DEVICES[0])
        options.setdefault("sync_batch_norm", False)
        self.model = DataParallel(self.module, device_ids or DEVICES, graphs=graphs, **options)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.draw = torch.Generator().manual_seed(1)
        self.seen: list[Tensor] = []

    def inputs(self, rows: int = 8) -> Tensor:
        return torch.randn(rows, 5, generator=self.draw).to(DEVICES[0])

    def forward(self, rows: int = 8) -> Tensor:
        """Return a loss."""
        output = self.model(self.inputs(rows))
        self.seen += [each.detach() for each in output.values()]  # which no later step may write
        return output["output"].square().mean() + 0.1 * output["size"].mean()

    def step(self, rows: int = 8) -> None:
        self.optimizer.zero_grad()
        self.forward(rows).backward()
        self.optimizer.step()

    def steps(self, number: int = NUM_FIRST) -> None:
        for _ in range(number):
            self.step()

    def state(self) -> list[Tensor]:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return [*self.seen, *self.module.state_dict().values(), *gradients]


def assert_same_bits(run: Callable[[Training], None], **options: Any) -> int:
    """Assert that what `run` does is the same with graphs as without; return how many it has launched."""
    without = Training(graphs=False, **options)
    run(without)
    before, with_graphs = CountedGraph.num_launches, Training(graphs=True, **options)
    run(with_graphs)
    expected, found = without.state(), with_graphs.state()
    assert len(expected) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    return CountedGraph.num_launches - before


@needs_graphs
@pytest.mark.parametrize("num_devices", [1, len(DEVICES)])
def test_steps_have_the_same_bits(num_devices: int) -> None:
    """N18"""
    num = assert_same_bits(lambda training: training.steps(8), device_ids=DEVICES[:num_devices])
    assert num >= 3 * 3 * num_devices  # forward, and backward up to the bucket and after it


def forwards_in_flight(training: Training) -> None:
    training.steps(3 * NUM_FIRST)
    for _ in range(4):
        training.optimizer.zero_grad()
        losses = [training.forward() for _ in range(3)]
        losses[1].backward()
        losses[0].backward()
        losses[2].backward()
        training.optimizer.step()


def other_gradients(training: Training) -> None:
    training.steps()
    for number in range(6):
        output = training.model(training.inputs())
        training.optimizer.zero_grad()
        chosen = [output["output"].sum(), output["size"].sum(), output["size"][:3].sum() + output["output"][0, 0]]
        chosen[number % 3].backward()
        training.optimizer.step()


def two_backwards(training: Training) -> None:
    training.steps()
    for _ in range(3):
        loss = training.forward()
        loss.backward(retain_graph=True)
        loss.backward()
        training.optimizer.step()


def some_gradients(training: Training) -> None:
    training.steps()
    for _ in range(2):
        training.seen += torch.autograd.grad(training.forward(), [training.module.last.weight])


def evaluation_between(training: Training) -> None:
    for _ in range(2):
        training.steps(6)
        training.model.eval()
        with torch.no_grad():
            for _ in range(6):
                training.forward()
        training.model.train()


def other_parameters(training: Training) -> None:
    training.steps(6)
    training.module.last.weight.data = training.module.last.weight.data * 2
    training.steps(6)
    training.module.first = nn.Linear(5, 8).to(DEVICES[0])
    training.optimizer = torch.optim.Adam(training.module.parameters())
    training.steps(6)


def batches_of_other_sizes(training: Training) -> None:
    for _ in range(6):
        for rows in (8, 7, 6, 9):
            training.step(rows)


def under_autocast(training: Training) -> None:
    for _ in range(7):
        training.optimizer.zero_grad()
        with torch.autocast(torch.device(DEVICES[0]).type, torch.bfloat16):
            loss = training.forward()
        loss.backward()
        training.optimizer.step()
        training.step()


def within_one_autocast(training: Training) -> None:
    training.model.eval()
    with torch.autocast(torch.device(DEVICES[0]).type, torch.bfloat16), torch.no_grad():
        for rows in (8, 8, 8, 8, 8, 7, 8):  # the one before the last runs without graphs, after a capture
            training.forward(rows)


def on_streams_in_turn(training: Training) -> None:
    training.steps()
    streams = [torch.Stream(device=training.model.devices[0]) for _ in range(3)]
    weight, inputs = training.module.last.weight, [training.inputs() for _ in range(9)]
    torch.accelerator.synchronize()
    for number, x in enumerate(inputs):
        with streams[number % 3]:  # nothing orders these but what each of them waits for itself
            training.seen += torch.autograd.grad(training.model(x)["output"].square().sum(), [weight])
    torch.accelerator.synchronize()


def more_backwards_than_have_graphs(training: Training) -> None:
    """On streams in turn; those without a graph read the memory of the graphs on a stream of their own."""
    training.steps()
    streams = [torch.Stream(device=training.model.devices[0]) for _ in range(3)]
    weight, inputs = training.module.last.weight, [training.inputs() for _ in range(15)]
    of_outputs: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda output, size: output.sum(),
        lambda output, size: size.sum() + output.sum(),
        lambda output, size: output.square().sum(),
        lambda output, size: size.square().sum() + output.square().sum(),
        lambda output, size: size.sum() + output.square().sum(),
    ]
    torch.accelerator.synchronize()
    for number, x in enumerate(inputs):
        with streams[number % 3]:
            found = training.model(x)
            loss = of_outputs[number % 5](found["output"], found["size"])
            training.seen += torch.autograd.grad(loss, [weight])
    torch.accelerator.synchronize()


def backward_within_autocast(training: Training) -> None:
    for number in range(10):
        loss = training.forward()
        training.optimizer.zero_grad()
        with torch.autocast(torch.device(DEVICES[0]).type, torch.bfloat16, enabled=number > 6):
            loss.backward()


def inputs_that_need_gradients(training: Training) -> None:
    for _ in range(7):
        x = training.inputs().requires_grad_()
        training.model(x)["output"].square().sum().backward()
        training.seen.append(x.grad)  # type: ignore[arg-type]


RUNS = [forwards_in_flight, other_gradients, two_backwards, some_gradients, evaluation_between, other_parameters]
RUNS += [batches_of_other_sizes, under_autocast, within_one_autocast, backward_within_autocast]
RUNS += [inputs_that_need_gradients]
ON_STREAMS = [on_streams_in_turn, more_backwards_than_have_graphs]


@needs_graphs
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # torch's, of the plain module
@pytest.mark.parametrize("run", [*RUNS, *ON_STREAMS])
def test_bits_with_graphs(run: Callable[[Training], None]) -> None:
    """N18"""
    assert assert_same_bits(run, make=WithoutStatistics if run in ON_STREAMS else Net) > 0


@needs_graphs
@pytest.mark.parametrize("run", [some_gradients, evaluation_between])
def test_bits_with_graphs_on_one_device(run: Callable[[Training], None]) -> None:
    """N18: where nothing is joined, and so copied."""
    assert assert_same_bits(run, device_ids=DEVICES[:1]) > 0


@pytest.fixture(scope="module")
def server() -> Iterator[ProgramServer]:
    found = ProgramServer(ASYNCHRONOUS, 120.0)
    yield found
    found.end()


@pytest.mark.skipif(not DEVICES[0].startswith("queued"), reason="runs on the asynchronous device")
@pytest.mark.parametrize("name", NAMES)
def test_a_program_with_graphs_is_the_plain_modules(name: str, server: ProgramServer) -> None:
    """N18"""
    (program, *_) = programs(name, ASYNCHRONOUS, (2,))
    blocks = tuple([block for block in program.blocks if not block.startswith("hooked")])  # hooks have no graphs
    program = replace(program, graphs=True, steps=program.steps * 4, blocks=blocks)
    outcome = server.run(program)
    assert outcome.difference is None, f"{program!r}: {outcome.difference.text}"
    assert outcome.num_steps == len(program.steps)
    assert outcome.num_launches > 0


class Scaled(Net):
    """Reads a number from a dict that the program changes; returns one tensor twice; adds a table that is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.options = {"scale": [1.0]}

    @functools.lru_cache(maxsize=1)  # noqa: B019 - what a program would write
    def table(self, rows: int, device: torch.device) -> Tensor:
        return torch.arange(rows * 8, device=device).view(rows, 8) * 0.01

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = (self.first(x) + self.table(len(x), x.device)) * self.options["scale"][0]
        output = self.last(hidden)
        return {"output": output, "again": output, "size": hidden.square().sum(1)}


@needs_graphs
@pytest.mark.parametrize("num_devices", [1, len(DEVICES)])
def test_what_forward_reads_from_containers_and_from_outside(num_devices: int) -> None:
    """N18"""

    def run(training: Training) -> None:
        for scale in (1.0, 2.0):
            training.module.options["scale"][0] = scale
            for rows in (8, 12, 8):
                for _ in range(5):
                    training.step(rows)

    assert assert_same_bits(run, make=Scaled, device_ids=DEVICES[:num_devices]) > 0


# ---- what has no graphs ---------------------------------------------------------------------------


class Reads(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = super().forward(x)
        return found if found["size"].max().item() > 0 else {}


class Counts(Net):
    calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return super().forward(x)


class Reassigns(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return super().forward(x - self.mean)


class OnHost(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(2.0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x * self.scale.cpu())


class Checkpoints(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        run = super().forward
        return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


def with_hook() -> Net:
    module = Net()
    module.first.register_forward_hook(lambda *_: None)
    return module


def with_weight_norm() -> Net:
    module = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(module.first)
    return module


@needs_graphs
@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (Reads, {}, "waits for numbers of the device"),
        (OnHost, {"device_ids": DEVICES[:1]}, "a tensor of the host"),
        (Counts, {}, "forward assigns attributes"),
        (Reassigns, {}, "forward assigns buffers"),
        (Checkpoints, {}, "activation checkpoint"),
        (with_hook, {}, "has hooks"),
        (Net, {"sync_batch_norm": True}, "batch norm sees the rows of all replicas"),
        (Net, {"device_ids": [DEVICES[0]] * 2}, "two replicas are on one device"),
        (Net, {"rescue": True}, "parts or rescue"),
        (lambda: torch.compile(Net(), backend="eager"), {}, "the module is compiled"),
        (with_weight_norm, {}, "made anew in each step"),
    ],
)
def test_what_cannot_be_captured_runs_without(
    make: Callable[[], nn.Module], options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """N18: the numbers are the same, and the log says why, once."""
    assert assert_same_bits(lambda training: training.steps(7), make=make, **options) == 0
    said = [r.getMessage() for r in caplog.records if "run without graphs" in r.getMessage()]
    assert len(said) == 1
    assert reason in said[0]


def test_the_cpu_has_none(caplog: pytest.LogCaptureFixture) -> None:
    """N18"""
    for device_ids in (["cpu"], ["cpu"] * 2):
        model = DataParallel(nn.Linear(2, 2), device_ids, graphs=True)
        for _ in range(6):
            model(torch.ones(4, 2)).sum().backward()
    assert "graphs=True does nothing on cpu" in caplog.text
    assert "run without graphs, because the CPU has none" in caplog.text


@needs_graphs
def test_a_failure_in_forward_leaves_everything_as_it_was() -> None:
    """N18: before, while and after it is captured."""

    class Fails(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            found = super().forward(x)
            if fails:
                raise ValueError("as told")
            return found

    fails = False

    def run(training: Training) -> None:
        nonlocal fails
        for number in range(9):
            fails = number in (2, 4)  # the first one is without graphs; in the second one it would be captured
            state = {name: value.clone() for name, value in training.module.state_dict().items()}
            if not fails:
                training.step()
                continue
            with pytest.raises(ValueError, match="as told"):
                training.step()
            now = training.module.state_dict()
            assert all(torch.equal(value, now[name]) for name, value in state.items())

    assert_same_bits(run, make=Fails)


@needs_graphs
def test_batches_without_rows() -> None:
    """Their gradients may have no memory."""
    model = DataParallel(
        Calls(lambda net, x: net.layer(x).bfloat16(), layer=nn.Linear(5, 3)).to(DEVICES[0]), DEVICES[:1]
    )
    model.graphs = True
    for _ in range(2 * NUM_FIRST):
        model(torch.randn(0, 5, device=DEVICES[0])).float().sum().backward()
    assert CountedGraph.num_launches
    assert not model.module.layer.weight.grad.any()


@needs_graphs
def test_derivatives_of_a_higher_order() -> None:
    """N18: seen in the first steps, there are no graphs; later it is an error."""
    training = Training(graphs=True)
    training.steps(7)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        training.forward().backward(create_graph=True)


@needs_graphs
def test_what_backward_reads_may_not_be_written_before_it() -> None:
    """N18, R8"""

    class Scales(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(5))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            self.scale.mul_(2)
            return super().forward(self.first.weight[0] * self.scale * x)

    training = Training(graphs=True, make=Scales)
    training.steps(6)
    loss = training.forward()
    training.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for _ in range(6):  # until both forwards have graphs
        loss, later = training.forward(), training.forward()
        later.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@needs_graphs
def test_a_gradient_between_outputs_is_an_error() -> None:
    """N18, N1"""

    class Both(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            output = super().forward(x)
            return output.square().mean(1), output

    model = DataParallel(Both(3, 2).to(DEVICES[0]), DEVICES, graphs=True)
    before = CountedGraph.num_launches
    for _ in range(7):
        loss, output = model(torch.ones(6, 3, device=DEVICES[0]))
        loss.sum().backward()
    assert CountedGraph.num_launches > before
    loss, output = model(torch.ones(6, 3, device=DEVICES[0]))
    output.retain_grad()
    with pytest.raises(RuntimeError, match="replicas run as graphs of kernels"):
        loss.sum().backward()


@needs_graphs
def test_memory_is_given_back() -> None:
    """N18: with the model, and when graphs are switched off."""

    def allocated() -> int:
        gc.collect()
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        return sum([torch.accelerator.memory_allocated(device) for device in DEVICES])

    before = allocated()
    training = Training(graphs=True)
    training.steps(7)
    with_graphs = allocated()
    training.model.graphs = False
    training.steps(2)
    assert before < allocated() < with_graphs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del training
        assert allocated() == before


@needs_graphs
def test_only_the_first_kinds_of_inputs_have_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """N18"""
    training = Training(graphs=True)
    for _ in range(6):
        for rows in (8, 10, 12, 14):
            training.step(rows)
    assert [r.getMessage() for r in caplog.records if "3 kinds of inputs of Net have graphs" in r.getMessage()]
