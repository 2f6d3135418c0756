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

CPU = [torch.device("cpu")]


class Trained:
    """A small model and its optimizer after some steps."""

    def __init__(self, *, steps: int) -> None:
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 4)).square().sum().backward()
            self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [tensor.clone() for tensor in (*self.model.state_dict().values(), *momenta)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def save(folder: RunFolder, *, steps: int) -> Trained:
    trained = Trained(steps=steps)
    checkpoint.save(folder, trained.model, trained.optimizer, StepCount(steps=steps, epochs=1), CPU)
    return trained


def restore(folder: RunFolder) -> tuple[Trained, StepCount, list[str]]:
    fresh, said = Trained(steps=0), []
    state = checkpoint.read(folder, said.append)
    return fresh, checkpoint.restore(state, folder, fresh.model, fresh.optimizer, CPU), said


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
        checkpoint.restore(state, folder, other, torch.optim.SGD(other.parameters(), lr=0.1), CPU)


def test_the_optimizer_goes_on_in_its_own_way(folder: RunFolder) -> None:
    """A checkpoint of an accelerator, with a fused optimizer and weights in channels_last, goes on where neither is."""

    def conv(fused: bool | None, memory_format: torch.memory_format) -> tuple[nn.Module, torch.optim.SGD]:
        model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)

    ways = [(True, torch.channels_last), (None, torch.contiguous_format)]
    for saved, resumed in (ways, ways[::-1]):
        model, optimizer = conv(*saved)
        model(torch.randn(2, 3, 5, 5)).sum().backward()
        optimizer.step()
        checkpoint.save(folder, model, optimizer, StepCount(steps=1), CPU)

        other, other_optimizer = conv(*resumed)
        checkpoint.restore(checkpoint.read(folder, print), folder, other, other_optimizer, CPU)
        assert other_optimizer.param_groups[0]["fused"] == resumed[0]
        assert other_optimizer.state[other.weight]["momentum_buffer"].is_contiguous(memory_format=resumed[1])
        for again, what in ((model, optimizer), (other, other_optimizer)):
            again.zero_grad()
            again(torch.ones(2, 3, 5, 5)).sum().backward()
            what.step()
        torch.testing.assert_close(other.weight, model.weight)
