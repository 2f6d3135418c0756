"""The processes engine: what is its own affair, beside the contract of the engines in test_engines.py.

The rows named in the docstrings are those of docs/behaviour.md; each of its last table, 'Engine "processes"', is here.
"""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyhands import DataParallel
from manyhands.engines.processes import fork_server, worker, worker_group
from manyhands.engines.processes.channel import _HEADER, Channel
from manyhands.engines.processes.engine import ProcessesEngine
from manyhands.engines.processes.remote_exchange import packed

WAIT_S = 60.0
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=["shared memory", "gloo"])
def transport(request: pytest.FixtureRequest) -> str:
    """How parameters and gradients travel: as on the CPU, or as on GPUs."""
    return request.param


@pytest.fixture
def wrap(transport: str) -> Iterator[Callable[..., DataParallel]]:
    """Wrap a module for some CPU replicas on the processes engine; close it after the test."""
    made: list[DataParallel] = []

    def wrap(module: nn.Module, num_replicas: int = 2, **options: Any) -> DataParallel:
        model = DataParallel(module, ["cpu"] * num_replicas, engine="processes", **options)
        model._engine = ProcessesEngine(share_memory=transport == "shared memory")
        made.append(model)
        return model

    yield wrap
    for model in made:
        model.close()


def workers_of(model: DataParallel) -> list[int]:
    """Return the process ids of the workers that a model has."""
    engine = model._engine
    assert isinstance(engine, ProcessesEngine)
    return [member.pid for member in engine._worker_group.workers] if engine._worker_group is not None else []


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool]) -> bool:
    """Wait until a condition of other processes holds; return whether it does."""
    limit = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


class Says(nn.Module):
    """Returns, for each row, what a function of this module says; the function runs in the replica's process."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        return x * 0 + self.weight * float(self.function(self, x))


def said(model: nn.Module, rows: int = 4) -> list[float]:
    """Return what each of two replicas says."""
    output = model(torch.arange(float(rows)).view(rows, 1)).flatten().tolist()
    return [output[0], output[-1]]


# ---- what travels --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_values_that_are_brought_to_a_meeting_arrive_as_they_were(dtype):
    """Any strides, no entries, 0-dim; in containers, and able to be written into."""
    tensors = [torch.arange(6).to(dtype).view(2, 3).t(), torch.zeros(2, 0, dtype=dtype), torch.ones((), dtype=dtype)]
    value = pickle.loads(packed({"tensors": tensors, "count": 3}))
    assert value["count"] == 3
    for mine, theirs in zip(value["tensors"], tensors, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine, theirs)
        mine += 1


# ---- where replicas run, and what they share -----------------------------------------------------


def test_the_first_replica_runs_here_and_each_other_in_a_process_of_its_own(wrap):
    model = wrap(Says(lambda module, x: os.getpid()), 3)
    output = model(torch.zeros(3, 1, dtype=torch.float64)).flatten().tolist()
    assert output == [os.getpid(), *workers_of(model)]
    assert len(set(output)) == 3


def test_parameters_exist_once_and_are_written_in_place(wrap):
    """What an optimizer writes is seen by every process, and nothing is sent for it."""
    model = wrap(Says(lambda module, x: 1))
    weight = model.module.weight
    assert said(model) == [1.0, 1.0]
    address = weight.data_ptr()
    with torch.no_grad():
        weight.fill_(5.0)
    assert said(model) == [5.0, 5.0]
    assert model.module.weight is weight
    assert weight.data_ptr() == address


def test_moving_parameters_keeps_ties_strides_and_identities(wrap):
    """R3, G7: views of one memory stay views of one memory."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(12)
            self.a, self.b = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[3:9].view(3, 2).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.a + x @ self.b

    module = Tied()
    before, strides = [p.detach().clone() for p in (module.a, module.b)], module.b.stride()
    model = wrap(module)
    x = torch.randn(4, 2)
    torch.testing.assert_close(model(x), x @ before[0] + x @ before[1])
    assert module.b.stride() == strides
    with torch.no_grad():
        module.a.fill_(7.0)
    assert (module.b == 7.0).sum() == 3


def test_parameters_that_are_sent_are_sent_when_they_have_changed(wrap, transport):
    """N7: by an optimizer, by way of `.data`, through another tensor; and not when nothing was written."""
    if transport != "gloo":
        pytest.skip("they are not sent")
    model = wrap(Says(lambda module, x: 1, frozen=nn.Parameter(torch.ones(3), requires_grad=False)))
    said(model)
    known = model._engine._module_sync._buckets
    assert [len(each.bucket.items) for each in known] == [1, 1], "what is frozen travels apart"
    sent: list[list[int]] = []
    for change in (lambda w: None, lambda w: w.add_(1), lambda w: w.data.add_(1), lambda w: w.data.view(1).add_(1)):
        before = [id(each.fingerprint) for each in known]
        with torch.no_grad():
            change(model.module.weight)
        assert said(model) == [model.module.weight.item()] * 2
        sent.append([b for b, each in enumerate(known) if id(each.fingerprint) != before[b]])
    assert sent == [[], [0], [0], [0]]


