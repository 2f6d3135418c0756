"""What forward finds as the parameters of its replica, and what it may do with them.

They are `nn.Parameter`s. Forward may read and differentiate them, freeze them for a while and copy them, with the plain
module's numbers. What would write into them once a replica, an optimizer's step too, is an error
(test_written_parameters.py).
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_alike, assert_unchanged, twins
from helpers.contract import Wrap, in_time
from helpers.losses import fresh, loss_of
from helpers.modules import Calls, mlp

# Forward reads `.grad` of a replica's parameters, which are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

Call = Callable[..., Any]
Forward = Callable[[Any, torch.Tensor], Any]


def layers(**attributes: Any) -> dict[str, Any]:
    return {"foot": nn.Linear(5, 6), "critic": mlp(6, 3), "shift": nn.Parameter(torch.randn(3)), **attributes}


def training(call: Call, root: Any) -> Any:
    """Two steps of an optimizer, and what each gives the input and the parameters; a loss may be in the output."""
    optimizer = torch.optim.SGD(root.parameters(), 1e-2)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(7, 5, requires_grad=True)
        output = call(x)
        losses = output if isinstance(output, tuple) else (output,)
        sum(loss_of(loss) if loss.dim() else loss for loss in losses).backward()
        found += [x.grad, *(None if p.grad is None else p.grad.clone() for p in root.parameters())]
        optimizer.step()
    return found


# ---- what they are -------------------------------------------------------------------------------


class Shift(nn.Parameter):
    pass


def looked_at(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Their class, names, forms, flags and sharing; no gradient is left of an earlier step."""
    named = dict(net.named_parameters())
    form = [(name, type(p), tuple(p.shape), p.dtype, p.requires_grad) for name, p in named.items()]
    assert form == net.form
    assert all(isinstance(p, nn.Parameter) and p.device == x.device for p in named.values())
    assert all(p.grad is None for p in named.values())
    assert [name for name, _ in net.named_parameters(remove_duplicate=False)] == net.names
    assert net.tail[0].weight is net.critic[0].weight
    assert net.tail[0].weight is net._modules["critic"][0]._parameters["weight"]
    assert len(list(net.parameters())) == len(net.form)
    assert list(net.state_dict()) == net.names
    y = net.critic(net.foot(x)) + net.tail(net.foot(x)).sum(1, keepdim=True)
    return y * torch.nn.utils.parameters_to_vector(net.parameters()).square().sum() + net.shift


def test_what_a_replicas_parameters_are(wrap: Wrap) -> None:
    """R1, R3, R4, R15: one of a class of the user's too, which shares no flat bucket."""
    tail = nn.Sequential(nn.Linear(6, 8))
    plain: Any = Calls(looked_at, **layers(tail=tail, shift=Shift(torch.randn(3))))
    tail[0].weight = plain.critic[0].weight
    plain.critic[2].bias.requires_grad_(False)
    plain.form = [(name, type(p), tuple(p.shape), p.dtype, p.requires_grad) for name, p in plain.named_parameters()]
    plain.names = [name for name, _ in plain.named_parameters(remove_duplicate=False)]

    def steps(call: Call, root: Any) -> Any:
        found = []
        for _ in range(3):  # kept replicas are as new
            root.zero_grad()
            loss_of(call(x := torch.randn(7, 5, requires_grad=True))).backward()
            found.append(x.grad)
        with torch.no_grad():
            root.zero_grad()
            found.append(call(torch.randn(7, 5)))
        return found

    # The factor is of the parameters alone: its gradients come from each replica.
    assert_alike(wrap, plain, steps, 3, 1e-10)


# ---- what forward does with them -----------------------------------------------------------------


