import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.console.errors import FolderError
from manyhands.training import checkpoint
from manyhands.training.checkpoint import StepCount
from manyhands.training.run_folder import RunFolder
from manyhands.training.weights import Weights

CPU = [torch.device("cpu")]


class Trained:
    """A small model after some steps."""

    def __init__(self, *, steps: int) -> None:
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.weights = Weights(self.model, momentum=0.9)
        for _ in range(steps):
            self.model.zero_grad()
            self.model(torch.randn(8, 4)).square().sum().backward()
            self.weights.step(0.1)

    def state(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (*self.weights.state_dict().values(), *self.weights.momenta)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def save(folder: RunFolder, *, steps: int) -> Trained:
    trained = Trained(steps=steps)
    checkpoint.save(folder, trained.weights, StepCount(steps=steps, epochs=1), CPU)
    return trained


def restore(folder: RunFolder) -> tuple[Trained, StepCount, list[str]]:
    fresh, said = Trained(steps=0), []
    state = checkpoint.read(folder, said.append)
    return fresh, checkpoint.restore(state, folder, fresh.weights, CPU), said


def test_everything_comes_back(folder: RunFolder) -> None:
    trained = save(folder, steps=3)
    expected = (torch.rand(5), random.random())
    fresh, progress, said = restore(folder)
    assert (progress, said) == (StepCount(steps=3, epochs=1), [])
    assert all(map(torch.equal, fresh.state(), trained.state()))
    assert torch.equal(torch.rand(5), expected[0])
    assert random.random() == expected[1]


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_a_bit(path: Path) -> None:
    """Change one bit of a tensor's bytes, which leaves the file a good one to torch.load."""
    weights = next(iter(torch.load(path, weights_only=True)["model"].values())).numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weights)] ^= 1
    path.write_bytes(content)


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("harm done",))


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_a_bit,
        lambda path: path.write_bytes(b""),
        lambda path: torch.save({"something": "else"}, path),
        lambda path: torch.save({"format": 1, "steps": Harmful()}, path),
        Path.unlink,
    ],
    ids=["truncated", "a flipped bit", "empty", "something else", "code", "missing"],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder: RunFolder, damage: Callable[[Path], None]) -> None:
    earlier = save(folder, steps=2)
    save(folder, steps=3)
    damage(folder.checkpoint)

    fresh, progress, said = restore(folder)
    assert progress.steps == 2
    assert torch.equal(fresh.state()[0], earlier.state()[0])
    (line,) = said
    assert line.startswith("checkpoint.pt is ")
    assert line.endswith("using checkpoint.previous.pt, of step 2")

    save(folder, steps=4)
    truncate(folder.checkpoint)
    assert restore(folder)[1].steps == 2, "the good one has been kept, not the damaged one"
    save(folder, steps=5)
    truncate(folder.checkpoint)
    truncate(folder.previous_checkpoint)
    with pytest.raises(FolderError, match=r"no checkpoint in .* can be used: checkpoint.pt is damaged"):
        restore(folder)


def test_a_checkpoint_of_another_model_is_an_error(folder: RunFolder) -> None:
    save(folder, steps=1)
    other = nn.Linear(2, 2)
    state = checkpoint.read(folder, print)
    with pytest.raises(FolderError, match="does not fit the run"):
        checkpoint.restore(state, folder, Weights(other), CPU)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_weights_go_on_in_their_own_way(folder: RunFolder, momentum: float) -> None:
    """A checkpoint goes on in another memory layout and precision, with the numbers that it has."""
    ways = [(torch.channels_last, False), (torch.contiguous_format, True)]
    for saved, resumed in (ways, ways[::-1]):
        trained, other = (
            Weights(nn.Conv2d(3, 4, 3).to(memory_format=layout), momentum=momentum, in_bfloat16=in_bfloat16)
            for layout, in_bfloat16 in (saved, resumed)
        )
        for weight in trained.momenta:
            weight.normal_()
        checkpoint.save(folder, trained, StepCount(steps=1), CPU)
        checkpoint.restore(checkpoint.read(folder, print), folder, other, CPU)
        for ours, theirs in zip([*other.masters, *other.momenta], [*trained.masters, *trained.momenta], strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dim() < 4 or ours.is_contiguous(memory_format=resumed[0])
