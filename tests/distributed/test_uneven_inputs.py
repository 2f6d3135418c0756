"""Every process takes the same number of steps, and every row counts once."""

import itertools
import pickle
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import unisono
from helpers.comparisons import assert_same_gradients
from helpers.modules import Calls
from helpers.ranks import drawn, drawn_by, end_ranks, on_its_devices, on_two_ranks, run_on_devices
from helpers.twins import rows_of, twins
from unisono.distributed.uneven_inputs import empty_batch, even_batches


def batches_of(rank: int, num_batches: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    rows = [3 + rank] * num_batches
    return [{"x": drawn_by(generator, n, 4), "y": torch.ones(n, 2).double()} for n in rows]


def train(rank: int, lengths: list[int], **options: Any) -> list[int]:
    model, oracle = twins(lambda: nn.Linear(4, 2).double(), **options)
    loaders = [batches_of(r, length) for r, length in enumerate(lengths)]
    rows = []
    for step, batch in enumerate(model.batches(loaders[rank])):
        model.zero_grad()
        oracle.zero_grad()
        nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
        all_ranks = [batches[step] for batches in loaders if step < len(batches)]
        x, y = (torch.cat([b[key] for b in all_ranks]) for key in "xy")
        nn.functional.mse_loss(oracle(x), y).backward()
        assert_same_gradients(model.module, oracle, rtol=1e-12, atol=1e-14)
        rows.append(len(batch["x"]))
    return rows


@pytest.mark.parametrize("lengths", [[2, 4], [0, 3], [3, 3], [0, 0], [1, 0, 2]], ids=str)
def test_every_process_takes_as_many_steps_as_the_longest(lengths):
    """C2"""
    rows = run_on_devices(len(lengths), train, lengths)
    longest = max(lengths)
    assert rows == [[3 + rank] * n + [0] * (longest - n) for rank, n in enumerate(lengths)]


class StartsOver:
    """An iterator that has batches again after it was exhausted, as those of some loaders."""

    def __init__(self, num_batches: int) -> None:
        self.epochs = itertools.cycle([*[torch.zeros(2, 4)] * num_batches, None])

    def __iter__(self) -> "StartsOver":
        return self

    def __next__(self) -> torch.Tensor:
        batch = next(self.epochs)
        if batch is None:
            raise StopIteration
        return batch


def rows_of_one_epoch(rank: int, **options: Any) -> list[int]:
    model = unisono.DataParallel(nn.Linear(4, 2), **options)
    return [len(batch) for batch in itertools.islice(model.batches(StartsOver(2 + 2 * rank)), 9)]


def test_an_exhausted_loader_is_not_asked_again():
    """C2: as a for loop does not ask it, either."""
    assert run_on_devices(2, rows_of_one_epoch) == [[2, 2, 0, 0], [2, 2, 2, 2]]


def test_one_process_gets_the_loaders_batches():
    model = unisono.DataParallel(nn.Linear(4, 2), ["cpu"])
    batches = [torch.zeros(2, 4), torch.zeros(1, 4)]
    assert all(a is b for a, b in zip(model.batches(batches), batches, strict=True))


def test_an_empty_batch():
    x, number, nothing, names, inner = empty_batch([torch.zeros(2, 3), 5, None, ["a"], (torch.tensor(1.0),)], 0)
    assert x.shape == (0, 3)
    assert (number, nothing, names, inner) == (5, None, ["a"], (torch.tensor(1.0),))
    assert empty_batch(torch.zeros(2, 3), 1).shape == (2, 0)
    x, table = empty_batch((torch.zeros(3, 2), torch.zeros(7, 2)), 0)
    assert (len(x), len(table)) == (0, 7), "a table for all rows is returned as it is"


def refuses_zeros(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Fail on rows of zeros, as modules that get the lengths of sequences do."""
    if not x.any(1).all():
        raise ValueError("a row of zeros")
    return module.layer(x)


def train_picky(rank: int, lengths: list[int], **options: Any) -> int:
    model = unisono.DataParallel(Calls(refuses_zeros, layer=nn.Linear(4, 2).double()), **options)
    steps = [model(batch["x"]).square().mean().backward() for batch in model.batches(batches_of(rank, lengths[rank]))]
    return len(steps)


def test_without_rows_the_module_runs_on_rows_that_it_has_seen():
    """C2"""
    assert run_on_devices(2, train_picky, [1, 3]) == [3, 3]


def test_a_module_that_cannot_run_on_zeros_says_why_it_did():
    """C2"""
    ends = end_ranks(2, on_its_devices, train_picky, 1, [0, 1])
    assert all(end.exit_code for end in ends)
    assert "ValueError: a row of zeros" in ends[0].error
    assert "this process has an empty batch" in ends[0].error


@on_two_ranks(1)
def test_without_rows_the_inputs_need_gradients_and_have_the_dtype_of_this_batch(rank: int, options: dict) -> None:
    """C2, C9: with gradients of inputs, batch norm exchanges more in backward, also where the rows are stand-ins."""
    options = {"sync_batch_norm": True, **options}
    model, oracle = twins(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), **options)
    for dtype, sizes in ((torch.float64, (3, 2)), (torch.float32, (5, 0))):
        x = drawn(5, 4).to(dtype).requires_grad_()
        own = x.detach()[rows_of(rank, sizes)].requires_grad_()
        for module, rows in ((model, own), (oracle, x)):
            module.to(dtype).zero_grad()
            output = module(rows)
            assert output.requires_grad
            output.square().mean().backward()
        assert_same_gradients(model.module, oracle, rtol=1e-5, atol=1e-6)
    if rank == 0:
        torch.testing.assert_close(own.grad, x.grad)


@on_two_ranks(1)
def test_without_rows_a_model_takes_part_behind_another(rank: int, options: dict) -> None:
    """C2: its backward leads to the other's output, or each rank waits in the backward of another model."""
    pairs = [twins(lambda: nn.Linear(4, 4).double(), **options) for _ in range(2)]
    x = drawn(5, 4)
    for (first, second), rows in zip(zip(*pairs, strict=True), (x[rows_of(rank, (5, 0))], x), strict=True):
        second(first(rows).tanh()).mean().backward()
    for model, oracle in pairs:
        assert_same_gradients(model.module, oracle, rtol=1e-12, atol=1e-14)


@on_two_ranks(1)
def test_without_rows_a_sparse_input_gets_a_gradient(rank: int, options: dict) -> None:
    """C2, C5"""
    model, oracle = twins(
        lambda: Calls(lambda net, x: torch.sparse.mm(x, net.w), w=nn.Parameter(torch.ones(4, 2).double())), **options
    )
    x = drawn(5, 4)
    for module, rows in ((model, x[rows_of(rank, (5, 0))]), (oracle, x)):
        module(rows.to_sparse().requires_grad_()).square().mean().backward()
    assert_same_gradients(model.module, oracle, rtol=1e-12, atol=1e-14)


def find_in_samples(rank: int, **options: Any) -> list[list[str]]:
    def forward(module: nn.Module, names: list[str]) -> tuple[torch.Tensor, unisono.SampleList[str]]:
        return module.layer(torch.ones(len(names), 1)), unisono.SampleList(names)

    model, all_found = unisono.DataParallel(Calls(forward, layer=nn.Linear(1, 1)), **options), []
    for names in ("abc", "de" if rank else ""):
        rows, found = model(unisono.SampleList(names))
        rows.sum().backward()
        all_found.append(found)
    return all_found


def test_without_rows_a_list_with_one_entry_a_row_is_empty():
    """C2, S17: it had what was found in the rows on which the module ran instead."""
    assert run_on_devices(2, find_in_samples) == [[["a", "b", "c"], []], [["a", "b", "c"], ["d", "e"]]]


class Album:
    """Pictures in a class of the user's."""

    def __init__(self, pictures: torch.Tensor) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)


def split(album: Album, sizes: Sequence[int]) -> list[Album]:
    return [*map(Album, album.pictures.split([*sizes]))]


def train_on_pictures(rank: int, kind: type, num_first: int, **options: Any) -> list[int]:
    """Train on some pictures, which another module has computed, and then on one; the first process has none then."""
    sizes: list[int] = []

    def forward(module: nn.Module, pictures: Any) -> torch.Tensor:
        sizes.append(len(pictures))
        return module.layer(pictures.pictures if kind is Album else torch.stack(pictures))

    unisono.register_batch_type(Album, scatter=split, gather=list)
    stem, model = nn.Linear(4, 4), unisono.DataParallel(Calls(forward, layer=nn.Linear(4, 2)), **options)
    for num_pictures in (num_first, rank):
        pictures = stem(torch.ones(num_pictures, 4))
        model(kind(pictures)).sum().backward()
    return sizes


@pytest.mark.parametrize(("kind", "num_first"), [(unisono.SampleList, 1), (unisono.SampleList, 2), (Album, 2)])
def test_without_rows_the_module_runs_on_copies_of_the_entries_that_it_has_seen(kind, num_first):
    """C2, S17: it ran on none if the first batch had had one; and with its graph, which was freed, if it had two."""
    assert run_on_devices(2, train_on_pictures, kind, num_first) == [[num_first, 2], [num_first, 1]]


def test_packed_sequences_cannot_be_empty():
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    with pytest.raises(
        ValueError, match=r"cannot make an empty batch of a PackedSequence .* give every process the same number"
    ):
        empty_batch(packed, 0)
    assert list(even_batches(None, [packed], 0, torch.device("cpu"))) == [packed]


def test_an_empty_batch_is_on_the_receivers_accelerator(sim: Any) -> None:
    """C2: the sender's may be one that the receiver should leave alone, or does not see."""
    batch = {"x": torch.ones(3, 2, device=sim[1]), "y": torch.ones(3)}
    sent: list[bytes] = []

    def gathered(value: Any, doing: str) -> list[Any]:
        sent.append(pickle.dumps(value))
        return [None, value]

    def has_batch(*of_ranks: int) -> Mock:
        return Mock(wait=lambda: [[has] for has in of_ranks])

    sender = Mock(rank=1, all_gather=lambda mine, doing: has_batch(0, *mine), all_gather_object=gathered)
    assert next(even_batches(sender, [batch], 0, sim[1])) is batch
    assert b"SimulatedTensor" not in sent[0]
    receiver = Mock(
        rank=0,
        all_gather=lambda mine, doing: has_batch(*mine, 1),
        all_gather_object=lambda value, doing: [value, pickle.loads(sent[0])],
    )
    empty = next(even_batches(receiver, [], 0, sim[0]))
    assert (empty["x"].shape, empty["x"].device) == ((0, 2), sim[0])
    assert (empty["y"].shape, empty["y"].device) == ((0,), torch.device("cpu"))