def test_a_parameter_that_others_look_at_is_not_moved_from_under_them(wrap):
    """A flat buffer over all parameters, say, by way of which an optimizer of one's own writes."""
    module = nn.Linear(2, 1, bias=False)
    flat = module.weight.data.view(-1)
    model = wrap(module)
    x = torch.ones(4, 2)
    for value in (1.0, 2.0):
        flat.fill_(value)
        assert model(x).tolist() == [[2 * value]] * 4


def test_state_dict_saves_no_more_than_the_tensors(wrap, tmp_path):
    model = wrap(nn.Sequential(nn.Linear(100, 100), nn.Linear(2, 1)))
    model.module.forward = model.module[0].forward
    model(torch.randn(4, 100))
    torch.save(model.module[1].state_dict(), tmp_path / "small")
    assert (tmp_path / "small").stat().st_size < 5000


def test_accumulated_and_kept_gradients_and_outputs_are_not_written_over(wrap):
    """N7: what the caller keeps lies in no memory that is used again."""
    model = wrap(nn.Linear(5, 3))
    batches = [torch.randn(6, 5, requires_grad=True) for _ in range(3)]
    outputs = [model(x) for x in batches]
    held = [output.detach().clone() for output in outputs]
    kept = []
    for x, output in zip(batches, outputs, strict=True):
        kept.append(torch.autograd.grad(output.square().sum(), [x, *model.parameters()]))
    copies = [[grad.clone() for grad in grads] for grads in kept]
    for _ in range(3):
        model(torch.randn(6, 5)).sum().backward()
    torch.testing.assert_close([output.detach() for output in outputs], held, rtol=0, atol=0)
    torch.testing.assert_close(kept, [tuple(grads) for grads in copies], rtol=0, atol=0)
    for x, grads in zip(batches, kept, strict=True):
        torch.testing.assert_close(grads, torch.autograd.grad(model.module(x).square().sum(), [x, *model.parameters()]))


def large(num_inputs: int = 200) -> nn.Module:
    """Return a module with gradients that are summed in shared memory, beside small ones."""
    return nn.Sequential(nn.Linear(num_inputs, 300), nn.Tanh(), nn.Linear(300, 200))


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_large_gradients_are_those_of_threads_bit_for_bit(wrap, transport, num_replicas):
    """N1: summed in replica order; gloo sums in an order of its own."""
    module, x = large(), torch.randn(7, 200)
    grads = []
    for model in (wrap(module, num_replicas), DataParallel(module, ["cpu"] * num_replicas)):
        for _ in range(3):
            model.zero_grad()
            model(x).square().sum().backward()
        grads.append([p.grad for p in module.parameters()])
    tolerance = {"rtol": 0, "atol": 0} if transport == "shared memory" else {}
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def test_large_gradients_that_are_accumulated_and_kept(wrap, transport):
    """N7: as with small ones; and the memory is used again when they are not."""
    module = large()
    model, plain = wrap(module), copy.deepcopy(module)
    batches = [torch.randn(6, 200) for _ in range(3)]
    losses = [model(x).square().sum() for x in batches]
    kept = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    copies = [[grad.clone() for grad in grads] for grads in kept]
    for x in batches:
        for each in (model, plain):
            each(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])
    torch.testing.assert_close(kept, [tuple(grads) for grads in copies], rtol=0, atol=0)
    addresses = set()
    del kept
    for _ in range(3):
        model.zero_grad()
        model(batches[0]).square().sum().backward()
        addresses.add(module[0].weight.grad.data_ptr())
    assert len(addresses) == 1 or transport == "gloo"


