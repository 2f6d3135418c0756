"""The processes engine: what it does beyond the contract of all engines (tests/contract).

The rows named in the docstrings are those of docs/behaviour.md. All of its last table, 'Engine "processes"', is here,
except batched gradients and buffers, which are in the contract.
"""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from helpers.deaths import workers_of
from helpers.in_time import in_time
from helpers.modules import Calls, UsesGlobal
from helpers.programs import have_ended, run_script, until
from unisono import DataParallel
from unisono.engines import replica
from unisono.engines.processes import fork_server, module_sync, worker, worker_group
from unisono.engines.processes.channel import _HEADER, Channel
from unisono.engines.processes.engine import Processes
from unisono.engines.processes.module_sync import ModuleSync
from unisono.runtime import affinity
from unisono.runtime.buckets import fingerprint
from unisono.runtime.errors import log_once

WAIT_S = 60.0
# How parameters and gradients travel: as on the CPU, or as on GPUs. For tests in which they do.
both_transports = pytest.mark.parametrize("transport", ["shared memory", "gloo"])


@pytest.fixture
def transport() -> str:
    return "shared memory"


@pytest.fixture
def wrap(wrap: Callable[..., DataParallel], transport: str) -> Callable[..., DataParallel]:
    """Wrap a module for some CPU replicas on the processes engine; close it after the test."""
    return lambda *args, **options: wrap(*args, engine=Processes(share_memory=transport != "gloo"), **options)


def interrupt_next(
    monkeypatch: pytest.MonkeyPatch, method: str, instead: Callable[..., None] = lambda channel, *args: None
) -> None:
    """Have the next call of a method of `Channel` do something else, then raise KeyboardInterrupt."""
    original = getattr(Channel, method)

    def interrupted(self: Channel, *args: Any) -> None:
        monkeypatch.setattr(Channel, method, original)
        instead(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Channel, method, interrupted)


def gradients(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the parameters' gradients after one backward."""
    module.zero_grad()
    module(*inputs).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def gradients_of_sum(module: nn.Module, losses: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch.autograd.grad(torch.stack([*losses]).sum(), [*module.parameters()])


class Returns(Calls):
    """Returns, for each row, what a function of this module and the inputs returns, called in the replica's process."""

    offset = 0.0

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__(function, weight=nn.Parameter(torch.ones(())), **attributes)

    def forward(self, *inputs: Any) -> torch.Tensor:
        return inputs[0] * 0 + self.weight * float(self.function(self, *inputs))


def returned(model: nn.Module, rows: int = 4) -> list[float]:
    """Return what the first and the last replica return."""
    output = model(torch.arange(float(rows)).view(rows, 1)).flatten().tolist()
    return [output[0], output[-1]]


def large() -> nn.Module:
    """Return a module with large gradients, which are summed in shared memory, and small ones."""
    return nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 200))


# ---- where replicas run, and what they share -----------------------------------------------------


def test_the_first_replica_runs_here_and_each_other_in_its_own_process(wrap):
    model = wrap(Returns(lambda module, x: os.getpid()), 3)
    output = model(torch.zeros(3, 1, dtype=torch.float64)).flatten().tolist()
    assert output == [os.getpid(), *workers_of(model)]
    assert len(set(output)) == 3


def test_parameters_exist_once_and_are_written_in_place(wrap):
    """Every process sees what an optimizer writes, and nothing is sent for it."""
    model = wrap(Returns(lambda module, x: 1))
    weight = model.module.weight
    assert returned(model) == [1.0, 1.0]
    address = weight.data_ptr()
    with torch.no_grad():
        weight.fill_(5.0)
    assert returned(model) == [5.0, 5.0]
    assert model.module.weight is weight
    assert weight.data_ptr() == address


@both_transports
def test_moving_parameters_keeps_ties_strides_and_identities(wrap):
    """R3, G7: views of one memory stay views of one memory."""
    flat, x = torch.randn(12), torch.randn(4, 2)
    a, b = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[3:9].view(3, 2).t())
    module = Calls(lambda module, x: x @ module.a + x @ module.b, a=a, b=b)
    expected, strides = module(x), module.b.stride()
    torch.testing.assert_close(wrap(module)(x), expected)
    assert module.b.stride() == strides
    with torch.no_grad():
        module.a.fill_(7.0)
    assert (module.b == 7.0).sum() == 3


@pytest.mark.parametrize("transport", ["gloo"])
def test_parameters_are_sent_when_they_have_changed(wrap, monkeypatch):
    """N7: by an optimizer, through `.data`, through another tensor; and not when nothing was written.

    Values are compared only where versions are unchanged. The first time there is nothing to compare with.
    """
    model = wrap(Returns(lambda module, x: 1, frozen=nn.Parameter(torch.ones(3), requires_grad=False)))
    returned(model)
    sync = model._engine._module_sync
    assert [len(each.bucket.items) for each in sync._buckets] == [1, 1], "frozen parameters have buckets of their own"
    sent, fingerprints, changed = [], [], sync._changed_parameters
    monkeypatch.setattr(sync, "_changed_parameters", lambda: sent.append(changed()) or sent[-1])
    monkeypatch.setattr(module_sync, "fingerprint", lambda flat: fingerprints.append(flat) or fingerprint(flat))
    as_optimizers = [lambda weight: weight.add_(1)] * 2
    unseen = [lambda weight: weight.data.add_(1), lambda weight: weight.data.view(1).add_(1)]
    for change in (id, id, *as_optimizers, id, *unseen, id):
        with torch.no_grad():
            change(model.module.weight)
        assert returned(model) == [model.module.weight.item()] * 2
    assert sent == [(0, 1), (), (0,), (0,), (0,), (0,), (0,), ()]
    assert len(fingerprints) == 2 * len(sent) - len(as_optimizers)


