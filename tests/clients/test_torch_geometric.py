"""torch_geometric: batches of graphs in a wrapped model; its own DataParallel, which names CUDA devices."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from helpers.comparisons import assert_same_gradients, assert_same_state
from helpers.contract import Wrap

with unisono.install(["cpu", "cpu"]):  # as under `unisono run`: its class is defined when the library is imported
    torch_geometric = pytest.importorskip("torch_geometric.nn")
data_of = pytest.importorskip("torch_geometric.data")
loaders = pytest.importorskip("torch_geometric.loader")


class GraphClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch_geometric.GCNConv(5, 8)
        self.second = torch_geometric.GATConv(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        x = self.first(batch.x, batch.edge_index).relu()
        x = self.second(x, batch.edge_index).relu()
        return self.out(torch_geometric.global_mean_pool(x, batch.batch))


def graphs() -> list[Any]:
    """Return graphs of 3 to 9 nodes."""
    sizes = [3, 9, 4, 4, 8, 5, 7]
    return [
        data_of.Data(
            x=torch.randn(size, 5), edge_index=torch.randint(0, size, (2, 3 * size)), y=torch.tensor([size % 3])
        )
        for size in sizes
    ]


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    each = iter(batch.to_data_list())
    return [data_of.Batch.from_data_list([next(each) for _ in range(size)]) for size in sizes]


def test_batches_of_graphs(wrap: Wrap, float64: None) -> None:
    """X9: a Batch is registered with register_batch_type, in six lines: GCNConv, GATConv, pooling; DataLoader."""
    unisono.register_batch_type(
        data_of.Batch,
        scatter=split,
        gather=lambda batches: data_of.Batch.from_data_list([g for b in batches for g in b.to_data_list()]),
        rows=lambda batch: batch.num_graphs,
    )
    plain = GraphClassifier()
    model = copy.deepcopy(plain)
    data = graphs()
    for each in (plain, wrap(model)):
        optimizer = torch.optim.SGD(each.parameters(), 0.5)
        for batch in loaders.DataLoader(data, batch_size=3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(each(batch), batch.y).backward()
            optimizer.step()
    assert_same_gradients(model, plain)
    assert_same_state(model, plain)


def test_own_wrapper_names_cuda() -> None:
    """X9: its own DataParallel, on two CPU replicas.

    It says `torch.device(f"cuda:{device_ids[0]}")`, so it is for CUDA devices alone: use register_batch_type.
    """
    with unisono.install(["cpu", "cpu"]), pytest.raises((IndexError, RuntimeError)):
        torch_geometric.DataParallel(GraphClassifier())