def test_large_gradients_that_some_replicas_have_not_or_have_twice(wrap):
    """N2; and reentrant checkpoints, where a leaf receives several contributions in one backward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.some, self.none = (nn.Linear(200, 200) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.all(x) + checkpoint(self.all, torch.tanh(x), use_reentrant=True)
            return y + self.some(x) if x[0, 0] > 0 else y

    module, x = Model().double(), torch.randn(6, 200, dtype=torch.float64, requires_grad=True)
    for positive in ([0, 3], [3], []):
        with torch.no_grad():
            x[:, 0] = -1.0
            x[positive, 0] = 1.0
        plain, model = copy.deepcopy(module), wrap(module)
        for rows in x.split(3):
            plain(rows).sum().backward()
        model(x).sum().backward()
        for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
        model.zero_grad()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_replica_that_fails_while_others_wait_for_its_part(wrap, failing):
    """F1: in backward; nobody waits for it, and the next step works."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("as asked")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = large()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layers[0](x)
            return self.layers[1:](Fails.apply(first) if x[0, 0] == 7 else first)

    module, x = Model(), torch.zeros(3, 200)
    model = wrap(module, 3)
    x[failing] = 7.0
    with pytest.raises(ValueError, match="as asked"):
        model(x).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    x[failing] = 1.0
    model(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_smaller_batch_leaves_no_worker_behind(wrap):
    """A worker that sat out the batch before has missed what changed then."""
    model = wrap(Says(lambda module, x: module.value, value=1.0), 3)
    model(torch.zeros(3, 1))
    model.module.value = 2.0
    model(torch.zeros(2, 1))
    assert model(torch.zeros(3, 1)).flatten().tolist() == [2.0, 2.0, 2.0]


# ---- the last table of behaviour.md --------------------------------------------------------------


class Box:
    def __init__(self, value: float) -> None:
        self.value = value


def test_other_objects_arrive_as_copies(wrap):
    """S4"""

    class Counts(nn.Module):
        def forward(self, x: torch.Tensor, box: Box) -> torch.Tensor:
            box.value += 1
            return x + box.value

    box = Box(1.0)
    assert wrap(Counts())(torch.zeros(2), box).tolist() == [2.0, 2.0]
    assert box.value == 2.0


def test_buffers_are_a_workers_own_and_sent_again_when_either_side_has_changed_them(wrap):
    """R5"""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += len(x)
            return x + self.count

    model = wrap(Counter())
    assert model(torch.zeros(3)).tolist() == [2.0, 2.0, 1.0]
    assert model.module.count.item() == 2.0
    assert model(torch.zeros(3)).tolist() == [4.0, 4.0, 3.0]
    model.module.count.fill_(10.0)
    assert model(torch.zeros(3)).tolist() == [12.0, 12.0, 11.0]


def test_lists_and_hooks_of_a_worker_are_its_own(wrap, caplog):
    """R6, R9; said once."""
    model = wrap(nn.Linear(2, 2))
    seen: list[int] = []
    model.module.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    for _ in range(2):
        model(torch.zeros(5, 2))
    assert seen == [3, 3]
    assert caplog.text.count("they run in every worker on copies") == 1


def test_what_is_noticed(wrap):
    """R8: rebinding, flags, plain containers however deep, tensors written into, one value or many."""

    def say(module: Any, x: torch.Tensor) -> float:
        return module.value + module.table["a"][0] + float(module.constant) + (100 if module.training else 0)

    model = wrap(Says(say, value=1, table={"a": [10]}, constant=torch.zeros(1)))
    assert said(model) == [111.0] * 2
    model.eval()
    assert said(model) == [11.0] * 2
    model.module.value = 2
    assert said(model) == [12.0] * 2
    model.module.table["a"][0] = 20
    assert said(model) == [22.0] * 2
    model.module.constant += 3
    assert said(model) == [25.0] * 2
    model.module.weight.requires_grad_(False)
    assert not model(torch.zeros(4, 1)).requires_grad
    model.module.function = lambda module, x: -1
    assert said(model) == [-1.0] * 2
    del model.module.value
    model.module.function = lambda module, x: hasattr(module, "value")
    assert said(model) == [0.0] * 2


def test_what_cannot_be_seen_needs_refresh(wrap):
    """R8: here the inside of an object of another class."""
    model = wrap(Says(lambda module, x: module.box.value, box=Box(1.0)))
    assert said(model) == [1.0, 1.0]
    model.module.box.value = 2.0
    assert said(model) == [2.0, 1.0]
    model.refresh()
    assert said(model) == [2.0, 2.0]


def test_replicas_draw_from_streams_of_their_own_and_runs_repeat(wrap):
    """N6"""
    model = wrap(nn.Dropout(0.5), 3)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([model(torch.ones(3, 64)) for _ in range(3)])
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    rows = torch.cat(runs[0])
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


# ---- errors --------------------------------------------------------------------------------------


class AwkwardError(Exception):
    """Cannot be pickled in the ordinary way: its arguments are not those of its class."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class LockedError(Exception):
    """Cannot be pickled at all."""

    def __reduce__(self) -> Any:
        raise TypeError("no")


def raises(error: Callable[[], Exception]) -> Callable[..., float]:
    def function(module: Any, x: torch.Tensor) -> float:
        if x[0] > 0:
            raise error()
        return 0.0

    return function


def test_an_exception_in_a_worker_is_an_equal_one_here(wrap):
    """F1: type, arguments and attributes; the worker's traceback is in a note."""
    model = wrap(Says(raises(lambda: AwkwardError(7, "as asked"))))
    with pytest.raises(AwkwardError, match="7: as asked") as caught:
        said(model)
    assert caught.value.code == 7
    notes = "\n".join(caught.value.__notes__)
    assert "in the worker process:\nTraceback" in notes
    assert "in function" in notes
    assert "raised in replica 1 on cpu, rows 2 to 3 of 4" in notes
    model.module.function = lambda module, x: 1
    assert said(model) == [1.0, 1.0]


def test_an_exception_that_cannot_be_pickled_is_told(wrap):
    """F1"""

    def fail() -> Exception:
        error = LockedError("the text")
        error.args = ("the text", (line for line in ()))
        return error

    with pytest.raises(RuntimeError, match=r"LockedError: \('the text', <generator"):
        said(wrap(Says(raises(fail))))


def test_a_module_that_cannot_be_pickled_is_an_error_that_names_the_attribute(wrap):
    """F6"""
    module = nn.Sequential(nn.Linear(1, 1), Says(lambda module, x: 0))
    module[1].numbers = (number for number in range(3))
    with pytest.raises(TypeError, match=r"attribute '1\.numbers' \(generator\) cannot be pickled.*engine=\"threads\""):
        wrap(module)(torch.zeros(4, 1))


def test_an_overridden_verb_is_an_error_that_names_it(wrap):
    """A9"""
    model = wrap(nn.Linear(1, 1))
    model.scatter = lambda *args: args
    with pytest.raises(RuntimeError, match=r'DataParallel\.scatter is overridden, and engine="processes"'):
        model(torch.zeros(4, 1))


def test_batched_gradients_of_synchronised_batch_norm(wrap):
    """N5: an error in threads; here each process walks its graph once for each."""
    model = wrap(nn.BatchNorm1d(2).double(), sync_batch_norm=True)
    x, vectors = torch.randn(5, 2, dtype=torch.float64, requires_grad=True), torch.randn(3, 5, 2, dtype=torch.float64)
    mine, theirs = (
        torch.autograd.grad(module(x), x, vectors, is_grads_batched=True)[0]
        for module in (model, nn.BatchNorm1d(2).double())
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_what_is_said_in_a_worker_is_logged_here(wrap, caplog):
    """N5: of a batch norm to which the first replica does not come."""

    class Skips(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x[0, 0] == 0 else super().forward(x)

    model = wrap(Skips(1), 3, sync_batch_norm=True)
    for _ in range(2):
        model(torch.arange(6.0).view(6, 1))
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "the batch norm of running_mean saw the rows of some replicas only"
    ]


def test_a_graph_keeps_its_workers_when_the_wrapper_goes():
    x = torch.ones(4, 1, requires_grad=True)
    layer = nn.Linear(1, 1)
    DataParallel(layer, ["cpu"] * 2, engine="processes")(x).sum().backward()
    assert torch.equal(x.grad, layer.weight.detach().expand(4, 1))


def test_warnings_of_workers_are_given_here(wrap):
    def warns(module: Any, x: torch.Tensor) -> float:
        import warnings

        if x[0] > 0:
            warnings.warn("from a worker", UserWarning, stacklevel=1)
        return 0.0

    with pytest.warns(UserWarning, match="from a worker"):
        said(wrap(Says(warns)))


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_worker_that_is_killed_in_a_step(wrap, in_backward):
    """F4: says who and how; the next forward starts another."""

    class Dies(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            os.kill(os.getpid(), signal.SIGKILL)
            return grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dies = nn.Linear(1, 1), True
            self.large = nn.Parameter(torch.zeros(100_000))  # whose sum the others are waiting for

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x + self.large[:1])
            if self.dies and x[0] > 0:
                if not in_backward:
                    os.kill(os.getpid(), signal.SIGKILL)
                return Dies.apply(y)
            return y

    model = wrap(Model())
    x = torch.arange(4.0).view(4, 1)
    with pytest.raises(RuntimeError, match=r"replica 1 on cpu, rows 2 to 3 of 4: its worker process \d+ .*SIGKILL"):
        model(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model.module.dies = False
    model(x).sum().backward()
    assert model.module.layer.bias.grad.item() == 4.0


class BreaksItsWorker(nn.Module):
    """Makes a worker fail, once, before it does its part in what all replicas do together."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self.layers, self.broken, self.home = large(), broken, os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken and os.getpid() != self.home:

            def fails(*args: Any, **kwargs: Any) -> Any:
                raise MemoryError("no room for it")

            setattr(worker.Worker, self.broken, fails)
        return self.layers(x)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("broken", ["_new_reducer", "_process_groups_for"])
def test_a_worker_that_fails_before_it_does_its_part_keeps_nobody_waiting(wrap, transport, broken, num_replicas):
    """F4: where others would wait for it for ever. Its exception is raised; the next forward starts other workers."""
    if transport != "gloo" and broken == "_process_groups_for":
        pytest.skip("there are no groups")
    model = wrap(BreaksItsWorker(broken), num_replicas)
    x = torch.randn(6, 200)
    with torch.no_grad():
        model(x)
        first = workers_of(model)
        model.module.layers[0].weight.add_(1.0)
    with pytest.raises(MemoryError, match="no room for it") as raised:
        model(x).sum().backward()
    assert any("on cpu, rows" in note for note in raised.value.__notes__)
    assert not workers_of(model)
    assert until(lambda: not any(map(is_running, first)))
    assert all(p.grad is None for p in model.parameters())
    model.module.broken = ""
    model(x).sum().backward()
    expected = copy.deepcopy(model.module)
    expected.zero_grad()
    expected(x).sum().backward()
    for mine, theirs in zip(model.module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_in_sync", [0, 1])
def test_what_was_not_told_because_an_input_cannot_be_sent_is_told_later(wrap, num_in_sync):
    """R8: the change of an attribute, and of a parameter."""

    class Sendable:
        """An input that all but some of the workers can be sent."""

        left = 0

        def __reduce__(self) -> Any:
            Sendable.left -= 1
            if Sendable.left < 0:
                raise TypeError("it stays here")
            return Sendable, ()

    model = wrap(Says(lambda module, x: module.factor, factor=1.0), 3)
    assert said(model, 6) == [1.0, 1.0]
    model.module.factor = 2.0
    with torch.no_grad():
        model.module.weight.fill_(3.0)
    Sendable.left = num_in_sync
    with pytest.raises(TypeError, match="it stays here"):
        model(torch.arange(6.0).view(6, 1), Sendable())
    assert said(model, 6) == [6.0, 6.0]


class DiesBeforeItMeets(nn.Module):
    """A batch norm; before it, in forward or in backward, worker `number` ends the process whose id is `victim`.

    Numbers count rows: replica i is the one whose first number is i.
    """

    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
        self.in_backward, self.killer, self.victim = in_backward, -1, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kills = int(x[0]) == self.killer
        y = torch.tanh(self.first(x))
        if kills and not self.in_backward:
            self.kill()
        y = self.second(y)
        if kills and self.in_backward:
            y.register_hook(lambda grad: self.kill())
        return y

    def kill(self) -> None:
        os.kill(self.victim or os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("killer", "victim"), [(1, 1), (2, 2), (0, 1), (0, 2), (1, 2)])
def test_a_worker_that_is_killed_while_others_wait_at_a_batch_norm(wrap, in_backward, killer, victim):
    """F4, N5: or while it waits there itself; nobody waits for ever, and the next step is right."""
    model = wrap(DiesBeforeItMeets(in_backward), 3, sync_batch_norm=True)
    x = torch.arange(3.0).view(3, 1)
    model(x)
    state = model.module.state_dict()
    model.module.killer, model.module.victim = killer, workers_of(model)[victim - 1]
    with pytest.raises(RuntimeError, match=rf"replica {victim} on cpu, .*: its worker process \d+ .*SIGKILL"):
        model(x).pow(3).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model.module.killer = -1
    plain = DiesBeforeItMeets(in_backward)
    plain.load_state_dict(state)
    for module in (model, plain):
        module(x).pow(3).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_worker_that_died_between_steps(wrap):
    """F4, and its graphs are gone with it."""
    model = wrap(nn.Linear(1, 1))
    x = torch.zeros(4, 1)
    output = model(x)
    (pid,) = workers_of(model)
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not is_running(pid))
    with pytest.raises(RuntimeError, match="its worker process"):
        model(x)
    with pytest.raises(RuntimeError, match="processes that ran this forward have ended"):
        output.sum().backward()
    model(x).sum().backward()


def test_close_ends_the_workers_and_a_later_forward_starts_others(wrap):
    model = wrap(nn.Linear(1, 1))
    model(torch.zeros(4, 1))
    before = workers_of(model)
    model.close()
    assert until(lambda: not any(map(is_running, before)))
    model(torch.zeros(4, 1)).sum().backward()
    model.close()
    model.close()


def test_workers_go_with_the_wrapper():
    model = DataParallel(nn.Linear(1, 1), ["cpu"] * 2, engine="processes")
    model(torch.zeros(4, 1))
    before = workers_of(model)
    del model
    assert until(lambda: not any(map(is_running, before)))


def test_a_call_from_inside_a_step(wrap):
    """F5: from a hook of the first replica; it runs here, and its numbers are right."""
    model = wrap(nn.Linear(2, 2))
    inside: list[torch.Tensor] = []
    output = model(torch.ones(4, 2))
    output.register_hook(lambda grad: inside.append(model(torch.ones(4, 2))))
    output.sum().backward()
    torch.testing.assert_close(inside[0], output)


def test_a_forked_child_has_parameters_of_its_own(wrap):
    """F5: and may go on training, with workers of its own."""
    model = wrap(nn.Linear(20_000, 1))
    x = torch.ones(4, 20_000)
    with torch.no_grad():
        model(x)
        before = model.module.weight.clone()
    model(x).sum().backward()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            with torch.no_grad():
                model.module.weight.add_(1.0)
            model(x).sum().backward()
            status = 0 if model.module.bias.grad.item() == 8.0 and model.module.weight.grad[0, 0].item() == 8.0 else 2
            model.close()
            fork_server.server.end()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.equal(model.module.weight, before)
    assert torch.equal(model.module.weight.grad, torch.full((1, 20_000), 4.0))
    model(x).sum().backward()
    assert model.module.bias.grad.item() == 8.0


def test_what_is_replaced_by_an_equal_or_is_laid_out_anew_is_noticed(wrap):
    """R8: a parameter of one element is equal to another of that value; `.data =` leaves versions as they are."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    module.register_parameter("factor", nn.Parameter(torch.tensor(1.0)))
    module.forward = types.MethodType(_times_factor, module)
    model, x = wrap(module), torch.randn(4, 3)

    def replace_factor():
        module.factor = nn.Parameter(torch.tensor(1.0))

    def transpose():
        module[0].weight.data = module[0].weight.data.t()

    def replace_buffer():
        module[1].running_mean.data = torch.ones(3)

    for change in (lambda: None, replace_factor, transpose, replace_buffer):
        change()
        for _ in range(2):
            parameters = list(module.parameters())
            output, expected = model(x), module(x)
            torch.testing.assert_close(output, expected)
            expected = torch.autograd.grad(expected.pow(2).sum(), parameters)
            torch.testing.assert_close(torch.autograd.grad(output.pow(2).sum(), parameters), expected)


def _times_factor(self, x):
    return nn.Sequential.forward(self, x) * self.factor


def test_tensors_with_a_history_that_stand_for_parameters(wrap):
    """N3, N7: `functional_call` puts them there."""
    module, factor, x = nn.Linear(3, 2), torch.tensor(2.0, requires_grad=True), torch.randn(4, 3)
    model = nn.Sequential(wrap(module))
    for _ in range(2):
        results = []
        for called, prefix in ((nn.Sequential(module), "0."), (model, "0.module.")):
            weights = {prefix + name: parameter * factor for name, parameter in module.named_parameters()}
            output = torch.func.functional_call(called, weights, (x,))
            results.append(torch.autograd.grad(output.pow(2).sum(), [factor, *module.parameters()]))
        torch.testing.assert_close(results[1], results[0])


def test_ctrl_c_in_the_middle_of_a_message_ends_the_workers(wrap, monkeypatch):
    """F3: what they would read next is the rest of it."""
    model, x = wrap(nn.Linear(3, 2)), torch.randn(4, 3)
    model(x)
    before = workers_of(model)
    send = Channel.send

    def send_half(self, body, fds=()):
        monkeypatch.setattr(Channel, "send", send)
        self._socket.sendall(_HEADER.pack(len(body), False) + body[: len(body) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Channel, "send", send_half)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    torch.testing.assert_close(model(x), model.module(x))
    assert set(workers_of(model)).isdisjoint(before)


def test_ctrl_c_while_the_fork_server_starts(monkeypatch, capfd):
    """F3: that takes seconds, in the first step of a program, and nobody waits for them or reads of them."""
    server, sent, processes = fork_server.ForkServer(), Channel.send, []

    def send(self, body, fds=()):
        sent(self, body, fds)
        processes.append(server._process)
        raise KeyboardInterrupt

    monkeypatch.setattr(Channel, "send", send)
    with pytest.raises(KeyboardInterrupt):
        server.fork([0], seed=0)
    assert processes[0].returncode == -signal.SIGKILL, "it was waited for"
    assert capfd.readouterr().err == ""


def test_ctrl_c_while_workers_of_another_model_start(wrap, monkeypatch):
    """F3: the fork server is ended, and with it the workers of all models; those that were idle are replaced."""
    model, other, x = wrap(nn.Linear(3, 2)), wrap(nn.Linear(3, 2)), torch.randn(4, 3)
    model(x)
    receive = Channel.receive

    def interrupted(self):
        monkeypatch.setattr(Channel, "receive", receive)
        raise KeyboardInterrupt

    monkeypatch.setattr(Channel, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        other(x)
    for wrapped in (model, other):
        torch.testing.assert_close(wrapped(x), wrapped.module(x))


def test_a_fork_server_whose_caller_goes_before_the_answer(monkeypatch, capfd):
    """F3: a program that is killed while its first workers start leaves nothing, nor is there anything to read."""
    server = fork_server.ForkServer()
    server._start()
    own, workers = Channel.pair()
    server._channel.send(pickle.dumps(("fork", [], dict(os.environ), [0], 0)), [workers.fileno(), 1, 2])
    for end in (own, workers, server._channel):
        end.close()
    assert server._process.wait(WAIT_S) == 0
    assert capfd.readouterr().err == ""


def test_ctrl_c_before_a_team_has_workers(monkeypatch):
    """F3: what is not there yet is not ended."""

    def interrupted(devices, share_memory):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_group, "_transport_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker_group.WorkerGroup([torch.device("cpu")] * 2)
    gc.collect()  # an error in `__del__` would be noticed by pytest


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Return the addresses and ports at which processes listen."""
    connections = [c for pid in pids for c in psutil.Process(pid).net_connections("inet")]
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_no_socket_listens_but_on_the_loopback_device_where_gloo_has_to(wrap, transport):
    """In the caller's process, its workers and the fork server; and in the caller's none is left behind."""
    before = listeners([os.getpid()])
    model = wrap(large(), 3)
    model(torch.randn(6, 200)).sum().backward()
    found = listeners([os.getpid(), *workers_of(model), fork_server.server._process.pid]) - before
    assert {address for address, _ in found} == (set() if transport == "shared memory" else {"127.0.0.1"})
    assert bool(found) == (transport == "gloo"), "what is looked for would be found"
    model.close()
    gc.collect()
    assert until(lambda: listeners([os.getpid()]) <= before)


def test_workers_have_no_part_in_a_launchers_job(wrap, monkeypatch):
    """And a default process group, or the lack of one, is none of the engine's business."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OF_THE_USER"]
    for name in names:
        monkeypatch.setenv(name, "7")

    def in_a_job(module: Any, x: torch.Tensor) -> float:
        return float(len(os.environ.keys() & set(names)) + 10 * torch.distributed.is_initialized())

    model = wrap(Says(in_a_job), process_group=False)
    assert said(model) == [7.0, 1.0]
    model(torch.randn(4, 1)).sum().backward()
    assert not torch.distributed.is_initialized()


def test_the_default_process_group_is_left_alone(wrap):
    """One that the user has: his are not the engine's processes."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = wrap(nn.Linear(1, 1), 3)
        model(torch.ones(6, 1)).sum().backward()
        assert model.module.weight.grad.item() == 6.0
        assert torch.distributed.get_world_size() == 1
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total.item() == 1.0
    finally:
        torch.distributed.destroy_process_group()


def test_simulated_devices_are_refused(sim):
    with pytest.raises(ValueError, match="simulated devices exist in this process only"):
        DataParallel(nn.Linear(1, 1).to(sim[0]), sim[:2], engine="processes")


# ---- whole programs ------------------------------------------------------------------------------


def python(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )


def run(script: str, *arguments: str) -> tuple[int, str, str]:
    """Run a program that comes on standard input; return its status and what it wrote."""
    with python(*arguments) as process:
        out, err = process.communicate(textwrap.dedent(script), timeout=WAIT_S * 2)
    return process.returncode, out, err


def test_a_fork_does_not_wait_for_threads_that_its_child_lacks():
    """F5: as a DataLoader forks its workers. OpenMP's threads, which copy large tensors, are not forked with it."""
    script = """
        import os, signal
        os.register_at_fork(after_in_child=lambda: signal.alarm(60))
        import torch
        import manyhands
        torch.set_num_threads(2)
        model = manyhands.DataParallel(torch.nn.Linear(1000, 1000), ["cpu"] * 2, engine="processes")
        model(torch.zeros(4, 1000)).sum().backward()
        model.module.weight.detach().mul_(2)
        before = model.module.weight.flatten()[:5].tolist()
        pid = os.fork()
        if not pid:
            os._exit(0 if model.module.weight.flatten()[:5].tolist() == before else 1)
        print(os.waitpid(pid, 0)[1])
        """
    assert run(script) == (0, "0\n", "")


def test_a_script_on_standard_input_runs_once_and_listens_to_nothing():
    """No `__main__` guard; classes of `__main__`; two models at once; lines arrive whole; no socket listens."""
    status, out, err = run(
        """
        import os, torch, manyhands

        print("the script runs")

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 2)

            def forward(self, x):
                for i in range(50):
                    print("replica", len(x), "says", i)
                return self.layer(x)

        models = [manyhands.DataParallel(Model(), ["cpu"] * 3, engine="processes") for _ in range(2)]
        for step in range(2):
            for model in models:
                model(torch.zeros(6, 2)).sum().backward()
        listening = [line for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}") if line.split()[3] == "0A"]
        inodes = {line.split()[9] for line in listening}
        workers = [worker.pid for model in models for worker in model._engine._worker_group.workers]
        for pid in [os.getpid(), *workers]:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                except FileNotFoundError:
                    continue
                assert target.removeprefix("socket:[").rstrip("]") not in inodes, target
    """,
        "-",
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines.count("the script runs") == 1
    assert sorted(lines) == sorted(["the script runs", *[f"replica 2 says {i}" for i in range(50)] * 12])


def test_what_a_class_of_main_holds_that_pickle_looks_up_by_name():
    """R7: functions that keep their results, also recursive ones, and properties that do; and weak proxies."""
    script = """
        import functools, weakref, torch, manyhands

        @functools.cache
        def fibonacci(n):
            return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 2)
                self.layers = [weakref.proxy(self.layer)]
                self.gone = [weakref.proxy(torch.nn.Linear(2, 2))]
                self.owner = weakref.proxy(owner)

            @functools.cached_property
            def factor(self):
                return 2.0

            @functools.lru_cache(maxsize=3)
            def positions(self, n):
                return torch.arange(n)

            @staticmethod
            @functools.cache
            def number(n):
                return n + 1

            def forward(self, x):
                return self.layers[0](x) * self.factor + self.positions(2) + fibonacci(7) + self.number(1)

        class Owner:
            pass

        owner = Owner()
        model, x = Model(), torch.randn(4, 2)
        results = []
        for wrapped in (model, manyhands.DataParallel(model, ["cpu"] * 2, engine="processes")):
            model.zero_grad()
            output = wrapped(x)
            output.square().sum().backward()
            results.append([output, model.layer.weight.grad.clone()])
        torch.testing.assert_close(results[1], results[0])
    """
    assert run(script, "-") == (0, "", "")


def test_what_torch_puts_in_a_modules_place_goes_by_name():
    """F6: torch.backends.cudnn and its like are objects, which a class of `__main__` takes along."""
    script = """
        import torch, manyhands

        settings, operators = torch.backends.cudnn, torch.ops.aten

        class Model(torch.nn.Module):
            def forward(self, x):
                assert torch.backends.cudnn is settings and torch.ops.aten is operators
                return x * (1 + settings.enabled + torch.backends.mkldnn.is_available())

        model = manyhands.DataParallel(Model(), ["cpu"] * 2, engine="processes")
        x = torch.randn(4, 2)
        print(torch.equal(model(x), model.module(x)))
        """
    assert run(script) == (0, "True\n", "")


_WAITING = """
    import os, sys, time, torch, manyhands

    class Busy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            busy()
            return grad

    def busy():
        print("busy", flush=True)
        while True:
            torch.ones(1000).sum()

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(1)

        def forward(self, x):
            print(os.getpid(), flush=True)
            if int(x[0]) in BUSY:
                if not IN_BACKWARD:
                    busy()
                return Busy.apply(self.norm(x))
            return self.norm(x)

    model = manyhands.DataParallel(Slow(), ["cpu"] * 3, engine="processes", sync_batch_norm=True)
    model(torch.arange(3.0).view(3, 1)).pow(3).sum().backward()
"""


@pytest.mark.parametrize(
    ("busy", "in_backward", "how"),
    [
        pytest.param({0}, False, signal.SIGINT, id="workers wait in forward"),
        pytest.param({0}, True, signal.SIGKILL, id="workers wait in backward, SIGKILL"),
        pytest.param({1}, False, signal.SIGINT, id="the caller waits in forward"),
        pytest.param({1}, True, signal.SIGINT, id="the caller waits in backward"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_outlives_a_program_that_is_ended_at_a_batch_norm(busy, in_backward, how):
    """F3, N5: whoever waits there for whom."""
    script = textwrap.dedent(_WAITING).replace("BUSY", repr(busy)).replace("IN_BACKWARD", repr(in_backward))
    with python("-c", script) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(4)]
        pids = [int(line) for line in lines if line != "busy"]
        assert len(pids) == 3
        process.send_signal(how)
        process.communicate(timeout=WAIT_S)
    assert until(lambda: not any(map(is_running, pids)))
    assert process.returncode == -how


def test_scripted_modules_are_refused(wrap):
    """R10, F6"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated, and still in use
        scripted = torch.jit.script(nn.Linear(2, 2))
    model = wrap(nn.Sequential(nn.Linear(2, 2), scripted))
    with pytest.raises(TypeError, match=r"module '1' \(RecursiveScriptModule\) cannot be pickled.*engine=\"threads\""):
        model(torch.zeros(2, 2))


@pytest.mark.parametrize("compiled", [torch.compile, lambda module, **how: module.compile(**how) or module])
def test_compiled_modules_are_refused(wrap, compiled):
    """R13, F6: what was compiled closes over the live module, and over torch's compiler."""
    model = wrap(compiled(nn.Linear(2, 2), backend="aot_eager"))
    with pytest.raises(TypeError, match=r"what torch.compile has made of it cannot be pickled.*engine=\"threads\""):
        model(torch.zeros(2, 2))


def test_a_wrapper_that_is_compiled_itself(wrap):
    """R13: compiled after wrapping, the replicas are no part of what is compiled."""
    model, x = wrap(nn.Linear(2, 2)), torch.randn(5, 2)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model.module(x))


def test_hooks_of_every_module_keep_all_replicas_here(wrap, caplog):
    """R9: workers do not have them."""
    model, x = wrap(nn.Linear(3, 2)), torch.randn(5, 3)
    expected = model.module(x)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output + 1 if isinstance(module, nn.Linear) else None
    )
    try:
        torch.testing.assert_close(model(x), expected + 1)
    finally:
        handle.remove()
    torch.testing.assert_close(model(x), expected)
    assert "hooks are registered for every module" in caplog.text


def test_what_was_replaced_is_given_back(wrap):
    """N10: a module that is sent again and again leaves no memory and no file descriptors behind, on either side."""
    module = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200))
    model, x = wrap(module), torch.randn(4, 200)

    def step() -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        model(x).sum().backward()
        model.zero_grad()

    def open_files() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *workers_of(model))]

    for _ in range(3):
        step()
    before = open_files()
    for _ in range(5):
        step()
    assert open_files() == before


def test_the_first_forward_in_inference_mode(wrap):
    """R14: what is made then serves later steps too."""
    model, x = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()), torch.randn(6, 4)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), model.module(x))
    model.train()
    model(x).sum().backward()
    model.eval()
    torch.testing.assert_close(model(x), model.module(x))


