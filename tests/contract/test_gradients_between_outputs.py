"""Gradients of one output by another, hooks on outputs: the plain module's numbers, or an error that says why not."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.comparisons import assert_alike, assert_same, twins
from helpers.contract import Wrap, at_one_place, in_turn
from helpers.garbage import collected, wait_for_workers
from helpers.losses import fresh, loss_of, tensors_in
from helpers.modules import Calls, Composed
from helpers.programs import until

Call = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]


# ---- modules -------------------------------------------------------------------------------------


def pair(net: nn.Module, x: torch.Tensor) -> Tensors:
    hidden = net.a(x).tanh()
    return net.b(hidden).exp(), hidden


def chain(net: nn.Module, x: torch.Tensor) -> Tensors:
    """Three outputs, one behind the other, and a view; the first goes on from both others."""
    hidden = net.a(x).tanh()
    middle = net.b(hidden).sin()
    return net.c(middle) * hidden, hidden, middle, hidden[:, :2]


def of_checkpoints(net: nn.Module, x: torch.Tensor) -> Tensors:
    hidden = checkpoint(net.a, x, use_reentrant=False).tanh()
    return checkpoint(lambda hidden: net.b(hidden).exp(), hidden, use_reentrant=False), hidden


def with_hook_before(net: nn.Module, x: torch.Tensor) -> Tensors:
    before = net.a(x)
    before.register_hook(lambda gradient: gradient * 0.5)
    hidden = before.tanh()
    return net.b(hidden).exp(), hidden


def input_too(net: nn.Module, x: torch.Tensor) -> Tensors:
    return net.b(x).exp(), x


def retained_inside(net: nn.Module, x: torch.Tensor) -> Tensors:
    hidden = net.a(x).tanh()
    output = net.b(hidden).exp()
    for tensor in (output, hidden):
        tensor.retain_grad()
    return output, hidden


def leaf(net: nn.Module, x: torch.Tensor) -> Tensors:
    """Positions, as models of molecules make them for forces."""
    positions = x.detach().requires_grad_()
    return net.b(positions).exp(), positions


MODULES = {
    each.__name__: each for each in (pair, chain, of_checkpoints, with_hook_before, input_too, retained_inside, leaf)
}


def net(forward: Call) -> nn.Module:
    return Calls(forward, **{name: nn.Linear(3, 3) for name in "abc"})


# ---- what is asked for ---------------------------------------------------------------------------


def by_grad(output: Tensors, root: nn.Module) -> Any:
    return torch.autograd.grad(output[0].sum(), output[1])


def by_grad_with_parameters(output: Tensors, root: nn.Module) -> Any:
    return torch.autograd.grad(output[0].sum(), [output[1], *root.parameters()], allow_unused=True)


def batched(output: Tensors, root: nn.Module) -> Any:
    return torch.autograd.grad(output[0], output[1], torch.randn(4, *output[0].shape), is_grads_batched=True)


def by_retained(output: Tensors, root: nn.Module) -> Any:
    for tensor in output:
        tensor.retain_grad()
    loss = loss_of(output)
    loss.backward(retain_graph=True)
    loss.backward()
    return [tensor.grad for tensor in output]


def by_hook(output: Tensors, root: nn.Module) -> Any:
    """It sees the sum of all parts, once, and what it returns goes on."""
    seen: list[torch.Tensor] = []
    for tensor in output[1:]:
        tensor.register_hook(lambda gradient: [seen.append(gradient), gradient * -0.3][1])
    loss = loss_of(output)
    del output, tensor  # the hooks stay
    loss.backward()
    return seen


def by_hook_that_masks(output: Tensors, root: nn.Module) -> None:
    output[1].register_hook(torch.nan_to_num)
    (output[0] * torch.tensor(float("nan"))).sum().backward()
    for parameter in root.parameters():
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(nan=7.0)


def path_length(output: Tensors, root: nn.Module) -> Any:
    (slope,) = torch.autograd.grad(output[0].pow(2).sum(), output[1], create_graph=True)
    output[1].retain_grad()
    (output[0].sum() + (slope.norm(dim=1) - 1).pow(2).mean()).backward()
    return [slope.detach(), output[1].grad]


def curvature(output: Tensors, root: nn.Module) -> Any:
    (slope,) = torch.autograd.grad(output[0].pow(2).sum(), output[1], create_graph=True)
    (bend,) = torch.autograd.grad(slope.pow(2).sum(), output[1], create_graph=True)
    return torch.autograd.grad(bend.pow(2).sum(), [output[1], root.b.weight])


def penalty_on_parameters(output: Tensors, root: nn.Module) -> Any:
    slopes = torch.autograd.grad(output[0].sum(), root.b.parameters(), create_graph=True)
    return torch.autograd.grad(sum(slope.pow(2).sum() for slope in slopes), output[1])


def one_part_freed(output: Tensors, root: nn.Module) -> Any:
    """A backward as far as the other output leaves what is behind that."""
    found = torch.autograd.grad(output[0].sum(), output[1])
    output[1].sum().backward()
    return found


def other_part_freed(output: Tensors, root: nn.Module) -> Any:
    found = torch.autograd.grad(output[0].sum(), output[1])
    with pytest.raises(RuntimeError, match="second time"):
        output[0].sum().backward()
    root.zero_grad()  # of what the plain module has computed before the error
    return found


def all_freed(output: Tensors, root: nn.Module) -> None:
    output[0].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output[0].sum(), output[1])


ASKED = [by_grad, by_grad_with_parameters, batched, by_retained, by_hook, by_hook_that_masks]
ASKED += [path_length, curvature]
ASKED += [penalty_on_parameters, one_part_freed, other_part_freed, all_freed]


# The graphs of leaves that forward makes are kept: torch gives a gradient there a second time, too.
# Leaves of the plain module have no node.
NOT_ASKED = [("leaf", other_part_freed)]
CASES = [(name, asked) for name in MODULES for asked in ASKED if (name, asked) not in NOT_ASKED]


@pytest.mark.parametrize(("name", "asked"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_gradients_of_one_output_by_another(wrap: Wrap, name: str, asked: Call) -> None:
    """N1, N3: all outputs had one node, without a way between them: `torch.autograd.grad` said that the other one is
    not used, or returned None with `allow_unused=True`; hooks and `retain_grad` saw a part of the sum."""

    def steps(call: Call, root: nn.Module) -> Any:
        found = []
        for _ in range(3):  # ways are looked for in the first step of a structure
            x = fresh(torch.randn(7, 3))
            found += [asked(call(x), root), x.grad]
        return found

    assert_alike(wrap, net(MODULES[name]), steps, 3, 1e-10)


def test_outputs_in_containers_and_one_that_is_returned_twice(wrap: Wrap) -> None:
    """N1, N8: None only where the plain module has None; the same tensor is the same object."""

    def forward(net: nn.Module, x: torch.Tensor) -> Any:
        hidden, other = net.a(x).tanh(), net.c(x)
        left, right = other.split([1, 2], 1)
        views = [hidden.view(-1, 3, 1), hidden.detach()]
        return {"out": net.b(hidden), "hidden": hidden, "views": views, "again": hidden, "halves": (left, right)}

    def steps(call: Call, root: nn.Module) -> Any:
        output = call(torch.randn(7, 3))
        hidden, (left, right) = output["hidden"], output["halves"]
        assert output["again"] is hidden
        asked = [(output["out"], hidden), (output["views"][0], hidden), (output["out"], output["views"][0])]
        asked += [(output["out"], left), (left, right), (hidden, output["out"])]
        options: Any = {"allow_unused": True, "retain_graph": True}
        return [torch.autograd.grad(loss_of(of), by, **options) for of, by in asked]

    assert_alike(wrap, net(forward), steps, 3)


def test_ways_that_differ_between_forwards(wrap: Wrap) -> None:
    """N1: the ways of the first forward were taken for those of the second: None instead of a gradient."""

    def forward(net: nn.Module, x: torch.Tensor) -> Tensors:
        hidden = (x * 2).tanh()
        return net.b(hidden).exp(), hidden

    def asked(call: Call, root: nn.Module) -> Any:
        x = torch.randn(7, 3).requires_grad_()
        call(x.detach())  # as a gradient penalty of a discriminator is computed
        return by_grad(call(x), root)

    assert_alike(wrap, net(forward), asked, 3, 1e-10)


def test_an_output_that_one_replica_detaches(wrap: Wrap) -> None:
    """N1: torch said that a differentiated tensor does not require grad. Its rows have the gradient 0."""

    def forward(net: nn.Module, x: torch.Tensor) -> Tensors:
        hidden = net.a(x)
        hidden = hidden if float(x[0, 0]) == 0 else hidden.detach()
        return net.b(hidden), hidden

    model = wrap(net(forward))
    output, hidden = model(torch.arange(8.0)[:, None].expand(8, 3))
    hidden.retain_grad()
    output.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[0].abs().sum() > 0


@pytest.mark.parametrize("is_on_way", [False, True])
def test_hooks_of_outputs_without_a_gradient_are_not_called(wrap: Wrap, is_on_way: bool) -> None:
    """R9: they were called with None: TypeError in the user's hook."""

    def forward(net: nn.Module, x: torch.Tensor) -> Tensors:
        one, other = net.a(x), net.b(x)
        return (one, other, one.exp(), net.c(other)) if is_on_way else (one, other, one * 2, net.c(x).detach())

    def steps(call: Call, root: nn.Module) -> Any:
        seen: list[torch.Tensor] = []
        used, unused, of_used, of_unused = call(torch.randn(7, 3))
        for tensor in (unused, of_unused):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: [seen.append(gradient), gradient * 0.5][1])
                tensor.retain_grad()
        (used.sum() + of_used.sum()).backward()
        return [torch.tensor(len(seen)), unused.grad, of_unused.grad]

    assert_alike(wrap, net(forward), steps)


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("options", [{}, {"parts": 2}, {"scalars": "mean"}], ids=str)
def test_a_gradient_that_forward_retains(wrap: Wrap, options: dict[str, Any], *, composed: bool) -> None:
    """N1: the joined output is another tensor than the replicas': its `grad` was None."""

    def forward(net: nn.Module, x: torch.Tensor) -> Any:
        hidden = net.a(x).tanh()
        output = net.b(hidden).exp()
        found = output.mean() if "scalars" in options else output
        found.retain_grad()
        return {"found": [found]}

    def steps(call: Call, root: nn.Module) -> Any:
        (found,) = call(torch.randn(8, 3))["found"]
        found.pow(2).sum().backward()
        return [found.grad]

    def wrap_composed(module: nn.Module, num_replicas: int, **options: Any) -> Composed:
        return Composed(module, in_turn(num_replicas), **options)

    if composed and "parts" in options:
        return  # it runs shards whole
    assert_alike(wrap_composed if composed else wrap, net(forward), steps, 2, **options)


