import random
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from unisono.console.errors import FolderError
from unisono.training import checkpoint
from unisono.training.run_folder import RunFolder
from unisono.training.weights import Weights

CPU = [torch.device("cpu")]
METRICS = b'{"kind": "step", "step": 1}\n'


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
    checkpoint.save(folder, trained.weights, METRICS * steps, CPU)
    return trained


def restore(folder: RunFolder) -> tuple[Trained, int, list[str]]:
    """Return the model, how many lines of metrics there were, and what was said."""
    said: list[str] = []
    saved = checkpoint.read(folder, said.append)
    fresh = Trained(steps=0)
    checkpoint.restore(saved, folder, fresh.weights, CPU)
    return fresh, checkpoint.metrics_in(saved).count(METRICS), said


@pytest.mark.parametrize("steps", [0, 3])
def test_everything_comes_back(folder: RunFolder, steps: int) -> None:
    """T1: equal states are equal files, too."""
    trained = save(folder, steps=steps)
    first, expected = folder.checkpoint.read_bytes(), torch.rand(5)
    fresh, num_lines, said = restore(folder)
    assert (num_lines, said) == (steps, [])
    assert all(map(torch.equal, fresh.state(), trained.state()))
    assert torch.equal(torch.rand(5), expected)
    restore(folder)
    checkpoint.save(folder, trained.weights, METRICS * steps, CPU)
    assert folder.checkpoint.read_bytes() == first


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_weights_go_on_in_their_own_way(folder: RunFolder, momentum: float) -> None:
    """T1: a checkpoint goes on in another memory layout and precision, with the numbers that it has."""
    ways = [(torch.channels_last, False), (torch.contiguous_format, True)]
    for saved, resumed in (ways, ways[::-1]):
        trained, other = (
            Weights(nn.Conv2d(3, 4, 3).to(memory_format=layout), momentum=momentum, in_bfloat16=in_bfloat16)
            for layout, in_bfloat16 in (saved, resumed)
        )
        for weight in trained.momenta:
            weight.normal_()
        assert {tensor.dtype for tensor in trained.state_dict().values()} == {torch.float32}
        checkpoint.save(folder, trained, METRICS, CPU)
        checkpoint.restore(checkpoint.read(folder, print), folder, other, CPU)
        for ours, theirs in zip([*other.masters, *other.momenta], [*trained.masters, *trained.momenta], strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dim() < 4 or ours.is_contiguous(memory_format=resumed[0])


def test_a_run_goes_on_with_more_devices(folder: RunFolder, sim: list[torch.device]) -> None:
    """T1: the host's random state comes back; accelerators that the run did not have keep theirs."""
    trained = save(folder, steps=1)
    expected = torch.rand(5)
    checkpoint.restore(checkpoint.read(folder, print), folder, trained.weights, [*CPU, sim[0]])
    assert torch.equal(torch.rand(5), expected)


# ---- damage ------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_a_bit(path: Path) -> None:
    """Change one bit of a tensor's bytes, which leaves the file a good one to safetensors."""
    content = bytearray(path.read_bytes())
    content[content.index(safetensors.torch.load(bytes(content))["model.0.weight"].numpy().tobytes())] ^= 1
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
        lambda path: safetensors.torch.save_file({"something": torch.ones(2)}, path),
        lambda path: torch.save({"format": 1, "steps": Harmful()}, path),
        Path.unlink,
    ],
    ids=["truncated", "a flipped bit", "empty", "something else", "code", "missing"],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder: RunFolder, damage: Callable[[Path], None]) -> None:
    """T4, T5: code in it is not run."""
    earlier = save(folder, steps=2)
    save(folder, steps=3)
    damage(folder.checkpoint)

    fresh, num_lines, said = restore(folder)
    assert num_lines == 2
    assert torch.equal(fresh.state()[0], earlier.state()[0])
    (line,) = said
    assert line.startswith("checkpoint.safetensors cannot be read (")
    assert line.endswith("; using checkpoint.previous.safetensors")

    save(folder, steps=4)
    truncate(folder.checkpoint)
    assert restore(folder)[1] == 2, "the good one has been kept, not the damaged one"
    save(folder, steps=5)
    truncate(folder.checkpoint)
    truncate(folder.previous_checkpoint)
    with pytest.raises(
        FolderError, match=r"no checkpoint in .* can be used: checkpoint.safetensors cannot be"
    ) as raised:
        restore(folder)
    assert "\n" not in str(raised.value)


def test_a_cut_or_a_flipped_bit_is_an_error_or_changes_nothing(folder: RunFolder) -> None:
    """T4: every byte of the header and of the digest, which ends the file, and some of the tensors."""
    expected = save(folder, steps=1).state()
    content = folder.checkpoint.read_bytes()
    header, draw, changed_nothing = 8 + int.from_bytes(content[:8], "little"), random.Random(0), 0
    for at in [*range(header), *range(header, len(content) - 32, 53), *range(len(content) - 32, len(content))]:
        flipped = content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
        for damaged in (content[:at], flipped):
            folder.checkpoint.write_bytes(damaged)
            try:
                state = restore(folder)[0].state()
            except FolderError:
                continue
            assert damaged is flipped
            assert all(map(torch.equal, state, expected))
            changed_nothing += 1
    assert changed_nothing < 8, "only blanks and the like in the header may change"


def test_a_checkpoint_of_another_model_is_an_error(folder: RunFolder) -> None:
    """T4"""
    save(folder, steps=1)
    saved = checkpoint.read(folder, print)
    with pytest.raises(FolderError, match="does not fit the run"):
        checkpoint.restore(saved, folder, Weights(nn.Linear(2, 2)), CPU)