def test_a_buffer_that_is_written_through_data(wrap):
    """R8: as averages of weights and buffers are."""
    model, x = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()), torch.randn(6, 4)
    for value in (0.0, 3.0):
        model.module[1].running_mean.data.fill_(value)
        torch.testing.assert_close(model(x), model.module(x))


def test_a_deep_module(wrap):
    module: nn.Module = nn.Linear(3, 3)
    for _ in range(200):
        module = nn.Sequential(module)
    x = torch.randn(4, 3)
    torch.testing.assert_close(wrap(module)(x), module(x))


class _Twice:
    def __call__(self, x):
        return x * 2


class _Thrice(_Twice):
    def __call__(self, x):
        return x * 3


class _UsesAClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.library = _Twice, os.path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kind()(x) + len(self.library.__name__)


def test_attributes_that_are_classes_and_modules_are_exchanged(wrap):
    """R8"""
    model, x = wrap(_UsesAClass()), torch.randn(4, 3)
    torch.testing.assert_close(model(x), model.module(x))
    model.module.kind, model.module.library = _Thrice, textwrap
    torch.testing.assert_close(model(x), model.module(x))


class _SomeNormalise(nn.Module):
    """A large layer for all replicas, and batch norm for those whose rows say so."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.norm = nn.Linear(200, 200), nn.BatchNorm1d(200)

    def forward(self, x: torch.Tensor, normalise: torch.Tensor) -> torch.Tensor:
        y = self.large(x)
        return self.norm(y).relu() if normalise.any() else y


@pytest.mark.parametrize("who", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 1)], ids=str)
def test_who_waits_for_sums_does_not_keep_others_from_meeting(wrap, who):
    """N5: a replica that has walked its graph waits for the sums; one that has not may wait for it at a batch norm."""
    model = wrap(_SomeNormalise(), 3, sync_batch_norm=True)
    x, normalise = torch.randn(6, 200), torch.tensor(who).repeat_interleave(2)
    for _ in range(3):
        model(x, normalise).square().sum().backward()
    assert model.module.large.weight.grad.isfinite().all()


_BUSY = """
    import os, sys, time, torch, manyhands

    class Slow(torch.nn.Module):
        def forward(self, x):
            print(os.getpid(), flush=True)
            while True:
                torch.ones(1000).sum()
            return x

    manyhands.DataParallel(Slow(), ["cpu"] * 3, engine="processes")(torch.zeros(3, 1))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_outlives_a_program_that_is_ended_in_a_step(how):
    """F3, F5: Ctrl-C returns promptly; after SIGKILL of the program everything goes with it."""
    with python("-c", textwrap.dedent(_BUSY)) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(3)]
        assert process.pid in pids
        process.send_signal(how)
        process.communicate(timeout=WAIT_S)
    assert until(lambda: not any(map(is_running, pids)))
    assert process.returncode in (-how, 1)
