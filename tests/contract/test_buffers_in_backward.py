"""Buffers that an activation checkpoint reads and writes when it runs forward again, in backward."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from helpers.comparisons import assert_alike, assert_all_same
from helpers.contract import ON_CPU, Wrap, over_places
from helpers.modules import Calls
from unisono import DataParallel

Call = Callable[..., torch.Tensor]


# ---- what forward does with the buffer -----------------------------------------------------------


def in_place(net: nn.Module, h: torch.Tensor) -> torch.Tensor:
    net.count.add_(1)
    return net.body(h) * (net.count + 1)


def reassigned(net: nn.Module, h: torch.Tensor) -> torch.Tensor:
    net.count = net.count + 1
    return net.body(h) * (net.count + 1)


def uncounted(net: nn.Module, h: torch.Tensor) -> torch.Tensor:
    """As `.data` and numpy write: no version counts it."""
    net.count.data.add_(1)
    return net.body(h) * (net.count + 1)


def uncounted_memory(net: nn.Module, h: torch.Tensor) -> torch.Tensor:
    net.count.data = net.count.data + 1
    return net.body(h) * (net.count + 1)


def only_read(net: nn.Module, h: torch.Tensor) -> torch.Tensor:
    """Forward changes it before the checkpoint."""
    return net.body(h) * (net.count + 1)


def before(forward: Call) -> Call:
    def run(net: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        if forward is only_read:
            net.count.add_(1)
        return checkpoint(lambda h: forward(net, h), net.foot(x), use_reentrant=reentrant)

    return run


def with_count(forward: Call) -> nn.Module:
    net = Calls(before(forward), foot=nn.Linear(3, 3), body=nn.Linear(3, 3))
    net.register_buffer("count", torch.zeros(()))
    return net


def spectral_norm() -> nn.Module:
    """It improves its estimate in each forward, and in each that a checkpoint runs again: slowly, here."""
    body = parametrizations.spectral_norm(nn.Linear(3, 3))
    with torch.no_grad():
        body.parametrizations.weight.original.copy_(torch.diag(torch.tensor([1.0, 0.9, 0.8])))
        body.parametrizations.weight[0]._u.fill_(3**-0.5)
    return Calls(before(lambda net, h: net.body(h)), foot=nn.Linear(3, 3), body=body)


def batch_norm() -> nn.Module:
    """In training it reads no running statistics."""
    body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    return Calls(before(lambda net, h: net.body(h)), foot=nn.Linear(3, 3), body=body)


FORWARDS = [in_place, reassigned, uncounted, uncounted_memory, only_read]
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{each.__name__: lambda each=each: with_count(each) for each in FORWARDS},
    "spectral norm": spectral_norm,
    "batch norm": batch_norm,
}


# ---- between forward and its backward ------------------------------------------------------------


def one_backward_of_three(call: Call, root: nn.Module, xs: list[torch.Tensor]) -> None:
    first, second, third = map(call, xs)
    (first.sum() + second.pow(2).sum() + third.exp().sum()).backward()


def each_in_turn(call: Call, root: nn.Module, xs: list[torch.Tensor]) -> None:
    for output in [call(x) for x in xs]:
        output.pow(2).sum().backward()


def a_forward_without_gradients(call: Call, root: nn.Module, xs: list[torch.Tensor]) -> None:
    output = call(xs[0])
    with torch.no_grad():
        call(xs[1])
    output.pow(2).sum().backward()


def the_module_itself(call: Call, root: nn.Module, xs: list[torch.Tensor]) -> None:
    output = call(xs[0])
    root(xs[1], False)
    output.pow(2).sum().backward()


def the_programs_write(call: Call, root: nn.Module, xs: list[torch.Tensor]) -> None:
    output = call(xs[0])
    root.load_state_dict({name: value + 0.5 for name, value in root.state_dict().items() if "count" in name}, False)
    output.pow(2).sum().backward()


def a_second_backward(call: Call, root: nn.Module, xs: list[torch.Tensor]) -> None:
    loss = call(xs[0]).pow(2).sum()
    loss.backward(retain_graph=True)
    call(xs[1])
    loss.backward()


def losses_in_another_order(call: Call, root: nn.Module, xs: list[torch.Tensor]) -> None:
    """One device goes through the last forward first, whatever the order of the losses."""
    first, second, third = map(call, xs)
    loss = second.sum() + third.pow(2).sum() + first.exp().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def backwards_in_another_order(call: Call, root: nn.Module, xs: list[torch.Tensor]) -> None:
    first, second, third = map(call, xs)
    (second.pow(2).sum() + first.pow(3).sum()).backward()
    third.pow(2).sum().backward()


BETWEEN = [one_backward_of_three, each_in_turn, a_forward_without_gradients, the_module_itself, the_programs_write]
BETWEEN += [a_second_backward, losses_in_another_order, backwards_in_another_order]


# Each with each, over both places; where there is one, all pairs.
CASES = [(between, name, reentrant) for between in BETWEEN for name in MODULES for reentrant in (False, True)]
HALVES = [CASES[::4] + CASES[3::4], CASES[1::4] + CASES[2::4]]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # torch's, without gradients
@over_places("between, name, reentrant", HALVES[0], separate=HALVES[1] if ON_CPU else [])
def test_a_checkpoint_reads_the_buffers_as_on_one_device(
    wrap: Wrap, between: Callable[..., None], name: str, reentrant: bool
) -> None:
    """R5, R13, N7: the gradient had 6 where one device has 8, in silence. Replicas but the first read the buffers as
    they were in their forward, and what a checkpoint reassigned in backward was lost."""

    def steps(call: Any, root: nn.Module) -> None:
        for _ in range(3):
            between(lambda x: call(x, reentrant), root, [torch.randn(7, 3) for _ in range(3)])

    options = {"sync_batch_norm": True} if name == "batch norm" else {}
    assert_alike(wrap, MODULES[name](), steps, 2, 1e-10, **options)


@pytest.mark.parametrize("name", ["in_place", "reassigned", "only_read"])
@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_where_the_first_device_has_no_rows(sim: list[torch.device], between: Callable[..., None], name: str) -> None:
    """R5, S2: a buffer that forward reassigned came to the second device, and the next forward was an error; what a
    checkpoint wrote in backward was lost, and forwards before it did not see what later ones had written."""

    def wrap(net: nn.Module, num_replicas: int) -> DataParallel:
        return DataParallel(net, sim[:num_replicas], shares=(0, 1))

    def steps(call: Any, root: nn.Module) -> None:
        for _ in range(3):
            between(lambda x: call(x, False), root, [torch.randn(7, 3).to(sim[0]) for _ in range(3)])
        assert root.count.device == sim[0]

    assert_alike(wrap, MODULES[name]().to(sim[0]), steps, 2, 1e-10)


def second_derivatives(call: Call, root: nn.Module) -> None:
    loss = call(torch.randn(7, 3))[0].pow(3).sum()
    for _ in range(2):
        grads = torch.autograd.grad(loss, [*root.parameters()], create_graph=True)
        loss = torch.stack([grad.pow(2).sum() for grad in grads]).sum()
    loss.backward()


def gradient_between_outputs(call: Call, root: nn.Module) -> torch.Tensor | None:
    output, hidden = call(torch.randn(7, 3))
    hidden.retain_grad()
    (output.pow(2).sum() + hidden.exp().sum()).backward()
    return hidden.grad


@pytest.mark.parametrize("forward", FORWARDS[:-1])
@pytest.mark.parametrize("step", [second_derivatives, gradient_between_outputs])
def test_a_backward_runs_a_checkpoint_once(wrap: Wrap, step: Callable[..., Any], forward: Call) -> None:
    """R5, N1, N3: replicas ran it twice, and the second time it read other buffers."""

    def pair(net: nn.Module, x: torch.Tensor) -> Any:
        hidden = net.foot(x).tanh()
        return checkpoint(lambda h: forward(net, h), hidden, use_reentrant=False), hidden

    net = Calls(pair, foot=nn.Linear(3, 3), body=nn.Linear(3, 3))
    net.register_buffer("count", torch.zeros(()))
    assert_alike(wrap, net, lambda call, root: [step(call, root) for _ in range(2)], 2, 1e-10)


def penalties(call: Call, xs: list[torch.Tensor], penalised: list[int], used: list[int]) -> None:
    """One loss of the outputs of some forwards, and of the gradients of some, which may be others."""
    for x in xs:
        x.requires_grad_()
    outputs = [call(x, False) for x in xs]
    grads = [torch.autograd.grad(outputs[k].exp().sum(), xs[k], create_graph=True) for k in penalised]
    torch.stack([*[grad.pow(2).sum() for (grad,) in grads], *[outputs[k].pow(3).sum() for k in used]]).sum().backward()


@pytest.mark.parametrize("name", ["in_place", "reassigned", "spectral norm"])
@pytest.mark.parametrize(("penalised", "used"), [([1], [0]), ([0, 1], [0, 1]), ([1, 0], []), ([0], [1])], ids=str)
def test_gradients_of_several_forwards(wrap: Wrap, name: str, penalised: list[int], used: list[int]) -> None:
    """R5, N3: the second run through a forward's graphs undid what the other forward's checkpoint had changed.

    Where the first gradient needs the checkpoint of the earlier forward, replicas cannot have one device's order.
    """

    def steps(call: Call, root: nn.Module) -> None:
        for _ in range(2):
            penalties(call, [torch.randn(7, 3) for _ in range(2)], penalised, used)

    is_refused = name == "spectral norm" and penalised[-1] == 0
    alike_or_refused(wrap, MODULES[name](), steps, is_refused=is_refused)


def alike_or_refused(wrap: Wrap, net: nn.Module, steps: Any, *, is_refused: bool) -> None:
    """Check an order that replicas cannot have, or on accelerators not always."""
    try:
        assert_alike(wrap, net, steps, 2, 1e-10)
    except RuntimeError as error:
        if "runs the checkpoints of the last forward first" not in str(error) or (ON_CPU and not is_refused):
            raise
    else:
        assert not is_refused or not ON_CPU


@pytest.mark.parametrize("name", ["in_place", "only_read", "spectral norm"])
def test_a_forward_of_anothers_output(wrap: Wrap, name: str) -> None:
    """R5: on accelerators the first forward did not wait for the second one: the gradient was another, in silence."""

    def steps(call: Call, root: nn.Module) -> None:
        for _ in range(3):
            first, second = (call(torch.randn(7, 3), False) for _ in range(2))
            (first.pow(2).sum() + call(second.tanh(), False).pow(2).sum()).backward()

    alike_or_refused(wrap, MODULES[name](), steps, is_refused=False)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # torch's
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_a_checkpoint_that_only_some_inputs_reach(wrap: Wrap, reentrant: bool) -> None:
    """R5: it was looked for where its input needs no gradient, and not found later."""

    def forward(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return net.body(y) + checkpoint(lambda x: (x * net.count.add_(1)).sin(), x, use_reentrant=reentrant)

    net = Calls(forward, body=nn.Linear(3, 3))
    net.register_buffer("count", torch.zeros(()))

    def steps(call: Call, root: nn.Module) -> list[torch.Tensor | None]:
        x, y = torch.randn(7, 3), torch.randn(7, 3)
        call(x, y.clone().requires_grad_()).sum().backward()
        x.requires_grad_()
        sum(call(x, y).sum() for _ in range(2)).backward()
        return [x.grad]

    assert_alike(wrap, net, steps, 2, 1e-10)


def read_by_hooks(net: nn.Module, call: Call, h: torch.Tensor) -> torch.Tensor:
    """As hooks that keep a tensor in fewer bits multiply by a scale."""
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved * (net.count + 1)):
        return call(h)


LATER: dict[str, Callable[[nn.Module, Call, torch.Tensor], torch.Tensor]] = {
    "not reentrant": lambda net, call, h: checkpoint(call, h, use_reentrant=False),
    "reentrant": lambda net, call, h: checkpoint(call, h, use_reentrant=True),
    "hooks": read_by_hooks,
}


@pytest.mark.parametrize("chosen_by", ["a global", "a buffer"])
@pytest.mark.parametrize("kind", LATER)
def test_a_checkpoint_that_only_some_forwards_have(wrap: Wrap, kind: str, chosen_by: str) -> None:
    """R5, R13: it was looked for in the first forward, and not found later: other gradients, in silence. It leaves the
    module, the inputs, and here the number of the graph's nodes, as they are."""
    switched: list[bool] = []

    def scaled(net: nn.Module, h: torch.Tensor) -> torch.Tensor:
        net.count.add_(1)
        return h * net.count.clone()

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        net.forwards.add_(1)
        is_on = bool(switched) if chosen_by == "a global" else int(net.forwards) % 3 == 2
        h, call = net.foot(x), lambda h: scaled(net, h)
        return net.body(LATER[kind](net, call, h) if is_on else call(h)).tanh()

    net = Calls(forward, foot=nn.Linear(3, 3), body=nn.Linear(3, 3))
    for name in ("count", "forwards"):
        net.register_buffer(name, torch.zeros(()))

    def steps(call: Call, root: nn.Module) -> None:
        for _ in range(2):
            losses = []
            for is_on in (False, True, False):
                switched[:] = [True] * is_on
                losses.append(call(torch.randn(7, 3)).sum())
            torch.stack(losses).sum().backward()

    assert_alike(wrap, net, steps, 2, 1e-10)