@both_transports
def test_a_parameter_with_an_alias_is_not_moved_away_from_it(wrap):
    """A flat buffer over all parameters, say, through which a user's optimizer writes."""
    module = nn.Linear(2, 1, bias=False)
    flat = module.weight.data.view(-1)
    model = wrap(module)
    for value in (1.0, 2.0):
        flat.fill_(value)
        assert model(torch.ones(4, 2)).tolist() == [[2 * value]] * 4


def test_state_dict_saves_no_more_than_the_tensors(wrap, tmp_path):
    model = wrap(nn.Sequential(nn.Linear(100, 100), nn.Linear(2, 1)))
    model.module.forward = model.module[0].forward
    model(torch.randn(4, 100))
    torch.save(model.module[1].state_dict(), tmp_path / "small")
    assert (tmp_path / "small").stat().st_size < 5000


@both_transports
@pytest.mark.parametrize("make", [lambda: nn.Linear(200, 3), large], ids=["small", "large"])
def test_outputs_and_gradients_that_the_caller_keeps_are_not_overwritten(wrap, transport, make):
    """N7: kept and accumulated gradients; the memory of large ones is reused once they are dropped."""
    module = make()
    model, plain = wrap(module), copy.deepcopy(module)
    batches = [torch.randn(6, 200, requires_grad=True) for _ in range(3)]

    def run(module: nn.Module) -> tuple[list[Any], ...]:
        outputs = [module(x) for x in batches]
        kept = [
            torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
            for x, y in zip(batches, outputs, strict=True)
        ]
        for x in batches:
            module(x).square().sum().backward()
        return [output.detach() for output in outputs], kept, [p.grad for p in module.parameters()]

    torch.testing.assert_close(run(model), run(plain))
    addresses = {gradients(model, batches[0])[0].data_ptr() for _ in range(3)}
    assert len(addresses) == 1 or transport == "gloo" or make is not large


def of_many_dtypes() -> nn.Module:
    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([sum((p * row).abs().square().sum().double() for p in module.tensors) for row in x])

    shapes = {torch.float32: (700_000,), torch.complex64: (10_000,), torch.bfloat16: (40_000,)}
    tensors = [torch.randn(shape, dtype=dtype) for dtype, shape in shapes.items()]
    return Calls(forward, tensors=nn.ParameterList([*tensors, torch.randn(300, 400, dtype=torch.float64).t()]))


@both_transports
@pytest.mark.parametrize("num_replicas", [2, 5])
def test_large_gradients_are_those_of_threads_bit_for_bit(wrap, transport, num_replicas):
    """N1, G7: summed in replica order; gloo sums in an order of its own."""
    module, x = of_many_dtypes(), torch.linspace(0.1, 2.0, 7)
    processes, threads = wrap(module, num_replicas), DataParallel(module, ["cpu"] * num_replicas)
    tolerance = {"rtol": 0, "atol": 0} if transport == "shared memory" else {}
    for _ in range(3):
        found, expected = gradients(processes, x), gradients(threads, x)
        torch.testing.assert_close(found, expected, **tolerance)
        assert [grad.stride() for grad in found] == [grad.stride() for grad in expected]


@both_transports
def test_large_gradients_that_some_replicas_have_not_or_have_twice(wrap):
    """N2; and reentrant checkpoints, where a leaf receives several contributions in one backward."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model.all(x) + checkpoint(model.all, torch.tanh(x), use_reentrant=True)
        return y + model.some(x) if x[0, 0] > 0 else y

    module = Calls(forward, **{name: nn.Linear(200, 200) for name in ("all", "some", "none")}).double()
    x = torch.randn(6, 200, dtype=torch.float64, requires_grad=True)
    model = wrap(module)
    for positive in ([0, 3], [3], []):
        with torch.no_grad():
            x[:, 0] = -1.0
            x[positive, 0] = 1.0
        plain = copy.deepcopy(module)
        for rows in x.split(3):
            plain(rows).sum().backward()
        model(x).sum().backward()
        for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
        model.zero_grad()


def test_a_first_backward_with_a_graph_is_followed_by_one_without(wrap):
    """N3: its message had the places of the workers' small gradients, and no worker kept them for the next backward."""
    module, x = nn.Linear(3, 2), torch.randn(5, 3)
    model = wrap(copy.deepcopy(module), 2)
    for create_graph in (True, False, False):
        expected = torch.autograd.grad(module(x).pow(2).sum(), [*module.parameters()])
        loss = model(x).pow(2).sum()
        if create_graph:
            found = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        else:
            model.zero_grad()
            loss.backward()
            found = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close([*found], [*expected])


