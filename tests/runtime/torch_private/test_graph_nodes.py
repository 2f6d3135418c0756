"""Nodes of graphs in the order in which they run, and hooks that are called only with a gradient."""

from types import SimpleNamespace
from typing import Any

import torch

from unisono.runtime.torch_private import graph_nodes


def test_the_order_in_which_nodes_run() -> None:
    """N1: the highest number first."""
    leaf, order = torch.ones((), requires_grad=True), list[int]()

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
            ctx.number = number
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            order.append(ctx.number)
            return grad, None

    results = [Noting.apply(leaf, number) for number in range(3)]
    for result, number in zip(results, (1, 3, 2), strict=True):
        graph_nodes.run_first(result.grad_fn, (1 << 62) + number)
    torch.autograd.backward(results)
    assert order == [1, 2, 0]


def test_sequence_numbers() -> None:
    """They grow with each node that the thread makes, with gradients on or off, and can be moved on."""
    with torch.no_grad():
        before = graph_nodes.sequence_number()
    node: Any = torch.ones(2, requires_grad=True).exp().grad_fn
    assert before == node._sequence_nr() == graph_nodes.sequence_number() - 1
    graph_nodes.number_nodes_from(before + 9)
    assert graph_nodes.sequence_number() == before + 9


def test_batch_norms_in_a_graph() -> None:
    """N5: those by the statistics of several rows. A node without its metadata is taken for one."""
    x = torch.randn(4, 3, 5, requires_grad=True)
    norm = torch.nn.functional.batch_norm(x, None, None, training=True).grad_fn
    fixed = torch.nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3)).grad_fn
    of_each_row: Any = torch.nn.functional.instance_norm(x).grad_fn
    nodes = [norm, fixed, of_each_row.next_functions[0][0], x.exp().grad_fn]
    assert [graph_nodes.is_batch_norm_in_training(node) for node in nodes] == [True, False, False, False]
    named_alike = SimpleNamespace(name=lambda: "MyBatchNormBackward")
    assert not graph_nodes.is_batch_norm_in_training(named_alike)
    named_alike._saved_training, named_alike._input_metadata = True, ()
    assert graph_nodes.is_batch_norm_in_training(named_alike)


def test_hooks_without_a_gradient() -> None:
    """N4: they are not called in this backward, and are in the next one."""
    called: list[str] = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, gives: bool) -> torch.Tensor:
            ctx.gives = gives
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            if not ctx.gives:
                graph_nodes.skip_hooks_without_gradient([leaf])
            return grad if ctx.gives else None, None

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(torch.utils.hooks.unserializable_hook(lambda grad: called.append("tensor")))
    leaf.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    for gives in (False, True, False, True):
        Node.apply(leaf, gives).sum().backward()
        expected = ["tensor", "accumulated"] if gives else []
        assert called == expected, gives
        called.clear()
    torch.utils.hooks.warn_if_has_hooks(leaf)  # when it is saved: the hook's own mark says that it need not be
