"""Batches of registered classes: packed sequences, and those of other libraries."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import unisono
from helpers.garbage import no_garbage
from helpers.modules import Calls, Fn
from unisono.primitives import batch_types
from unisono.primitives.batch_types import batch_type_of


class Graphs:
    """Like the batches of graph libraries: nodes of all graphs in one tensor, and how many each graph has."""

    def __init__(self, nodes, sizes, name="graphs"):
        self.nodes, self.sizes, self.extra = nodes, sizes, {"name": name, "deep": [nodes * 2]}

    def __len__(self):
        return len(self.sizes)


def split_graphs(batch, counts):
    shards, start = [], 0
    for count in counts:
        sizes = batch.sizes[start : start + count]
        begin = sum(batch.sizes[:start])
        shards.append(Graphs(batch.nodes[begin : begin + sum(sizes)], sizes))
        start += count
    return shards


def join_graphs(batches):
    return Graphs(torch.cat([b.nodes for b in batches]), [size for b in batches for size in b.sizes])


def per_graph() -> nn.Module:
    """The mean over each graph's nodes: rows that do not interact, though there are several tensors' rows in each."""

    def forward(model, batch):
        hidden = model.layer(batch.nodes) + batch.extra["deep"][0].sum() * 0
        means = torch.stack([part.mean(0) for part in hidden.split(batch.sizes)])
        return {"means": means, "batch": Graphs(hidden, batch.sizes)}

    return Calls(forward, layer=nn.Linear(3, 4))


@pytest.fixture
def registered():
    before = dict(batch_types._registered)
    unisono.register_batch_type(Graphs, scatter=split_graphs, gather=join_graphs)
    yield
    batch_types._registered.clear()
    batch_types._registered.update(before)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_registered_class_is_split_and_joined(registered, n):
    """S14, G4: outputs, and gradients of inputs and parameters, are the plain module's."""
    model = per_graph().double()
    nodes = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    batch = Graphs(nodes, [2, 1, 3, 3])

    def results(call):
        output = call(batch)
        loss = output["means"].square().sum() + output["batch"].nodes.sin().sum()
        grads = torch.autograd.grad(loss, [nodes, *model.parameters()])
        return [output["means"], output["batch"].nodes, *grads], output["batch"].sizes

    plain, sizes = results(model)
    for call in (unisono.DataParallel(model, ["cpu"] * n), lambda b: unisono.data_parallel(model, b, ["cpu"] * n)):
        ours, our_sizes = results(call)
        assert our_sizes == sizes
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_subclasses_are_included(registered):
    graphs = type("Molecules", (Graphs,), {})(torch.zeros(1), [1])
    assert batch_type_of(graphs) is batch_types._registered[Graphs]


def test_a_batch_that_every_replica_gets_and_returns_whole(registered):
    """S5, G6: in_dims and out_dims None; its gradient is the sum of the replicas'."""
    forward = Fn(lambda x, graphs: (x + graphs.nodes.sum(), graphs))
    model = unisono.DataParallel(forward, ["cpu"] * 2, in_dims=(0, None), out_dims=(0, None))
    nodes = torch.ones(3, requires_grad=True)
    output, graphs = model(torch.zeros(4), Graphs(nodes, [3]))
    assert output.tolist() == [3, 3, 3, 3]
    assert torch.equal(graphs.nodes, nodes)
    output.sum().backward()
    assert nodes.grad.tolist() == [4, 4, 4]


def test_what_does_not_fit_is_named(registered):
    """Rows that differ from other inputs'; a scatter that returns too few."""
    model = unisono.DataParallel(Fn(lambda x, graphs: x), ["cpu"] * 2)
    batch = Graphs(torch.zeros(3), [1, 2])
    with pytest.raises(ValueError, match=r"inputs\[0\] has 4, inputs\[1\] has 2"):
        model(torch.zeros(4), batch)
    unisono.register_batch_type(Graphs, scatter=lambda batch, sizes: [batch], gather=join_graphs)
    with pytest.raises(ValueError, match=r"scatter of Graphs returned 1 batches for the row counts \[1, 1\]"):
        unisono.scatter(batch, ["cpu"] * 2)


@pytest.mark.parametrize(("cls", "name"), [(5, "cls=5"), (dict, "cls=<class 'dict'>"), (torch.Tensor, "cls=")])
def test_what_cannot_be_registered(cls, name):
    with pytest.raises(TypeError, match=name):
        unisono.register_batch_type(cls, scatter=split_graphs, gather=join_graphs)
    with pytest.raises(TypeError, match="gather=None: expected a function"):
        unisono.register_batch_type(Graphs, scatter=split_graphs, gather=None)


def test_a_batch_that_pickle_cannot_take_apart_says_so(registered):
    batch = Graphs(torch.zeros(3), [1, 2])
    batch.lock = iter([1]), (i for i in ())
    unisono.register_batch_type(Graphs, scatter=lambda b, sizes: [batch, batch], gather=join_graphs)
    with pytest.raises(TypeError, match="generator") as raised:
        unisono.scatter(batch, ["cpu"] * 2)
    assert "copied to the replicas by pickle" in raised.value.__notes__[-1]  # Python 3.14 has one of its own before it


def test_nothing_keeps_a_batch_alive(registered):
    """N10."""
    model = unisono.DataParallel(per_graph(), ["cpu"] * 2)
    batch = Graphs(torch.randn(3, 3, requires_grad=True), [1, 2])
    output = model(batch)
    output["means"].sum().backward()
    references = weakref.ref(batch), weakref.ref(output["batch"])
    with no_garbage():
        del batch, output
        assert [ref() for ref in references] == [None, None]


def test_a_packed_sequence_inside_a_registered_batch_keeps_its_sizes_on_the_cpu(registered, sim):
    """S14: a registered batch inside another one is taken apart by its own rule."""

    class Pair:
        def __init__(self, packed):
            self.packed, self.same = packed, packed

        def __len__(self):
            return int(self.packed.batch_sizes[0])

    def split(pair, sizes):
        return [Pair(part) for part in batch_type_of(pair.packed).scatter(pair.packed, sizes)]

    unisono.register_batch_type(Pair, scatter=split, gather=list)
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    second = unisono.scatter(Pair(packed), sim[:2])[1]
    assert second.same is second.packed
    assert (second.packed.data.device, second.packed.batch_sizes.device.type) == (sim[1], "cpu")


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("n", [2, 3])
def test_an_rnn_over_packed_sequences(kind, n, is_sorted):
    """S13, G6: packed sequences in and out, hidden states joined on their own axis."""
    lengths = (7, 4, 3, 2, 1) if is_sorted else (4, 2, 7, 1, 3)
    given = [torch.randn(length, 3, dtype=torch.float64, requires_grad=True) for length in lengths]
    model = kind(3, 4, num_layers=2, bidirectional=True).double()

    def results(call):
        output, hidden = call(pack_sequence(given, enforce_sorted=is_sorted))
        hidden = hidden if isinstance(hidden, tuple) else (hidden,)
        loss = output.data.sin().sum() + sum(h.square().sum() for h in hidden)
        return [*output[:2], *hidden, *torch.autograd.grad(loss, [*given, *model.parameters()])]

    wrapped = unisono.DataParallel(model, ["cpu"] * n, out_dims=(0, 1))
    torch.testing.assert_close(results(wrapped), results(model), rtol=1e-12, atol=1e-12)
