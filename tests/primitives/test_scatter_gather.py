"""scatter and gather, each alone; which rows, types and values they keep is in tests/contract/test_properties.py."""

import dataclasses
import re
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

import unisono

CPU = torch.device("cpu")


@dataclasses.dataclass
class Batch:
    x: Any
    note: Any = None


def numbered(rows: int, *more: int) -> torch.Tensor:
    """Return a tensor whose rows all differ."""
    shape = (rows, *more)
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def rows_of(shards) -> list[int]:
    return [shard.shape[0] for shard in shards]


# scatter


def test_shards_and_gathered_outputs_are_copies_also_on_the_same_device():
    """S12: in-place writes never reach the caller's batch, or a replica's output."""
    x, scalar = numbered(4), torch.tensor(1.0)
    for shard, whole in unisono.scatter((x, scalar), ["cpu", "cpu"]):
        shard.zero_()
        whole.zero_()
    unisono.gather([x], "cpu").zero_()
    assert x.tolist() == [0, 1, 2, 3]
    assert scalar.item() == 1


def test_scatter_is_differentiable(sim):
    """S12, S6: gradients come back row by row, those of a 0-dim tensor summed; writes in place are allowed."""
    x, scalar = numbered(5).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    shards = unisono.scatter((x, scalar), [0, 1])
    assert [tuple(part.device for part in shard) for shard in shards] == [(device, device) for device in sim[:2]]
    for i, (shard, factor) in enumerate(shards):
        (shard.mul_(10**i).sum() * factor).backward()
    assert x.grad.tolist() == [2, 2, 2, 20, 20]
    assert scalar.grad.item() == 0 + 1 + 2 + 10 * (3 + 4)


@pytest.mark.parametrize(
    ("inputs", "dim", "message"),
    [
        ({"x": numbered(8, 2), "y": [numbered(9)]}, 0, r"\[0\]\['x'\] has 8, inputs\[0\]\['y'\]\[0\] has 9"),
        ((torch.zeros(8), Batch(torch.zeros(1))), 0, r"inputs\[0\]\[0\] has 8, inputs\[0\]\[1\].x has 1"),
        (torch.zeros(4), 1, r"cannot scatter inputs\[0\] of shape \(4,\) along dim=1: it has no such dimension"),
        (torch.zeros(4), -2, "along dim=-2: it has no such dimension"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(inputs, dim, message):
    """S5: each tensor's path and rows."""
    with pytest.raises(ValueError, match=message):
        unisono.scatter(inputs, ["cpu", "cpu"], dim)


def test_devices_to_scatter_to_are_checked(sim):
    """A13."""
    with pytest.raises(ValueError, match="no devices to scatter to"):
        unisono.scatter(numbered(4), [])
    with pytest.raises(ValueError, match="target_gpus: there is no accelerator 9"):
        unisono.scatter(numbered(4), [0, 9])


def test_one_kind_of_inputs_only():
    """S8: and an only input needs no tuple."""
    inputs, kwargs = unisono.scatter_kwargs((), {"x": numbered(3)}, ["cpu", "cpu"])
    assert inputs == ((), ())
    assert rows_of(kw["x"] for kw in kwargs) == [2, 1]
    for given, keywords in (((numbered(4),), None), ((numbered(4),), {}), (numbered(4), None)):
        inputs, kwargs = unisono.scatter_kwargs(given, keywords, ["cpu", "cpu"])
        assert [type(shard) for shard in inputs] == [tuple, tuple]
        assert rows_of(shard[0] for shard in inputs) == [2, 2]
        assert kwargs == ({}, {})


# gather


def test_tensors_are_joined_in_order_on_the_target_device(sim):
    """G1, A6, A13."""
    outputs = [numbered(3, 2).to("sim:0"), numbered(1, 2).to("sim:2")]
    for target, device in ((1, sim[1]), ("sim:0", sim[0]), ("cpu", CPU), (CPU, CPU)):
        joined = unisono.gather(outputs, target)
        assert joined.device == device
        assert joined.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    with pytest.raises(ValueError, match="there is no accelerator 7"):
        unisono.gather(outputs, 7)
    with pytest.raises(ValueError, match="target_device: 'gpu' is not a device"):
        unisono.gather(outputs, "gpu")
    with pytest.raises(TypeError, match="target_device is None"):
        unisono.gather(outputs, None)
    with pytest.warns(FutureWarning, match="deprecated"):
        assert unisono.gather(outputs, -1).device == CPU


ROW, TABLE = torch.ones(2), torch.ones(2, 3)
Point, Place = namedtuple("Point", "x"), namedtuple("Place", "x")


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ([torch.zeros(2), None], ValueError, "cannot gather output: .* (replica 0: Tensor; replica 1: NoneType)"),
        ([torch.zeros(2), None], ValueError, "Return an empty tensor in place of None."),
        (
            [TABLE, TABLE, ROW],
            ValueError,
            "numbers of dimensions (replica 0: (2, 3); replica 1: (2, 3); replica 2: (2,))",
        ),
        ([[ROW], [ROW.long()]], ValueError, "output[0]: .* dtypes (replica 0: torch.float32; replica 1: torch.int64)"),
        ([TABLE, TABLE.t()], ValueError, "along dimension 0: replica 0 returned (2, 3), replica 1 returned (3, 2)."),
        (["a", "b"], ValueError, "different values (replica 0: 'a'; replica 1: 'b'). Values that depend on the rows"),
        ([True, 1], ValueError, "different types (replica 0: bool; replica 1: int)"),
        ([{"a": ROW}, {"a": ROW, "b": ROW}], ValueError, "different keys (replica 0: ['a']; replica 1: ['a', 'b'])"),
        ([(ROW, [ROW]), (ROW, [])], ValueError, "cannot gather output[1]: .* lengths (replica 0: 1; replica 1: 0)"),
        ([[ROW], (ROW,)], ValueError, "different types (replica 0: list; replica 1: tuple)"),
        ([{"x": (ROW,)}, {"x": ROW}], ValueError, "gather output['x']: .* (replica 0: tuple; replica 1: Tensor)"),
        ([Point(ROW), Place(ROW)], ValueError, "different types (replica 0: Point; replica 1: Place)"),
        ([{"a": ROW}, OrderedDict(a=ROW)], ValueError, "different types (replica 0: dict; replica 1: OrderedDict)"),
        ([{1}, {1}], TypeError, "cannot gather output: each replica returned an object of type set"),
        ([{"o": object()}, {"o": object()}], TypeError, "cannot gather output['o']: .* type object"),
        ([], ValueError, "no outputs to gather"),
    ],
)
def test_outputs_that_do_not_fit_together(outputs, error, message):
    """G3, G5: the path, the replicas and what each gave."""
    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(error, match=pattern):
        unisono.gather(outputs, "cpu")


def test_outputs_are_matched_by_key_in_the_order_of_the_first():
    """G3."""
    joined = unisono.gather([{"a": ROW, "b": (2 * ROW,)}, {"b": (20 * ROW,), "a": 10 * ROW}], "cpu")
    assert [*joined] == ["a", "b"]
    assert joined["a"].tolist() == [1, 1, 10, 10]
    assert joined["b"][0].tolist() == [2, 2, 20, 20]


def test_an_output_without_the_axis_is_named():
    """S10, G5."""
    with pytest.raises(ValueError, match=r"cannot gather output\['y'\] of shape \(2,\) along dim=1"):
        unisono.gather([{"y": ROW}] * 2, "cpu", dim=1)
