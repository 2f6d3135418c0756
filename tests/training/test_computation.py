"""What CUDA graphs need of the compiled functions, shown without a GPU."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from unisono import DataParallel
from unisono.training.computation import Computation

IMAGES = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(20) % 10
ROWS = 8


class Graph(NamedTuple):
    """A graph that torch.compile has made: what its inputs are, by their numbers."""

    inputs: set[int]
    static: set[int]
    changed: set[int]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """The forward graphs that have been compiled, in order."""
    made: list[Graph] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        about: Any = torch._guards.TracingContext.get().fw_metadata
        every = set(range(len(about.input_info)))
        made.append(Graph(every, set(about.static_input_indices), set(about.mutated_inp_runtime_indices)))
        return make_boxed_func(graph.forward)

    def only_run(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=only_run, inference_compiler=keep)
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda what, mode=None, **how: compile_it(what, backend=backend, **how))
    torch.compiler.reset()
    yield made
    torch.compiler.reset()


def small_module() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def computation_of(*, whole: bool) -> tuple[nn.Module, Computation]:
    torch.manual_seed(0)
    module = small_module()
    return module, Computation(DataParallel(module, ["cpu"]), module, autocast=False, whole=whole)


def take_step(computed: Computation, number: int) -> Tensor:
    computed.begin_step()
    rows = torch.randperm(len(LABELS), generator=torch.Generator().manual_seed(number))[:ROWS]
    loss = computed.training_loss(IMAGES, LABELS, rows, ROWS)
    loss.backward()
    computed.update(0.01 / (number + 1))
    return loss.detach().clone()


def test_a_step_can_be_captured(graphs: list[Graph]) -> None:
    """torch captures a graph only if all that it changes is static, and copies what is not.

    Nothing is copied but the gradients, and these are in the graphs' own memory. Each function is compiled once.
    """
    module, computed = computation_of(whole=True)
    changed = [*module.parameters(), *module.buffers(), *computed.momenta.values()]
    addresses = [tensor.data_ptr() for tensor in changed]
    for number in range(3):
        take_step(computed, number)
        assert all(parameter.grad is None for parameter in module.parameters())
    module.eval()
    with torch.no_grad():
        computed.test_totals(IMAGES, LABELS, torch.arange(ROWS))

    forward, update, test = graphs
    assert all(graph.changed <= graph.static for graph in graphs)
    num_parameters = len(computed.momenta)
    assert len(forward.changed) == len(list(module.buffers()))
    assert len(update.changed) == 2 * num_parameters
    assert not forward.inputs - forward.static
    assert len(update.inputs - update.static) == num_parameters
    assert not test.inputs - test.static
    assert [tensor.data_ptr() for tensor in changed] == addresses


def test_steps_are_those_of_torchs_sgd() -> None:
    """Bit for bit, the first one too: momenta begin with zeros here, and with the first gradient there."""
    ours, computed = computation_of(whole=False)
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(theirs.parameters(), momentum=0.9, weight_decay=5e-4)
    for number in range(4):
        for module in (ours, theirs):
            module.zero_grad()
            nn.functional.cross_entropy(module(IMAGES), LABELS).backward()
        optimizer.param_groups[0]["lr"] = rate = 0.1 / (number + 1)
        optimizer.step()
        computed.update(rate)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