def test_a_worker_without_rows_gets_the_updates_that_it_missed(wrap):
    """A smaller batch leaves the last worker idle."""
    model = wrap(Returns(lambda module, x: module.value, value=1.0), 3)
    model(torch.zeros(3, 1))
    model.module.value = 2.0
    model(torch.zeros(2, 1))
    assert model(torch.zeros(3, 1)).flatten().tolist() == [2.0, 2.0, 2.0]


@both_transports
def test_workers_that_are_added_leave_the_others_and_their_graphs_as_they_are(wrap):
    """F4, N7: forwards of more and more rows before one backward, which was `ReplicaDied` though none had died."""
    model = wrap(large(), 4)
    x = torch.randn(4, 200)

    def losses(module: nn.Module) -> Iterator[torch.Tensor]:
        for rows in (2, 3, 4, 2):
            yield module(x[:rows]).square().sum()

    of_model = losses(model)
    first, [pid] = next(of_model), workers_of(model)
    expected = gradients_of_sum(model.module, losses(model.module))
    torch.testing.assert_close(gradients_of_sum(model, [first, *of_model]), expected)
    assert workers_of(model)[0] == pid
    assert len(workers_of(model)) == 3


def test_a_worker_that_cannot_be_added(wrap, monkeypatch):
    """F4: none of those that were to be added is left; the others go on, and later they are added."""
    model, x = wrap(nn.Linear(3, 2), 4), torch.randn(4, 3)
    output, before = model(x[:2]), workers_of(model)
    forks = [fork_server.server.fork]

    def fork(*args: Any) -> Any:
        if not forks:
            raise BlockingIOError(11, "no further process")
        return forks.pop()(*args)

    with monkeypatch.context() as patch:
        patch.setattr(fork_server.server, "fork", fork)
        with pytest.raises(BlockingIOError, match="no further process"):
            model(x)
    assert workers_of(model) == before
    grads = [torch.autograd.grad(y.square().sum(), [*model.parameters()]) for y in (output, model.module(x[:2]))]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(model(x), model.module(x))
    assert workers_of(model)[:1] == before


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="binds to no cores")
def test_workers_share_the_cores_anew_when_some_are_added(wrap, monkeypatch):
    """A worker has the cores that it would have if all of them had been started together."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(affinity, "cores_per_replica", lambda parts: [(cores[parts % len(cores)],)] * parts)
    model = wrap(Returns(lambda module, x: min(os.sched_getaffinity(0))), 3)
    for rows in (2, 3):
        assert returned(model, rows)[1] == cores[rows % len(cores)]
    assert model(torch.zeros(3, 1)).flatten().tolist()[1:] == [cores[3 % len(cores)]] * 2


# ---- the last table of behaviour.md --------------------------------------------------------------


class Box:
    def __init__(self, value: float) -> None:
        self.value = value


def test_other_objects_arrive_as_copies(wrap):
    """S4"""

    def count(module: Any, x: torch.Tensor, box: Box) -> float:
        box.value += 1
        return box.value

    box = Box(1.0)
    assert wrap(Returns(count))(torch.zeros(2), box).tolist() == [2.0, 2.0]
    assert box.value == 2.0


def test_lists_and_hooks_of_a_worker_are_its_own(wrap, caplog):
    """R6, R9; said once."""
    model = wrap(nn.Linear(2, 2))
    seen: list[int] = []
    model.module.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    for _ in range(2):
        model(torch.zeros(5, 2))
    assert seen == [3, 3]
    assert caplog.text.count("they run in every worker on copies") == 1


@both_transports
def test_changes_that_are_seen(wrap):
    """R8: rebinding (to classes and modules too), flags, plain containers however deep, tensors written into."""

    def total(module: Any, x: torch.Tensor) -> float:
        return module.value + module.table["a"][0] + float(module.constant) + (100 if module.training else 0)

    def kind_and_library(module: Any, x: torch.Tensor) -> float:
        return module.kind("2") + len(module.library.__name__)

    module = Returns(total, value=1, table={"a": [10]}, constant=torch.zeros(1), kind=int, library=os.path)
    changes: list[tuple[Callable[[], Any], float]] = [
        (lambda: None, 111.0),
        (module.eval, 11.0),
        (lambda: setattr(module, "value", 2), 12.0),
        (lambda: module.table["a"].__setitem__(0, 20), 22.0),
        (lambda: module.constant.add_(3), 25.0),
        (lambda: setattr(module, "function", lambda module, x: -1), -1.0),
        (lambda: delattr(module, "value"), -1.0),
        (lambda: setattr(module, "function", lambda module, x: hasattr(module, "value")), 0.0),
        (lambda: setattr(module, "function", kind_and_library), 2.0 + len(os.path.__name__)),
        (lambda: (setattr(module, "kind", float), setattr(module, "library", textwrap)), 2.0 + len("textwrap")),
    ]
    model = wrap(module)
    for change, expected in changes:
        change()
        assert returned(model) == [expected] * 2
    module.weight.requires_grad_(False)
    assert not model(torch.zeros(4, 1)).requires_grad


def test_changes_that_need_refresh(wrap, monkeypatch):
    """R8: the inside of an object of another class, and a class attribute."""
    box = Box(1.0)
    model = wrap(Returns(lambda module, x: module.box.value + module.offset, box=box))
    assert returned(model) == [1.0, 1.0]
    for change in (lambda: setattr(box, "value", 2.0), lambda: monkeypatch.setattr(Returns, "offset", 3.0)):
        before = returned(model)[0]
        change()
        now = box.value + Returns.offset
        assert returned(model) == [now, before]
        model.refresh()
        assert returned(model) == [now, now]


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


def test_workers_start_in_the_programs_folder(wrap, tmp_path, monkeypatch):
    """A file that forward opens by a relative path is the plain module's.

    Workers had the folder in which the first ones were started. Once that was deleted, torch's compiler could not be
    imported in a worker: it asks for the folder.
    """

    def forward(module, x):
        return x * float(Path("factor").read_text())

    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "factor").write_text(name)
        monkeypatch.chdir(tmp_path / name)
        model = wrap(Calls(forward))
        assert model(torch.ones(4)).tolist() == [float(name)] * 4
        model.close()
    (tmp_path / "2" / "factor").unlink()
    (tmp_path / "2").rmdir()  # the program's own folder is gone
    assert wrap(Calls(lambda module, x: x * 3))(torch.ones(4)).tolist() == [3.0] * 4


def test_an_exception_in_a_worker_is_an_equal_one_here(wrap):
    """F1: type, arguments and attributes; as text if it cannot be pickled."""

    def fail(module: Any, x: torch.Tensor) -> float:
        if x[0] > 0 and module.awkward:
            raise AwkwardError(7, "as asked")
        if x[0] > 0:
            raise LockedError("the text", (line for line in ()))
        return 0.0

    model = wrap(Returns(fail, awkward=True))
    with pytest.raises(AwkwardError, match="7: as asked") as caught:
        returned(model)
    assert caught.value.code == 7
    assert caught.value.__notes__ == ["raised in replica 1 on cpu, rows 2 to 3 of 4"]
    assert caught.traceback[-1].name == "fail"
    model.module.awkward = False
    with pytest.raises(RuntimeError, match=r"LockedError: \('the text', <generator"):
        returned(model)


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2), Returns(max, numbers=(number for number in range(3)))),
            r"attribute '1\.numbers' \(generator\)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2))),
            r"module '1' \(RecursiveScriptModule\)",
        ),
        # What was compiled closes over the live module, and over torch's compiler.
        (lambda: torch.compile(nn.Linear(2, 2), backend="aot_eager"), "what torch.compile has made of it"),
        (
            lambda: (module := nn.Linear(2, 2)).compile(backend="aot_eager") or module,
            "what torch.compile has made of it",
        ),
    ],
    ids=["generator", "scripted", "torch.compile", "module.compile"],
)
def test_a_module_that_cannot_be_pickled_is_an_error_that_names_the_cause(wrap, make, culprit):
    """F6, R10, R13"""
    module = make()
    with pytest.raises(TypeError, match=rf"{culprit} cannot be pickled.*engine=\"threads\""):
        wrap(module)(torch.zeros(2, 2))


def test_an_overridden_verb_is_an_error_that_names_it(wrap):
    """A9"""
    model = wrap(nn.Linear(1, 1))
    model.scatter = lambda *args: args
    with pytest.raises(RuntimeError, match=r'DataParallel\.scatter is overridden, and engine="processes"'):
        model(torch.zeros(4, 1))


def test_warnings_and_log_messages_of_workers_are_given_here(wrap, caplog):
    """A message of the log once, however many workers and steps give it."""

    def forward(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] > 0:
            warnings.warn("from a worker", UserWarning, stacklevel=1)
            log_once("what a worker logs")
        return x

    model = wrap(Calls(forward), 3)
    for _ in range(2):
        with pytest.warns(UserWarning, match="from a worker"):
            model(torch.arange(6.0).view(6, 1))
    assert [record.getMessage() for record in caplog.records] == ["what a worker logs"]


@both_transports
@pytest.mark.parametrize("actor", [0, 1, 2])
def test_a_replica_that_raises_in_backward_while_others_wait_for_the_sum(wrap, actor):
    """F1: none waits for ever, and the next step is right. Deaths at such places are in test_replay.py."""

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("as asked")

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(module.first(x))
        if int(x[0, 0]) == module.actor:
            y.register_hook(fail)
        return module.second(y)

    model = wrap(Calls(forward, first=nn.Linear(200, 200), second=nn.Linear(200, 200), actor=actor), 3)
    x = torch.randn(6, 200)
    x[:, 0] = torch.arange(3.0).repeat_interleave(2)
    with pytest.raises(ValueError, match="as asked"):
        in_time(lambda: gradients(model, x))
    assert all(p.grad is None for p in model.parameters())
    model.module.actor = -1
    torch.testing.assert_close(gradients(model, x), gradients(model.module, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("broken", "transport"),
    [("_new_reducer", "shared memory"), ("_new_reducer", "gloo"), ("_process_groups_for", "gloo")],
)
def test_a_worker_that_fails_before_a_collective(wrap, broken):
    """F4: the others would wait for it for ever. Its exception is raised; the next forward starts other workers."""
    caller, model, x = os.getpid(), wrap(large(), 3), torch.randn(6, 200)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room for it")

    def break_worker(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if os.getpid() != caller:
            setattr(worker.Worker, broken, fail)

    hook = model.module.register_forward_pre_hook(break_worker)
    with torch.no_grad():
        model(x)
        first = workers_of(model)
        model.module[0].weight.add_(1.0)
    with pytest.raises(MemoryError, match="no room for it") as raised:
        gradients(model, x)
    assert any("on cpu, rows" in note for note in raised.value.__notes__)
    assert not workers_of(model)
    assert have_ended(first)
    assert all(p.grad is None for p in model.parameters())
    hook.remove()
    torch.testing.assert_close(gradients(model, x), gradients(copy.deepcopy(model.module), x), rtol=1e-4, atol=1e-4)


@both_transports
@pytest.mark.parametrize("num_sent", [0, 1])
def test_an_update_that_is_lost_because_an_input_cannot_be_sent_is_sent_later(wrap, num_sent):
    """R8: the change of an attribute, and of a parameter."""

    class Sendable:
        """An input that can be sent to the first `left` workers."""

        left = 0

        def __reduce__(self) -> Any:
            Sendable.left -= 1
            if Sendable.left < 0:
                raise TypeError("it stays here")
            return Sendable, ()

    model = wrap(Returns(lambda module, *inputs: module.factor, factor=1.0), 3)
    assert returned(model, 6) == [1.0, 1.0]
    model.module.factor = 2.0
    with torch.no_grad():
        model.module.weight.fill_(3.0)
    Sendable.left = num_sent
    with pytest.raises(TypeError, match="it stays here"):
        model(torch.arange(6.0).view(6, 1), Sendable())
    assert returned(model, 6) == [6.0, 6.0]


def fail_once(failed: Path) -> Path:
    """Unpickle what can be unpickled at the second attempt only."""
    if not failed.exists():
        failed.touch()
        raise OSError("not yet")
    return failed


class UnpickledAtTheSecondAttempt:
    def __init__(self, failed: Path) -> None:
        self.failed = failed

    def __reduce__(self) -> Any:
        return fail_once, (self.failed,)


@both_transports
@pytest.mark.parametrize("at", ["first", "later"])
def test_an_update_that_a_worker_could_not_take_is_sent_again(wrap, tmp_path, at):
    """R8, F8: the worker had no module, and the next forward failed with an AssertionError that said nothing."""
    model = wrap(Returns(lambda module, *inputs: module.factor, factor=1.0))
    if at == "later":
        assert returned(model) == [1.0, 1.0]
    model.module.unpickled_late, model.module.factor = UnpickledAtTheSecondAttempt(tmp_path / "failed"), 2.0
    with pytest.raises(OSError, match="not yet"):
        returned(model)
    assert returned(model) == [2.0, 2.0]


def test_a_global_of_an_imported_module_that_only_later_forwards_use(wrap):
    """N1: its gradient cannot reach the original. In forwards with other flags nothing was looked for any more."""
    model, x = wrap(UsesGlobal()), torch.randn(4, 3)
    for used in (False, True, False, False):
        model(x, used=used).sum().backward()
    with pytest.raises(RuntimeError, match=r"a replica used a tensor of shape \(3,\) that needs a gradient"):
        model(x, used=True)
    assert torch.equal(model(x), model.module(x))


def test_a_global_of_an_imported_module_that_only_some_rows_use(wrap):
    """N1: used by a worker's rows only, it had no gradient, step after step, without an error.

    Used by the first replica's only, it is in reach.
    """

    def use_by_rows(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module.inner(x, used=bool(x[0, 0] > 0))

    x = torch.tensor([0.0, 0.0, 1.0, 1.0]).reshape(4, 1).expand(4, 3)
    model = wrap(Calls(use_by_rows, inner=UsesGlobal()))
    model(x).sum().backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a replica used a tensor of shape \(3,\) that needs a gradient"):
            model(x)
    rows = x.flip(0)
    for _ in range(2):
        assert model(rows).requires_grad


def test_the_leaf_behind_a_tensor_in_an_object_is_no_global(wrap):
    """N1: it is in the first replica's graph in every forward, and gets its gradient from all replicas."""

    class Held:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    module = Calls(lambda module, x, held: module.linear(x) * held.tensor, linear=nn.Linear(3, 3))
    model, x, gradients = wrap(module), torch.randn(4, 3), []
    for each in (module, model):
        leaf = torch.ones(3, requires_grad=True)
        for _ in range(3):
            each(x, Held(leaf * 2)).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_a_function_that_is_differentiable_once(wrap):
    """R7, N1: defined here, it goes by value, and refers to a module of torch that cannot be imported by itself."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    model, gradients = wrap(Calls(lambda module, x: Doubled.apply(module.linear(x)), linear=nn.Linear(3, 3))), []
    x = torch.randn(4, 3)
    for module in (model, model.module):
        rows = x.clone().requires_grad_()
        module(rows).sum().backward()
        gradients.append(rows.grad)
    torch.testing.assert_close(*gradients)


# ---- the life of workers -------------------------------------------------------------------------


@both_transports
def test_a_worker_that_died_between_steps(wrap):
    """F4, and its graphs are gone with it."""
    model = wrap(nn.Linear(1, 1))
    x = torch.zeros(4, 1)
    output = model(x)
    (pid,) = workers_of(model)
    os.kill(pid, signal.SIGKILL)
    assert have_ended([pid])
    with pytest.raises(RuntimeError, match="its worker process"):
        model(x)
    with pytest.raises(RuntimeError, match="processes that ran this forward have ended"):
        output.sum().backward()
    model(x).sum().backward()


def test_workers_end_with_close_and_with_the_wrapper_and_a_later_forward_starts_others():
    model = DataParallel(nn.Linear(1, 1), ["cpu"] * 2, engine="processes")
    for _ in range(2):
        model(torch.zeros(4, 1)).sum().backward()
        workers = workers_of(model)
        model.close()
        assert have_ended(workers)
    model.close()
    model(torch.zeros(4, 1))
    workers = workers_of(model)
    del model
    assert have_ended(workers)


def test_a_graph_keeps_its_workers_when_the_wrapper_goes():
    x = torch.ones(4, 1, requires_grad=True)
    layer = nn.Linear(1, 1)
    DataParallel(layer, ["cpu"] * 2, engine="processes")(x).sum().backward()
    assert torch.equal(x.grad, layer.weight.detach().expand(4, 1))


def test_a_call_from_inside_a_step(wrap):
    """F5: from a hook of the first replica; it runs here, and its numbers are right."""
    model = wrap(nn.Linear(2, 2))
    inside: list[torch.Tensor] = []
    output = model(torch.ones(4, 2))
    output.register_hook(lambda grad: inside.append(model(torch.ones(4, 2))))
    output.sum().backward()
    torch.testing.assert_close(inside[0], output)


@both_transports
def test_a_forked_child_has_parameters_of_its_own(wrap):
    """F5: and may go on training, with workers of its own."""
    model = wrap(nn.Linear(20_000, 1))
    x = torch.ones(4, 20_000)
    with torch.no_grad():
        model(x)
        before = model.module.weight.clone()
    model(x).sum().backward()
    with torch.device("meta"):  # as a default accelerator: the host's memory is not on it
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


def test_a_forked_child_does_not_read_gradients_on_accelerators(monkeypatch):
    """F5: their addresses are not the host's; a DataLoader forks while `.grad` is set."""
    sync = ModuleSync.__new__(ModuleSync)
    leaf = torch.ones(3, requires_grad=True)
    leaf.grad = torch.ones(3)
    sync._in_shared_memory, sync.tensors = [], [leaf]
    monkeypatch.setattr(ModuleSync, "invalidate", lambda self: None)
    read = []
    monkeypatch.setattr("ctypes.memmove", lambda target, source, size: read.append(source))
    sync.leave_shared_memory()
    assert len(read) == 1
    monkeypatch.setattr("unisono.runtime.devices.is_cpu", lambda device: False)
    sync.leave_shared_memory()
    assert len(read) == 1


