import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from unisono.console.errors import FolderError
from unisono.training import checkpoint
from unisono.training.run_folder import RunFolder

METRICS = b'{"kind": "step", "step": 1}\n'


class Trained:
    """A small model, and momenta, as after some steps."""

    def __init__(self, layout: torch.memory_format = torch.contiguous_format) -> None:
        self.module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=layout)
        self.module(torch.randn(8, 3, 4, 4))  # which changes the buffers
        self.momenta = {name: torch.randn_like(weight) for name, weight in self.module.named_parameters()}

    def state(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (*self.module.state_dict().values(), *self.momenta.values())]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def save(folder: RunFolder, *, steps: int, **how: Any) -> Trained:
    trained = Trained(**how)
    checkpoint.save(folder, trained.module, trained.momenta, METRICS * steps)
    return trained


def restore(folder: RunFolder, **how: Any) -> tuple[Trained, int, list[str]]:
    """Return the model, how many lines of metrics there were, and what was said."""
    said: list[str] = []
    saved = checkpoint.read(folder, said.append)
    fresh = Trained(**how)
    checkpoint.restore(saved, folder, fresh.module, fresh.momenta)
    return fresh, checkpoint.metrics_in(saved).count(METRICS), said


@pytest.mark.parametrize("steps", [0, 3])
def test_everything_comes_back(folder: RunFolder, steps: int) -> None:
    """T1: equal states are equal files, too."""
    trained = save(folder, steps=steps)
    first = folder.checkpoint.read_bytes()
    fresh, num_lines, said = restore(folder)
    assert (num_lines, said) == (steps, [])
    assert all(map(torch.equal, fresh.state(), trained.state()))
    checkpoint.save(folder, fresh.module, fresh.momenta, METRICS * steps)
    assert folder.checkpoint.read_bytes() == first


def test_weights_go_on_in_their_own_memory_layout(folder: RunFolder) -> None:
    """T1: GPUs have another one than the CPU."""
    layouts = (torch.channels_last, torch.contiguous_format)
    for saved, resumed in (layouts, layouts[::-1]):
        trained = save(folder, steps=1, layout=saved)
        fresh, _, _ = restore(folder, layout=resumed)
        assert all(map(torch.equal, fresh.state(), trained.state()))
        assert fresh.module[0].weight.is_contiguous(memory_format=resumed)


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
        checkpoint.restore(saved, folder, nn.Linear(2, 2), {})