def frozen_for_a_while(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer's parameters, as a generator's loss freezes its critic: the critic's gradient is of the second part."""
    hidden = torch.tanh(net.foot(x))
    net.critic.requires_grad_(False)
    assert not any(p.requires_grad for p in net.critic.parameters())
    assert all(p.requires_grad for p in net.foot.parameters())
    y = net.critic(hidden)
    net.critic.requires_grad_(True)
    assert all(p.requires_grad for p in net.parameters())
    return y * 3 + net.critic(hidden.detach()) + net.shift


def one_frozen_for_a_while(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Parameters of two layers, which nothing else of these is touched by."""
    weight, bias = net.critic[0].weight, net.critic[2].bias
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    y = net.critic(torch.tanh(net.foot(x)))
    assert (weight.requires_grad, bias.requires_grad) == (False, False)
    assert net.critic[0].weight is weight
    weight.requires_grad_(True)
    bias.requires_grad_(True)
    return y + net.critic(torch.cos(net.foot(x))) + net.shift


def all_frozen_to_differentiate(net: Any, x: torch.Tensor) -> torch.Tensor:
    """For a gradient inside that asks for no gradient of a parameter, and then on again for the output."""
    net.requires_grad_(False)
    point = x.detach().requires_grad_()
    energy = net.critic(torch.tanh(net.foot(point))).square().sum()
    (force,) = torch.autograd.grad(energy, point)
    net.requires_grad_(True)
    return net.critic(torch.tanh(net.foot(x + force))) + net.shift


def frozen_after_use(net: Any, x: torch.Tensor) -> torch.Tensor:
    """What has been computed before keeps its gradient."""
    y = net.critic(torch.tanh(net.foot(x)))
    net.critic.requires_grad_(False)
    y = y + net.critic(torch.cos(net.foot(x)))
    net.critic.requires_grad_(True)
    return y + net.shift


def frozen_and_a_backward(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A backward inside, of which the frozen ones get nothing."""
    net.critic.requires_grad_(False)
    loss = net.critic(torch.tanh(net.foot(x.detach()))).square().sum()
    loss.backward()
    assert all(p.grad is None for p in net.critic.parameters())
    assert all(p.grad is not None for p in net.foot.parameters())
    net.critic.requires_grad_(True)
    return net.critic(torch.tanh(net.foot(x))) + net.shift, loss.detach()


def frozen_at_the_end(net: Any, x: torch.Tensor) -> torch.Tensor:
    """What has been computed before gives them no gradient either."""
    hidden = torch.tanh(net.foot(x))
    y = net.critic(hidden) + (hidden @ net.critic[0].weight.T).sum(1, keepdim=True) + net.shift
    net.critic.requires_grad_(False)
    return y


def frozen_again_and_again(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Used as they are: the graph has saved the parameters themselves."""
    y, weight = torch.tanh(net.foot(x)), net.critic[0].weight
    for _ in range(20):
        weight.requires_grad_(False)
        y = y + torch.tanh(y @ weight.T @ weight)
        weight.requires_grad_(True)
        y = y + torch.tanh(y @ weight.T @ weight)
    return net.critic(y) + net.shift


def penalty_inside(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss of the parameters' gradients. It is linear in them, so that of all rows is the sum of the replicas'."""
    y = net.critic(torch.tanh(net.foot(x))) + net.shift
    grads = torch.autograd.grad(y.pow(3).sum(), list(net.parameters()), create_graph=True)
    weights = (torch.linspace(-1, 2, grad.numel()).view(grad.shape).to(grad) for grad in grads)
    return y, sum(((grad * weight).sum() for grad, weight in zip(grads, weights, strict=True)), y.new_zeros(()))


def grads_inside(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients without a history, of some parameters and of the input; nothing is accumulated."""
    y = net.critic(torch.tanh(net.foot(x))) + net.shift
    of = [net.critic[0].weight, net.shift, net.foot.bias]
    grads = torch.autograd.grad(y.pow(3).sum(), of, retain_graph=True)
    assert all(p.grad is None for p in net.parameters())
    return y, sum((grad.sum() for grad in grads), y.new_zeros(()))


def copied(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A copy has leaves of its own, which an optimizer may train; the replica's gradient has no part of it."""
    twin, whole = copy.deepcopy(net.critic), copy.deepcopy(net)
    assert [name for name, _ in whole.named_parameters()] == [name for name, _ in net.named_parameters()]
    for one in (twin, whole):
        assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in one.parameters())
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sum(p.square().sum() for p in twin.parameters()).backward()  # the same for any rows
        optimizer.step()
    assert all(p.grad is None for p in net.parameters())
    hidden = torch.tanh(net.foot(x))
    return net.critic(hidden) + twin(hidden) + net.shift * whole.shift


def used_as_values(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By `functional_call`, and by weights that are computed from them."""
    values = {name: p * 1.5 for name, p in net.critic.named_parameters()}
    y = torch.func.functional_call(net.critic, values, (torch.tanh(net.foot(x)),))
    return y + net.shift, (net.foot.weight.detach() * x.sum(0)).sum()


USES: dict[str, Forward] = {
    "frozen for a while": frozen_for_a_while,
    "one frozen for a while": one_frozen_for_a_while,
    "all frozen to differentiate": all_frozen_to_differentiate,
    "frozen after use": frozen_after_use,
    "frozen and a backward": frozen_and_a_backward,
    "frozen at the end": frozen_at_the_end,
    "frozen again and again": frozen_again_and_again,
    "penalty inside": penalty_inside,
    "gradients inside": grads_inside,
    "copied": copied,
    "used as values": used_as_values,
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("num_replicas", [3, 1])
def test_what_forward_does_with_them(wrap: Wrap, name: str, num_replicas: int) -> None:
    """R1, R4, R15, N1, N2, N3: the plain module's numbers."""
    assert_alike(wrap, Calls(USES[name], **layers()), training, num_replicas, 1e-10, scalars="sum")


SWITCHED: dict[str, list[str]] = {  # what each forward does; "backward" is one of all losses since the last
    "frozen, then used": ["freeze", "use", "backward"],
    "used, then frozen": ["use", "freeze", "backward"],
    "frozen, and a step later used": ["freeze", "backward", "use", "use", "backward"],
    "frozen, then trained": ["freeze", "train", "backward", "use", "backward"],
    "frozen, and a step later trained": ["freeze", "backward", "train", "backward", "freeze", "backward"],
    "frozen for a while": ["freeze and train", "use", "backward", "use", "backward"],
    "evaluated between": ["freeze", "evaluate", "train", "evaluate", "backward", "evaluate", "use", "backward"],
    "the caller trains it": ["freeze", "backward", "caller trains", "use", "backward", "freeze", "use", "backward"],
    "an error between": ["freeze", "fail", "use", "backward", "train", "fail", "use", "backward"],
}


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.parametrize("rescue", [False, True])
def test_a_flag_that_forward_switches_stays(wrap: Wrap, name: str, rescue: bool) -> None:
    """R4, R15: until forward or the caller switches it back. It ended with its forward: later ones gave a gradient."""

    def forward(net: Any, x: torch.Tensor, action: str) -> torch.Tensor:
        if action.startswith("freeze"):
            net.critic.requires_grad_(False)
        y = net.critic(torch.tanh(net.foot(x)))
        if action in ("train", "freeze and train"):
            net.critic.requires_grad_(True)
        if action == "fail":
            net.critic.requires_grad_(not net.critic[0].weight.requires_grad)
            raise ArithmeticError
        return y + net.critic(torch.cos(net.foot(x))) + net.shift

    def steps(call: Call, root: Any) -> list[torch.Tensor | None]:
        found, losses = [], []
        for action in SWITCHED[name]:
            if action == "backward":
                sum(losses).backward()
                found += [None if p.grad is None else p.grad.clone() for p in root.parameters()]
                losses.clear()
            elif action == "caller trains":
                root.critic.requires_grad_(True)
            elif action == "evaluate":
                with torch.no_grad():
                    found.append(call(torch.randn(7, 5), action))
            elif action == "fail":
                flags = [p.requires_grad for p in root.parameters()]
                with pytest.raises(ArithmeticError):
                    call(torch.randn(7, 5), action)
                if call is root:  # the wrapper's step that fails changes nothing
                    for parameter, flag in zip(root.parameters(), flags, strict=True):
                        parameter.requires_grad_(flag)
            else:
                losses.append(loss_of(call(torch.randn(7, 5), action)))
            found.append(torch.tensor([float(p.requires_grad) for p in root.parameters()]))
        return found

    assert_alike(wrap, Calls(forward, **layers()), steps, 3, 1e-10, rescue=rescue)


# ---- an optimizer that steps inside forward ------------------------------------------------------


@pytest.mark.parametrize("made", ["before wrapping", "inside forward"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_an_optimizer_that_steps_inside_forward_is_an_error(wrap: Wrap, made: str, kind: Any) -> None:
    """R15: replicas would step one after the other, each by the gradient of its rows. Nothing has been written, and
    a step of the caller's works afterwards."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = net.critic(torch.tanh(net.foot(x))) + net.shift
        if optimizers:
            inner = optimizers[0] if made == "before wrapping" else kind(net.parameters(), 0.1)
            y.square().sum().backward()
            inner.step()
        return y

    plain, model = twins(wrap, Calls(forward, **layers()), 2)
    optimizers: list[torch.optim.Optimizer] = []
    optimizer = kind(model.module.parameters(), 0.1)
    x = torch.randn(7, 5)
    for already in (False, True):  # whether the live parameters have gradients, with which a step would write
        if already:
            loss_of(model(x)).backward()
        optimizers = [optimizer]
        before = {name: value.clone() for name, value in model.module.state_dict().items()}
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)optimi[sz]") as caught:
            in_time(lambda: model(x))
        said = "\n".join([str(caught.value), *caught.value.__notes__])
        assert "Return the loss from forward" in said
        assert_unchanged(model.module, before)
        optimizers = []
    model.zero_grad()
    for module in (plain, model):
        loss_of(module(fresh(x))).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    optimizer.step()


def test_a_flag_that_forward_assigns(wrap: Wrap) -> None:
    """R15: torch refuses it for what is no leaf. The error says what to write."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.critic[0].weight.requires_grad = False
        return net.critic(x)

    model = wrap(Calls(forward, critic=mlp()), 3)
    with pytest.raises(RuntimeError, match="requires_grad flags") as caught:
        model(torch.randn(7, 5))
    assert "parameter.requires_grad_(False)" in "".join(caught.value.__notes__)