def test_ctrl_c_in_the_middle_of_a_message_ends_the_workers(wrap, monkeypatch):
    """F3: they would take the rest of it for the next one."""
    model, x = wrap(nn.Linear(3, 2)), torch.randn(4, 3)
    model(x)
    before = workers_of(model)

    def send_half(channel, body, fds=()):
        channel._socket.sendall(_HEADER.pack(len(body), False) + body[: len(body) // 2])

    interrupt_next(monkeypatch, "send", send_half)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    torch.testing.assert_close(model(x), model.module(x))
    assert set(workers_of(model)).isdisjoint(before)


def test_ctrl_c_while_the_fork_server_starts(monkeypatch, capfd):
    """F3: which takes seconds, in the first step of a program; it is ended, and prints nothing."""
    server, processes = fork_server.ForkServer(), []

    def send(channel, *args):
        channel.send(*args)
        processes.append(server._process)

    interrupt_next(monkeypatch, "send", send)
    with pytest.raises(KeyboardInterrupt):
        server.fork(seed=0, stack_fd=2)
    assert processes[0].returncode == -signal.SIGKILL, "it was waited for"
    assert capfd.readouterr().err == ""


def test_ctrl_c_while_workers_of_another_model_start(wrap, monkeypatch):
    """F3: the fork server is ended, and with it the workers of all models; idle ones are replaced."""
    model, other, x = wrap(nn.Linear(3, 2)), wrap(nn.Linear(3, 2)), torch.randn(4, 3)
    model(x)
    interrupt_next(monkeypatch, "receive")
    with pytest.raises(KeyboardInterrupt):
        other(x)
    for wrapped in (model, other):
        torch.testing.assert_close(wrapped(x), wrapped.module(x))


def test_ctrl_c_before_a_worker_group_has_workers(monkeypatch):
    """F3: there is nothing to end yet."""

    def interrupted(devices, share_memory):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_group, "_backend_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker_group.WorkerGroup([torch.device("cpu")] * 2)
    gc.collect()  # pytest reports an error in `__del__`


def test_a_fork_server_whose_caller_ends_before_the_reply(capfd):
    """F3: a program that is killed while its first workers start leaves no process and prints nothing."""
    server = fork_server.ForkServer()
    server._start()
    own, workers = Channel.pair()
    server._channel.send(pickle.dumps(("fork", dict(os.environ), os.getcwd(), 0)), [workers.fileno(), 1, 2, 2])
    for end in (own, workers, server._channel):
        end.close()
    assert server._process.wait(WAIT_S) == 0
    assert capfd.readouterr().err == ""


# ---- what torch and users do with modules --------------------------------------------------------


@both_transports
def test_replicas_that_are_stamped_anew_are_not_looked_at_anew(wrap, transport, monkeypatch):
    """R10: those of an RNN, whose attributes refer to its parameters: one search of the graph, one set of buckets."""
    searched: list[Any] = []
    search = replica.look_for_live_tensors
    monkeypatch.setattr(replica, "look_for_live_tensors", lambda *args: searched.append(1) or search(*args))
    model = wrap(nn.LSTM(5, 4, batch_first=True), 2, out_dims=(0, 1))
    leaves = []
    for _ in range(4):
        output, _ = model(torch.randn(6, 3, 5))
        output.sum().backward()
        leaves.append(model._engine._worker_group.transport._leaves)
    assert len(searched) == 1
    assert all(each is leaves[0] for each in leaves)


@both_transports
def test_a_parameter_replaced_by_an_equal_one_or_laid_out_anew_is_noticed(wrap):
    """R8: a parameter of one element is equal to another of that value; `.data =` leaves versions as they are."""
    linear, norm, factor = nn.Linear(3, 3), nn.BatchNorm1d(3).eval(), nn.Parameter(torch.tensor(1.0))
    forward = lambda module, x: module.norm(module.linear(x)) * module.factor  # noqa: E731
    module = Calls(forward, linear=linear, norm=norm, factor=factor)
    model, x = wrap(module), torch.randn(4, 3)
    changes = [
        lambda: None,
        lambda: setattr(module, "factor", nn.Parameter(torch.tensor(1.0))),
        lambda: setattr(linear.weight, "data", linear.weight.data.t()),
        lambda: setattr(norm.running_mean, "data", torch.ones(3)),
        lambda: norm.running_mean.data.fill_(3.0),  # as averages of weights and buffers do
    ]
    for change in changes:
        change()
        for _ in range(2):
            torch.testing.assert_close(model(x), module(x))
            torch.testing.assert_close(gradients(model, x), gradients(module, x))


def test_hooks_of_every_module_keep_all_replicas_here(wrap, caplog):
    """R9: workers do not have them."""
    model, x = wrap(nn.Linear(3, 2)), torch.randn(5, 3)
    expected = model.module(x)
    add_one = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output + 1 if isinstance(module, nn.Linear) else None
    )
    with add_one:
        torch.testing.assert_close(model(x), expected + 1)
    torch.testing.assert_close(model(x), expected)
    assert "hooks are registered for every module" in caplog.text


@both_transports
def test_memory_and_file_descriptors_of_what_was_replaced_are_freed(wrap):
    """N10: a module that is sent again and again leaves nothing behind, on either side."""
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


def test_a_deep_module(wrap):
    module: nn.Module = nn.Linear(3, 3)
    for _ in range(200):
        module = nn.Sequential(module)
    x = torch.randn(4, 3)
    torch.testing.assert_close(wrap(module)(x), module(x))


@both_transports
@pytest.mark.parametrize("used", [(0, 1, 1), (1, 1, 0)], ids=str)
def test_a_replica_that_waits_for_sums_does_not_block_a_batch_norm(wrap, used):
    """N5: a replica that has finished its backward waits for the sums; another may wait for it at a batch norm."""

    def forward(model: nn.Module, x: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        y = model.large(x)
        normalised = model.norm(y)
        return normalised.relu() if used.any() else y

    some_use_their_norm = Calls(forward, large=nn.Linear(200, 200), norm=nn.BatchNorm1d(200))
    model = wrap(some_use_their_norm, 3, sync_batch_norm=True)
    x = torch.randn(6, 200)
    for _ in range(2):
        output = model(x, torch.tensor(used).repeat_interleave(2))
        with pytest.raises(RuntimeError, match="the replicas went different ways"):
            in_time(lambda output=output: output.square().sum().backward())
        assert model.module.large.weight.grad is None
        in_time(lambda: model(x, torch.ones(6)).square().sum().backward())
        assert model.module.large.weight.grad.isfinite().all()
        model.zero_grad()


# ---- sockets, launchers, process groups ----------------------------------------------------------


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Return the addresses and ports at which processes listen."""
    connections = [c for pid in pids for c in psutil.Process(pid).net_connections("inet")]
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@both_transports
def test_no_socket_listens_but_those_of_gloo_on_the_loopback_device(wrap, transport):
    """In the caller's process, its workers and the fork server; and the caller's are closed with the model."""
    before = listeners([os.getpid()])
    model = wrap(large(), 3)
    model(torch.randn(6, 200)).sum().backward()
    found = listeners([os.getpid(), *workers_of(model), fork_server.server._process.pid]) - before
    assert {address for address, _ in found} == (set() if transport == "shared memory" else {"127.0.0.1"})
    assert bool(found) == (transport == "gloo"), "the search finds listeners where there are some"
    model.close()
    gc.collect()
    assert until(lambda: listeners([os.getpid()]) <= before)


@both_transports
def test_workers_have_no_rank_in_a_launchers_job(wrap, monkeypatch):
    """And the engine neither needs nor makes a default process group."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OF_THE_USER"]
    for name in names:
        monkeypatch.setenv(name, "7")

    def in_a_job(module: Any, x: torch.Tensor) -> float:
        return float(len(os.environ.keys() & set(names)) + 10 * torch.distributed.is_initialized())

    model = wrap(Returns(in_a_job), process_group=False)
    assert returned(model) == [7.0, 1.0]
    model(torch.randn(4, 1)).sum().backward()
    assert not torch.distributed.is_initialized()


@both_transports
def test_the_users_default_process_group_is_left_alone(wrap):
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


def test_a_fork_does_not_wait_for_threads_that_its_child_lacks():
    """F5: as a DataLoader forks its workers. OpenMP's threads, which copy large tensors, are not forked with it."""
    script = """
        import os, signal
        os.register_at_fork(after_in_child=lambda: signal.alarm(60))
        import torch
        import unisono
        torch.set_num_threads(2)
        model = unisono.DataParallel(torch.nn.Linear(1000, 1000), ["cpu"] * 2, engine="processes")
        model(torch.zeros(4, 1000)).sum().backward()
        model.module.weight.detach().mul_(2)
        before = model.module.weight.flatten()[:5].tolist()
        pid = os.fork()
        if not pid:
            os._exit(0 if model.module.weight.flatten()[:5].tolist() == before else 1)
        print(os.waitpid(pid, 0)[1])
        """
    done = run_script(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


@pytest.mark.parametrize(("options", "ran"), [(["-I"], ""), (["-W", "error"], "xx")])
def test_workers_are_started_with_the_interpreters_options(tmp_path, options, ran):
    """F9: with `-I` no sitecustomize that a folder of PYTHONPATH has runs, in the fork server neither.

    Where warnings are errors, workers end in silence, too.
    """
    (tmp_path / "sitecustomize.py").write_text(
        f"with open({str(tmp_path / 'ran')!r}, 'a') as file:\n    file.write('x')\n"
    )
    (tmp_path / "ran").touch()
    script = """
        import sys, torch, unisono

        class Flags(torch.nn.Module):
            def forward(self, x):
                return x * 0 + sys.flags.isolated

        print(unisono.DataParallel(Flags(), ["cpu"] * 2, engine="processes")(torch.ones(2)).tolist())
        """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, *options, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    isolated = float("-I" in options)
    assert (done.stdout, done.stderr, done.returncode) == (f"{[isolated] * 2}\n", "", 0)
    assert (tmp_path / "ran").read_text() == ran


def test_a_script_on_standard_input():
    """R7, F6: classes of `__main__`, and what they hold that pickle looks up by name: cached functions, also recursive
    ones, and properties; weak proxies; objects that replace modules.

    It runs once, without a `__main__` guard; two models at once; printed lines arrive whole.
    """
    script = """
        import functools, weakref, torch, unisono

        print("the script runs")

        settings, operators = torch.backends.cudnn, torch.ops.aten

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
                self.num_lines = 50

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
                assert torch.backends.cudnn is settings and torch.ops.aten is operators
                for i in range(self.num_lines):
                    print("replica", len(x), "says", i)
                return self.layers[0](x) * self.factor + self.positions(2) + fibonacci(7) + self.number(1)

        class Owner:
            pass

        owner = Owner()
        models = [unisono.DataParallel(Model(), ["cpu"] * 3, engine="processes") for _ in range(2)]
        x = torch.randn(6, 2)
        for step in range(2):
            for wrapped in models:
                wrapped(x).sum().backward()
        model = wrapped.module
        model.num_lines = 0
        torch.testing.assert_close(wrapped(x), model(x))
        grads = [torch.autograd.grad(each(x).square().sum(), model.layer.weight) for each in (wrapped, model)]
        torch.testing.assert_close(*grads)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-"],
        input=textwrap.dedent(script),
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        capture_output=True,
        text=True,
        timeout=WAIT_S * 2,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = ["the script runs", *[f"replica 2 says {i}" for i in range(50)] * 12]
    assert sorted(done.stdout.splitlines()) == sorted(lines)