def test_reentrant_checkpoints_between_outputs(wrap: Wrap) -> None:
    """N1, R13: torch refuses them in `torch.autograd.grad`, and differentiates through them in `backward`; here they
    have the gradient both ways, but none of second order."""

    def forward(net: nn.Module, x: torch.Tensor) -> Tensors:
        hidden = net.a(x)
        return checkpoint(net.b, hidden, use_reentrant=True), hidden

    assert_alike(wrap, net(forward), lambda call, root: by_retained(call(torch.randn(7, 3)), root))
    model = wrap(net(forward))
    output, hidden = model(torch.randn(7, 3))
    (found,) = torch.autograd.grad(output.sum(), hidden, retain_graph=True)
    assert_same(found, model.module.b.weight.sum(0).expand(7, -1))
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad\(\)"):
        torch.autograd.grad(output.sum(), hidden, create_graph=True)


def test_in_several_forwards_and_a_wrapper_inside_the_module(wrap: Wrap) -> None:
    """N1, A10"""
    inner = Calls(lambda net, x: net.inner(net.a(x)), a=nn.Linear(3, 3), inner=net(chain))
    plain, model = twins(wrap, inner)
    model.module.inner = wrap(model.module.inner)
    x = torch.randn(7, 3)
    found = []
    for call, root in ((plain, plain.inner), (model, model.module.inner.module)):
        output = call(x)
        later = call(output[0])
        found.append([*torch.autograd.grad(later[0].sum(), [later[1], output[1], output[0], root.a.weight])])
        found[-1] += by_retained(call(x), root)
        found[-1] += [parameter.grad for parameter in root.parameters()]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "asked", [by_grad, by_retained, by_hook, path_length, curvature], ids=lambda each: each.__name__
)
def test_nothing_is_left(wrap: Wrap, collector_off: None, asked: Call) -> None:
    """N10: nodes that refer to outputs must not keep them, nor the graphs."""
    references: list[Any] = []

    def forward(net: nn.Module, x: torch.Tensor) -> Tensors:
        output = chain(net, x)
        references.extend(map(weakref.ref, output))
        return output

    model = wrap(net(forward))

    def step() -> None:
        output = model(torch.randn(7, 3))
        references.extend(map(weakref.ref, output))
        asked(output, model.module)
        model.zero_grad()

    for number in range(4):
        step()
        wait_for_workers()
        assert [reference for reference in references if reference() is not None] == []
        assert collected() == [] or number == 0  # what the first step sets up stays