@pytest.mark.parametrize("writes", [(), (0,), (1,), (0, 1)], ids=str)
def test_forwards_of_several_threads_in_one_backward(wrap: Wrap, writes: tuple[int, ...]) -> None:
    """R5, R13: one device goes by how many nodes each thread has made before, and within the forwards; the gradient was
    another, in silence. A backward for each thread has one device's numbers."""

    def forward(net: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        def scaled(h: torch.Tensor) -> torch.Tensor:
            net.count.add_(number in writes)
            return net.body(h).tanh() * (net.count + 1)

        return checkpoint(scaled, net.foot(x), use_reentrant=False)

    net = Calls(forward, foot=nn.Linear(3, 3), body=nn.Linear(3, 3))
    net.register_buffer("count", torch.zeros(()))

    def steps(call: Call, root: nn.Module, *, together: bool = False) -> None:
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            xs = [torch.randn(7, 3) for _ in range(2)]
            threads = enumerate((one, other))
            losses = [thread.submit(lambda k=k: call(xs[k], k).pow(2).sum()).result() for k, thread in threads]
        for loss in [torch.stack(losses).sum()] if together else losses:
            loss.backward()

    assert_alike(wrap, net, steps, 2, 1e-10)
    model = wrap(net)
    if not writes:
        steps(model, net, together=True)
        return
    with pytest.raises(RuntimeError, match=r"several threads have called.*'count' of Calls"):
        steps(model, net, together=True)
    model(torch.randn(7, 3), 0).sum().backward()


def test_a_wrapped_part_that_runs_in_parts(wrap: Wrap) -> None:
    """N13, A10: in backward the replicas of the whole have other buffers, with the same values. It was an error."""
    net = Calls(lambda net, x: net.layer(x).tanh() * net.scale, layer=nn.Linear(3, 3), scale=nn.Buffer(torch.rand(3)))

    def steps(call: Callable[..., torch.Tensor], root: nn.Module) -> list[torch.Tensor | None]:
        for _ in range(3):
            call(torch.randn(8, 3)).square().sum().backward()
        return [parameter.grad for parameter in root.parameters()]

    torch.manual_seed(0)
    expected = steps(net, net)
    net.zero_grad()
    torch.manual_seed(0)
    assert_all_same(steps(wrap(nn.Sequential(wrap(net, parts=2))), net), expected)


def test_parts_need_the_buffers_of_their_forward(wrap: Wrap) -> None:
    """N13: the plain module computes nothing again. The first replica's gradient was that of the new value."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3)).eval()
    model = wrap(net, parts=2)
    loss = model(torch.randn(8, 3)).sum()
    loss.backward(retain_graph=True)
    net[2].num_batches_tracked.add_(1)
    with pytest.raises(RuntimeError, match=r"the buffer '2\.num_batches_tracked' has changed"):
        loss.backward()
    model(torch.randn(8, 3)).sum().backward()
