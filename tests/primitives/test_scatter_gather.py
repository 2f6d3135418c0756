"""scatter and gather, each alone; that they are each other's inverse is in test_properties.py."""

import dataclasses
import re
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch

import manyhands

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    x: Any
    note: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


def numbered(rows: int, *more: int) -> torch.Tensor:
    """Return a tensor whose rows all differ."""
    shape = (rows, *more)
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def rows_of(shards) -> list[int]:
    return [shard.shape[0] for shard in shards]


# scatter


@pytest.mark.parametrize(
    ("rows", "devices"), [(5, 4), (6, 4), (9, 4), (10, 4), (10, 8), (30, 8), (1, 4), (4, 4), (3, 1)]
)
def test_shards_are_those_of_torch_chunk(rows, devices):
    """S1: sizes and rows."""
    x = numbered(rows, 2)
    shards = manyhands.scatter(x, ["cpu"] * devices)
    torch.testing.assert_close(shards, list(x.chunk(devices)), rtol=0, atol=0)


def test_each_shard_is_on_its_device(sim):
    """S1, A1, A12: on four devices, by indices, names and devices; the same device twice gets two shards."""
    shards = manyhands.scatter({"x": numbered(7, 3)}, [0, "sim:1", torch.device("sim:2"), 3])
    assert [str(shard["x"].device) for shard in shards] == ["sim:0", "sim:1", "sim:2", "sim:3"]
    assert [shard["x"].shape[0] for shard in shards] == [2, 2, 2, 1]
    first, second = manyhands.scatter(numbered(4), [1, 1])
    assert first.device == second.device == sim[1]
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3])


def test_containers_keep_their_types():
    """S3, S4, G3, G4: and what is no tensor is the same object everywhere; test_pytree.py has more types."""
    marker = object()
    inputs = {
        "ordered": OrderedDict(b=numbered(4), a=numbered(4, 2)),
        "default": defaultdict(list, x=numbered(4)),
        "pair": Pair([numbered(4)], (None, marker)),
        "frozen": Frozen((numbered(4),)),
        "set": {1, 2},
        "empty": (),
    }
    first, second = manyhands.scatter(inputs, ["cpu", "cpu"])
    joined = manyhands.gather([first, second], "cpu")
    for value in (first, second, joined):
        assert {name: type(part) for name, part in value.items()} == {name: type(part) for name, part in inputs.items()}
        assert list(value["ordered"]) == ["b", "a"]
        assert value["default"]["new"] == []
        assert value["pair"].right[1] is marker
        assert value["set"] is inputs["set"]
    assert second["ordered"]["a"].tolist() == [[4, 5], [6, 7]]
    assert second["pair"].left[0].tolist() == second["frozen"].x[0].tolist() == [2, 3]
    assert joined["frozen"].x[0].tolist() == joined["pair"].left[0].tolist() == [0, 1, 2, 3]
    assert first["frozen"].x[0].tolist() == [0, 1]


@pytest.mark.parametrize("value", [None, "text", (), [], {}, object(), [None, 1]], ids=lambda v: type(v).__name__)
def test_every_device_gets_inputs_without_tensors_whole(value):
    """S4, S8."""
    assert [shard is value for shard in manyhands.scatter(value, ["cpu"] * 3)] == [True] * 3


def test_every_device_gets_a_0_dim_tensor_whole(sim):
    """S6: torch raises."""
    shards = manyhands.scatter((numbered(4), torch.tensor(7.0)), [0, 1])
    assert [shard[1].item() for shard in shards] == [7, 7]
    assert [shard[1].device for shard in shards] == sim[:2]
    assert len(manyhands.scatter(torch.tensor(7.0), ["cpu"] * 3)) == 3


def test_an_empty_batch_is_one_shard():
    """S9."""
    (shard,) = manyhands.scatter(torch.zeros(0, 3), ["cpu"] * 4)
    assert shard.shape == (0, 3)


@pytest.mark.parametrize("dim", [1, -2])
def test_any_axis_can_hold_the_rows(dim):
    """S10."""
    x = numbered(2, 5, 3)
    shards = manyhands.scatter(x, ["cpu", "cpu"], dim=dim)
    torch.testing.assert_close(shards, [x[:, :3], x[:, 3:]])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_any_dtype(dtype):
    """S15."""
    x = numbered(5).to(dtype)
    shards = manyhands.scatter(x, ["cpu", "cpu"])
    assert [shard.dtype for shard in shards] == [dtype] * 2
    assert torch.equal(manyhands.gather(shards, "cpu"), x)


