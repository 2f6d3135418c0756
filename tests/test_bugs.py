"""Bugs that were found by using the library, each with its story; every test failed when it was written."""

import copy
import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from helpers.modules import Calls, Composed, Fn
from helpers.programs import run_script
from unisono.autograd.live_gradients import Collector

TWO = ["cpu", "cpu"]


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.double().square().sum()


def grads_of(net: nn.Module, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the gradients that a backward through `model` leaves in `net`."""
    net.zero_grad()
    loss(model(x)).backward()
    return [parameter.grad for parameter in net.parameters()]


class AttributeDict(dict[str, Any]):
    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        self.__dict__ = self


@pytest.mark.filterwarnings("ignore:forward of")
def test_a_dict_whose_items_are_attributes() -> None:
    """S3, G3: `self.__dict__ = self`. A copied one had a `__dict__` of its own, with the whole batch in it, so every
    replica that read `batch.x` instead of `batch["x"]` computed everything."""

    def forward(net: nn.Module, batch: Any) -> Any:
        batch.extra = batch.x + 1
        return AttributeDict(y=net.linear(batch.x), z=batch["extra"])

    net, x = Calls(forward, linear=nn.Linear(4, 1)), torch.randn(8, 4)
    output = unisono.DataParallel(net, TWO)(AttributeDict(x=x))
    expected = net(AttributeDict(x=x))
    torch.testing.assert_close(output["y"], expected["y"])
    assert output.y is output["y"]
    torch.testing.assert_close(output.z, expected.z)
    output.w = 1
    assert output["w"] == 1


def test_an_attribute_that_is_such_a_dict() -> None:
    """R7: the same idiom, holding layers."""
    linear, x = nn.Linear(4, 1), torch.randn(8, 4)
    parts = AttributeDict(linear=linear)
    net = Calls(lambda net, x: net.parts.linear(x) + net.parts["linear"](x), linear=linear, parts=parts)
    torch.testing.assert_close(grads_of(net, unisono.DataParallel(net, TWO), x), grads_of(net, net, x))


def test_backward_inside_forward() -> None:
    """N1: the gradient stayed in the replicas' leaves, which nobody sees, and would have been counted again later."""

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss(net.linear(x)).backward()
        return net.linear(x)

    net, x = Calls(forward, linear=nn.Linear(4, 1)), torch.randn(7, 4)
    torch.testing.assert_close(grads_of(net, unisono.DataParallel(net, TWO), x), grads_of(net, net, x))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_parameter_that_is_not_the_modules() -> None:
    """N3: a global that forward uses. Its gradient came by a side route, which create_graph and autograd.grad miss."""
    outside = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    net = Calls(lambda net, x: net.linear(torch.tanh(x @ outside)), linear=nn.Linear(4, 1, dtype=torch.float64))
    x = torch.randn(7, 4, dtype=torch.float64)
    wrapped = unisono.DataParallel(net, TWO)
    for _ in range(2):
        first = [torch.autograd.grad(loss(model(x)), outside, create_graph=True)[0] for model in (net, wrapped)]
        torch.testing.assert_close(first[1], first[0])
        second = [torch.autograd.grad(loss(grad), [outside, net.linear.weight]) for grad in first]
        torch.testing.assert_close(second[1], second[0])
        assert outside.grad is None
    sums = []
    for model in (net, wrapped):
        outside.grad = None
        for _ in range(2):
            loss(model(x)).backward()
        sums.append(outside.grad)
    torch.testing.assert_close(sums[1], sums[0])


def test_an_output_added_to_its_own_input() -> None:
    """N10: `h += model(h)` made a cycle through the boundary, which kept h itself; no collector sees through it."""
    model = unisono.DataParallel(nn.ReLU(), TWO)
    before = nn.Linear(4, 4)
    gone: list[weakref.ref[torch.Tensor]] = []
    for _ in range(3):
        h = before(torch.randn(6, 4))
        h += model(h)
        gone.append(weakref.ref(h))
        del h
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_an_input_written_into_before_a_second_derivative() -> None:
    """N3: what the boundary is linked to is the input as it was."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    model = unisono.DataParallel(net, TWO)
    x = torch.randn(6, 4, dtype=torch.float64)
    results = []
    for write in (False, True):
        leaf = x.clone().requires_grad_()
        hidden = leaf * 2
        output = model(hidden)
        if write:
            hidden.mul_(3)
        (grad,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(loss(grad), leaf)[0])
    torch.testing.assert_close(results[1], results[0])


def test_a_failed_plain_composition_changes_no_buffer() -> None:
    """N11: the first replica had counted its batch already."""

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = net.norm(x)
        if x[0, 0] > 0:
            raise ValueError("this one fails")
        return output

    net = Calls(forward, norm=nn.BatchNorm1d(2))
    x = torch.tensor([[-1.0, 1.0], [-2.0, 2.0], [1.0, 1.0], [2.0, 2.0]])
    for call in (
        Composed(net, TWO, sync_batch_norm=False),
        lambda x: unisono.data_parallel(net, x, TWO, sync_batch_norm=False),
    ):
        with pytest.raises(ValueError, match="this one fails"):
            call(x)
        assert net.norm.num_batches_tracked == 0
        assert torch.equal(net.norm.running_mean, torch.zeros(2))


@pytest.mark.only_on("linux", "macos", because="os.kill sends a signal to its own process")
@pytest.mark.parametrize("seconds", [0.02, 0.2])
def test_ctrl_c_in_the_first_backward(seconds: float) -> None:
    """F3: narrated.

    1. the first backward of a process imports modules, in every worker at once
    2. Ctrl-C; the caller leaves; the workers were interrupted, one of them between two lines of Python's import lock
    3. that lock stayed locked, and every later backward waited for it, for ever

    The signal comes at several moments, as the moment decides.
    """
    done = run_script(f"""
        import os, signal, threading
        import torch, unisono
        model, x = unisono.DataParallel(torch.nn.Linear(4, 4), ["cpu"] * 3), torch.randn(6, 4)
        output = model(x).sum()
        timer = threading.Timer({seconds}, lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            timer.start()
            output.backward()
            timer.join()
            for _ in range(10**9):
                pass
        except KeyboardInterrupt:
            pass
        for _ in range(5):
            model(x).sum().backward()
        print("went on")
    """)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_several_replicas_shorten(kind: Any) -> None:
    """N9: `max_norm` writes into the weights inside forward. CPU replicas share these, and two that came at once both
    scaled a row that was too long, in about one call of ten."""
    torch.manual_seed(0)
    for _ in range(60):
        plain = kind(50, 64, max_norm=1.0).double()
        ours = copy.deepcopy(plain)
        x = torch.randint(0, 50, (64, 50))
        torch.testing.assert_close(unisono.DataParallel(ours, ["cpu"] * 4)(x), plain(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-12, atol=1e-12)


def test_a_single_functional_call_says_nothing_of_idle_devices(caplog: pytest.LogCaptureFixture) -> None:
    """S0: it had advised `shares="even"`, which the function does not have, also for a short last batch."""
    unisono.data_parallel(nn.Linear(5, 2), torch.zeros(5, 5), ["cpu"] * 4)
    assert caplog.messages == []


def test_the_plain_composition_knows_the_devices_of_calls_without_tensors(sim: list[torch.device]) -> None:
    """F1: the note had named the CPU, where no input is a tensor."""

    def fail(text: str) -> None:
        raise ValueError(text)

    with pytest.raises(ValueError, match="no tensor") as raised:
        unisono.data_parallel(Fn(fail), "no tensor", sim[:2])
    assert f"replica 0 on {sim[0]}" in raised.value.__notes__[0]


def test_gradients_are_on_their_way_while_another_thread_begins_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: a backward gives the replicas back before its gradients are with the live parameters. A forward in another
    thread took these replicas, and dropped the gradients: `.grad` stayed None, without an error."""
    net, x = nn.Linear(5, 3), torch.randn(6, 5)
    model = unisono.DataParallel(net, TWO)
    expected = grads_of(net, net, x)
    grads_of(net, model, x)  # whose replicas are kept
    add = Collector.add_of_boundary

    def add_and_lose_time(collector: Collector, *args: Any) -> None:
        add(collector, *args)
        other = threading.Thread(target=model, args=(x,))
        other.start()
        other.join()

    monkeypatch.setattr(Collector, "add_of_boundary", add_and_lose_time)
    torch.testing.assert_close(grads_of(net, model, x), expected)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_is_warned_of_once_is_not_repeated_by_steps(num_replicas: int) -> None:
    """R17: in Python 3.14 without the lock each step made Python forget which warnings it had shown."""
    model = unisono.DataParallel(nn.Linear(5, 3), ["cpu"] * num_replicas)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("once", stacklevel=1)
            model(torch.zeros(4, 5))
    assert [str(each.message) for each in seen] == ["once"]