def test_gradients_are_freed_where_a_hook_raises_between_levels(wrap: Wrap, collector_off: None) -> None:
    """N10: those that had come to the outputs above were kept until the graph was freed."""

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError

    output, hidden = wrap(net(pair))(torch.randn(7, 3))
    hidden.register_hook(fail)
    for _ in range(2):
        gradient = torch.ones_like(output)
        reference = weakref.ref(gradient)
        with pytest.raises(KeyError):
            torch.autograd.backward([output, hidden], [gradient, torch.ones_like(hidden)], retain_graph=True)
        del gradient
        assert until(lambda ref=reference: ref() is None)  # a device's thread may end its part later


WITHOUT = {
    "parts=": (lambda net, x: (*pair(net, x), net.c(x)), {"parts": 2}),  # the last one is on no way
    "out_dims=None": (lambda net, x: (x @ (table := net.a.weight * 2), table), {"out_dims": (0, None)}),
    "scalars=": (lambda net, x: ((mean := net.a(x).mean()) ** 2, mean), {"scalars": "mean"}),
    "forward itself has put a hook on": (
        lambda net, x: ((hidden := net.a(x)).register_hook(lambda gradient: gradient * 2), (hidden.exp(), hidden))[1],
        {},
    ),
}


@at_one_place
@pytest.mark.parametrize("asked", [by_grad, by_retained, by_hook], ids=lambda asked: asked.__name__)
@pytest.mark.parametrize("reason", WITHOUT)
def test_a_gradient_that_cannot_be_had_is_an_error(wrap: Wrap, reason: str, asked: Call) -> None:
    """N1: it names both outputs and the remedy. Without the question all is as before."""
    forward, options = WITHOUT[reason]
    model = wrap(net(forward), **options)
    output = model(torch.randn(8, 3))
    with pytest.raises(RuntimeError, match=rf"of output\[0\] by output\[1\] (?s:.*){reason}(?s:.*)Compute what needs"):
        asked(output, model.module)
    output = model(torch.randn(8, 3))
    torch.autograd.grad(loss_of(output), [model.module.a.weight], retain_graph=True)
    loss_of(output).backward()
    assert all(tensor.requires_grad for tensor in tensors_in(output))