def test_sparse_tensors():
    """S15: a sparse batch comes back as it was."""
    x = torch.eye(5).to_sparse()
    shards = manyhands.scatter(x, ["cpu", "cpu"])
    assert [shard.layout for shard in shards] == [torch.sparse_coo] * 2
    assert torch.equal(manyhands.gather(shards, "cpu").to_dense(), torch.eye(5))


def test_memory_formats_are_kept():
    """S11: channels_last, and a batch that is not contiguous."""
    x = numbered(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    for shard in manyhands.scatter(x, ["cpu", "cpu"]):
        assert shard.is_contiguous(memory_format=torch.channels_last)
    strided = numbered(4, 6)[:, ::2]
    assert torch.equal(torch.cat(manyhands.scatter(strided, ["cpu", "cpu"])), strided)


def test_shards_and_gathered_outputs_are_copies_also_on_the_same_device():
    """S12: in-place writes never reach the caller's batch, or a replica's output."""
    x, scalar = numbered(4), torch.tensor(1.0)
    for shard, whole in manyhands.scatter((x, scalar), ["cpu", "cpu"]):
        shard.zero_()
        whole.zero_()
    manyhands.gather([x], "cpu").zero_()
    assert x.tolist() == [0, 1, 2, 3]
    assert scalar.item() == 1


def test_scatter_is_differentiable(sim):
    """S12: gradients come back row by row, those of a 0-dim tensor summed; writes in place are allowed."""
    x, scalar = numbered(5).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    shards = manyhands.scatter((x, scalar), [0, 1])
    for i, (shard, factor) in enumerate(shards):
        (shard.mul_(10**i).sum() * factor).backward()
    assert x.grad.tolist() == [2, 2, 2, 20, 20]
    assert scalar.grad.item() == 0 + 1 + 2 + 10 * (3 + 4)


@pytest.mark.parametrize(
    ("inputs", "dim", "message"),
    [
        (
            {"x": torch.zeros(8, 2), "mask": [torch.zeros(9)]},
            0,
            r"rows: inputs\[0\]\['x'\] has 8, inputs\[0\]\['mask'\]\[0\] has 9",
        ),
        ((torch.zeros(8), Batch(torch.zeros(1))), 0, r"inputs\[0\]\[0\] has 8, inputs\[0\]\[1\].x has 1"),
        (torch.zeros(4), 1, r"cannot scatter inputs\[0\] of shape \(4,\) along dim=1: it has no such axis"),
        (torch.zeros(4), -2, "along dim=-2: it has no such axis"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(inputs, dim, message):
    """S5: each tensor's path and rows."""
    with pytest.raises(ValueError, match=message):
        manyhands.scatter(inputs, ["cpu", "cpu"], dim)


def test_devices_to_scatter_to_are_checked(sim):
    """A13."""
    with pytest.raises(ValueError, match="no devices to scatter to"):
        manyhands.scatter(numbered(4), [])
    with pytest.raises(ValueError, match="target_gpus: there is no accelerator 9"):
        manyhands.scatter(numbered(4), [0, 9])


# scatter_kwargs


def test_keyword_inputs_are_split_with_the_positional_ones():
    """S7, S5: as many shards as there are rows, also where keyword inputs alone would give more; errors name them."""
    inputs, kwargs = manyhands.scatter_kwargs((numbered(1),), {"flag": True, "y": [numbered(1)]}, ["cpu"] * 4)
    assert len(inputs) == len(kwargs) == 1
    assert kwargs[0]["flag"] is True
    inputs, kwargs = manyhands.scatter_kwargs((numbered(5),), {"flag": True}, ["cpu"] * 4)
    assert (rows_of(shard[0] for shard in inputs), kwargs) == ([2, 2, 1], ({"flag": True},) * 3)
    with pytest.raises(ValueError, match=r"inputs\[0\] has 4, kwargs\['mask'\] has 3"):
        manyhands.scatter_kwargs((numbered(4),), {"mask": numbered(3)}, ["cpu", "cpu"])


def test_one_kind_of_inputs_only():
    """S8: and an only input needs no tuple."""
    inputs, kwargs = manyhands.scatter_kwargs((), {"x": numbered(3)}, ["cpu", "cpu"])
    assert inputs == ((), ())
    assert rows_of(kw["x"] for kw in kwargs) == [2, 1]
    for given, keywords in (((numbered(4),), None), ((numbered(4),), {}), (numbered(4), None)):
        inputs, kwargs = manyhands.scatter_kwargs(given, keywords, ["cpu", "cpu"])
        assert [type(shard) for shard in inputs] == [tuple, tuple]
        assert rows_of(shard[0] for shard in inputs) == [2, 2]
        assert kwargs == ({}, {})


# gather


def test_tensors_are_joined_in_order_on_the_target_device(sim):
    """G1, A6, A13."""
    outputs = [numbered(3, 2).to("sim:0"), numbered(1, 2).to("sim:2")]
    for target, device in ((1, sim[1]), ("sim:0", sim[0]), ("cpu", CPU), (CPU, CPU)):
        joined = manyhands.gather(outputs, target)
        assert joined.device == device
        assert joined.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    with pytest.raises(ValueError, match="there is no accelerator 7"):
        manyhands.gather(outputs, 7)
    with pytest.raises(TypeError, match="target_device is None"):
        manyhands.gather(outputs, None)
    with pytest.warns(FutureWarning, match="deprecated"):
        assert manyhands.gather(outputs, -1).device == CPU


@pytest.mark.parametrize("dim", [1, -1])
def test_tensors_are_joined_along_any_axis(dim):
    """G1, S10."""
    a, b = numbered(2, 3), numbered(2, 1)
    assert torch.equal(manyhands.gather([a, b], "cpu", dim=dim), torch.cat([a, b], 1))


def test_0_dim_outputs_become_a_vector_and_are_warned_about_once():
    """G2."""
    with pytest.warns(UserWarning, match="they become a vector with one entry a replica") as warned:
        joined = [manyhands.gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu", dim) for dim in (0, 1, -1)]
    assert [vector.tolist() for vector in joined] == [[1, 2]] * 3
    assert len(warned) == 1


def test_numbers_become_a_list_and_equal_values_stay_one():
    """G4: one number a replica, also where they are equal; equal strings are one; the same object is that object."""
    marker, shape = object(), torch.Size([2])
    joined = manyhands.gather([(1, 2.5, True, "name", 1j, b"b", shape, torch.float32, marker)] * 2, "cpu")
    assert joined == ([1, 1], [2.5, 2.5], [True, True], "name", [1j, 1j], b"b", shape, torch.float32, marker)
    assert manyhands.gather([3, 4, 5], "cpu") == [3, 4, 5]
    assert manyhands.gather([Batch(numbered(1), 1), Batch(numbered(1), 2)], "cpu").note == [1, 2]


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ([torch.zeros(2), None], ValueError, "cannot gather output: .* (replica 0: Tensor; replica 1: NoneType)"),
        ([{"a": None}, {"a": torch.ones(1)}], ValueError, "cannot gather output['a']"),
        (
            [torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)],
            ValueError,
            "different numbers of axes (replica 0: (2, 3); replica 1: (2, 3); replica 2: (2,))",
        ),
        (
            [[torch.ones(2)], [torch.ones(2).long()]],
            ValueError,
            "cannot gather output[0]: .* different dtypes (replica 0: torch.float32; replica 1: torch.int64)",
        ),
        (
            [torch.ones(3, 5), torch.ones(1, 4)],
            ValueError,
            "different sizes off the joined axis 0 (replica 0: (3, 5); replica 1: (1, 4))",
        ),
        (["a", "b"], ValueError, "different values (replica 0: 'a'; replica 1: 'b')"),
        ([True, 1], ValueError, "different types (replica 0: bool; replica 1: int)"),
        ([{1}, {1}], TypeError, "cannot gather output: the replicas returned objects of type set"),
        ([{"o": object()}, {"o": object()}], TypeError, "cannot gather output['o']: .* type object"),
        ([], ValueError, "no outputs to gather"),
    ],
)
def test_outputs_that_do_not_fit_together(outputs, error, message):
    """G3, G5: the path, the replicas and what each gave; test_pytree.py has structures that differ."""
    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(error, match=pattern):
        manyhands.gather(outputs, "cpu")


def test_an_output_without_the_axis_is_named():
    """S10, G5."""
    with pytest.raises(ValueError, match=r"cannot gather output\['y'\] of shape \(2,\) along dim=1"):
        manyhands.gather([{"y": torch.ones(2)}] * 2, "cpu", dim=1)


def test_gather_is_differentiable(sim):
    """G1: each replica gets the gradient of its own rows, on its own device."""
    a = torch.ones(2, device="sim:0", requires_grad=True)
    b = torch.ones(1, device="sim:1", requires_grad=True)
    (manyhands.gather([a, b], "cpu") * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert (a.grad.tolist(), a.grad.device) == ([1, 2], sim[0])
    assert (b.grad.tolist(), b.grad.device) == ([3], sim[1])
