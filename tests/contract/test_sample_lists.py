"""Lists with one entry a row, as in object detection: pictures of several sizes, with several boxes in each."""

import pytest
import torch
from torch import nn

import unisono
from helpers.contract import Wrap, said_by
from helpers.modules import Calls, Fn
from unisono import SampleList


def detector() -> nn.Module:
    """Like those of torchvision: losses in training, and in eval for each picture what was found in it."""

    def forward(model, pictures, targets=None):
        rows = torch.cat([model.layer(picture[None]).mean((2, 3)) for picture in pictures])
        if targets is not None:
            boxes = torch.stack([target["boxes"].mean(0) for target in targets])
            return {"boxes": (rows - boxes).square().mean(), "labels": rows.sin().mean()}
        found = zip(pictures, rows, strict=True)
        return SampleList({"boxes": row.expand(len(p[0]), 4), "size": str(p.shape)} for p, row in found)

    return Calls(forward, layer=nn.Conv2d(3, 4, 3, padding=1))


@pytest.mark.parametrize("options", [{}, {"shares": [3, 1]}, {"parts": 2}], ids=str)
def test_pictures_of_several_sizes(wrap: Wrap, options):
    """S17: losses, what is found in each picture, and gradients of pictures and parameters are the plain module's."""
    model = wrap(detector(), 2, scalars="mean", **options)
    pictures = SampleList(torch.randn(3, 6 + row, 9 - row, requires_grad=True) for row in range(5))
    targets = SampleList({"boxes": torch.rand(row + 1, 4), "name": f"picture {row}"} for row in range(5))

    def results(call):
        losses = call(pictures, targets)
        found = call(pictures)
        loss = sum(losses.values()) + sum(each["boxes"].sin().sum() for each in found)
        assert type(found) is SampleList
        assert [each["size"] for each in found] == [str(picture.shape) for picture in pictures]
        grads = torch.autograd.grad(loss, [*pictures, *model.module.parameters()])
        return [*losses.values(), *[each["boxes"] for each in found], *grads]

    torch.testing.assert_close(results(model), results(model.module))


class Pair:
    """An object of a class that unisono does not know."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second


@pytest.mark.parametrize("of", [lambda x: SampleList([x] * 4), lambda x: Pair(x, x)], ids=["SampleList", "object"])
def test_a_tensor_that_occurs_several_times(wrap: Wrap, of):
    """S17, S12: it is one tensor in each replica, and gets the gradients of all its occurrences."""

    def forward(model, x, given):
        entries = given if isinstance(given, list) else [given.first, given.second]
        assert all(entry is entries[0] for entry in entries)
        entries = [entry.to(x.device) for entry in entries]  # what an unknown object holds is left where it is
        return x * sum(k * entry for k, entry in enumerate(entries, 1))

    model, x, tensor = wrap(Calls(forward)), torch.rand(4, 3), torch.rand(3, requires_grad=True)

    def gradient(call, given):
        return torch.autograd.grad(call(x, given).sin().sum(), tensor)

    shards = unisono.scatter((x, of(tensor)), model.devices[:1] * len(model.devices))
    plain = torch.cat([model.module(*shard) for shard in shards])
    expected = torch.autograd.grad(plain.sin().sum(), tensor)
    torch.testing.assert_close(gradient(model, of(tensor)), expected)


def test_batches_of_a_map(wrap: Wrap):
    """S17, I2: a batch that is one is the only input."""
    model = wrap(detector())
    batches = [SampleList(torch.randn(3, 5 + row, 5) for row in range(rows)) for rows in (3, 1, 4)]
    for ours, batch in zip(model.map(batches), batches, strict=True):
        plain = model.module(batch)
        assert [each["size"] for each in ours] == [each["size"] for each in plain]
        torch.testing.assert_close([each["boxes"] for each in ours], [each["boxes"].detach() for each in plain])


def test_samples_of_several_sizes_are_evaluated(wrap: Wrap):
    """S17, I2: their batch was a plain list, weighted by the channels of the pictures and not by their number."""
    model = wrap(Fn(lambda pictures: torch.stack([picture.mean() for picture in pictures])))
    samples = [(torch.full((3, 5 + row, 6), float(row)), f"name {row}") for row in range(5)]
    assert model.evaluate(samples, lambda output, names: output.mean(), batch_size=4) == pytest.approx(2)


class Labelled(SampleList[str]):
    def __init__(self, entries, label):
        super().__init__(entries)
        self.label = label


def test_what_is_made_of_one_is_one(wrap: Wrap):
    """S17: a slice was a plain list, so `model(pictures[:8])` split each picture along its channels."""
    samples = Labelled("abcde", label=7)
    output = wrap(Calls(lambda model, x, samples: samples))(torch.ones(5, 1), samples)
    for made in (output, samples[1:], samples + samples, samples.copy()):
        assert (type(made), made.label) == (Labelled, 7)
    assert (output, samples[1:], samples + samples) == ([*"abcde"], [*"bcde"], [*"abcde"] * 2)
    assert samples[0] == "a"


@pytest.mark.parametrize(
    ("entry", "num_entries", "is_warned"),
    [(torch.ones(3, 4), 2, True), (torch.ones(2, 4), 2, False), (torch.ones(3, 4), 5, False)],
)
@pytest.mark.parametrize("wrapped", [lambda found: found, lambda found: ({"found": found},)], ids=["list", "in it"])
def test_a_list_that_is_joined_by_entry_is_warned_of(entry, num_entries, is_warned, wrapped):
    """S17: the tensors of a plain list are joined one by one, as in torch."""
    model = unisono.DataParallel(Fn(lambda x: wrapped([entry.clone() for _ in range(num_entries)])), ["cpu"] * 2)
    said = said_by(lambda: model(torch.ones(4, 1)), 1)
    remedies = [each for each in said if "return unisono.SampleList(entries)" in str(each.message)]
    assert len(remedies) == is_warned


def test_errors_name_the_remedy():
    """S17: pictures of several sizes in a plain list; and a plain list that is returned."""
    model = unisono.DataParallel(Fn(list), ["cpu"] * 2)
    with pytest.raises(ValueError, match=r"inputs\[0\]\[7\] has 7, and 2 more\. .* give a unisono.SampleList"):
        model([torch.ones(rows) for rows in range(10)])
    pictures = [torch.ones(3, 4 + i, 5) for i in range(6)]
    boxes = [{"boxes": torch.ones(1 + i, 4)} for i in range(6)]
    for targets in (boxes, torch.ones(6)):
        with pytest.raises(ValueError, match=r"If each entry of inputs\[0\].* belongs to a row, give a") as raised:
            model(pictures, targets)
        assert ("inputs[0], inputs[1] belongs" in str(raised.value)) == (targets is boxes)
        assert ("in_dims" in str(raised.value)) != (targets is boxes)  # it would have an entry for each tensor
    with pytest.raises(ValueError, match="different lengths") as raised:
        model(torch.ones(5, 2))
    assert "return unisono.SampleList(entries)" in raised.value.__notes__[0]
