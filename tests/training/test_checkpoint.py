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
from unisono.training.checkpoint import Checkpoint
from unisono.training.run_folder import RunFolder

METRICS = b'{"kind": "step", "step": 1}\n'
CONFIG = {"options": {"lr": 0.05}, "launch": "one"}


def trained() -> dict[str, torch.Tensor]:
    """Return the state of a small model after some steps, in the memory layout that GPUs have."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    module(torch.randn(8, 3, 4, 4))  # which changes the buffers
    return module.state_dict()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def assert_same(checkpoint: Checkpoint, other: Checkpoint) -> None:
    """Check that the tensors are equal, by their names."""
    for ours, theirs in ((checkpoint.model, other.model), (checkpoint.momenta, other.momenta)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("metrics", [b"", METRICS * 3], ids=["no step", "three steps"])
def test_everything_comes_back(folder: RunFolder, metrics: bytes) -> None:
    """T1: equal states are equal files, too."""
    saved = Checkpoint(CONFIG, metrics, trained(), {"0.weight": torch.randn(3, 2)})
    saved.save(folder.checkpoint)
    first = folder.checkpoint.read_bytes()
    read = checkpoint.read(folder)
    assert (read.config, read.metrics) == (CONFIG, metrics)
    assert_same(read, saved)
    read.save(folder.checkpoint)
    assert folder.checkpoint.read_bytes() == first
    assert checkpoint.launch_of(folder) == "one"


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("harm done",))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: safetensors.torch.save_file({"something": torch.ones(2)}, path),
        lambda path: torch.save({"format": 1, "steps": Harmful()}, path),
        Path.unlink,
    ],
    ids=["empty", "something else", "code", "missing"],
)
def test_a_file_that_is_no_checkpoint_is_one_line(folder: RunFolder, damage: Callable[[Path], Any]) -> None:
    """T4, T5: code in it is not run."""
    Checkpoint(CONFIG, METRICS, trained(), {}).save(folder.checkpoint)
    damage(folder.checkpoint)
    with pytest.raises(FolderError, match=r"cannot read .*checkpoint.safetensors \(.+\): restore the file") as raised:
        checkpoint.read(folder)
    assert "\n" not in str(raised.value)
    assert checkpoint.launch_of(folder) is None


def test_a_cut_or_a_flipped_bit_is_an_error_or_changes_nothing(folder: RunFolder) -> None:
    """T4: every byte of the header, which has the options, and of the digest, which ends the file; some of the tensors.

    A run went on at another learning rate.
    """
    expected = Checkpoint(CONFIG, METRICS, trained(), {})
    expected.save(folder.checkpoint)
    content = folder.checkpoint.read_bytes()
    header, draw, changed_nothing = 8 + int.from_bytes(content[:8], "little"), random.Random(0), 0
    for at in [*range(header), *range(header, len(content) - 32, 53), *range(len(content) - 32, len(content))]:
        flipped = content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
        for damaged in (content[:at], flipped):
            folder.checkpoint.write_bytes(damaged)
            try:
                read = checkpoint.read(folder)
            except FolderError:
                continue
            assert damaged is flipped
            assert read.config == CONFIG
            assert_same(read, expected)
            changed_nothing += 1
    assert changed_nothing < 8, "only blanks and the like in the header may change"


@pytest.mark.only_on("linux", because="/proc says which files are mapped")
def test_a_file_that_was_read_is_not_held(folder: RunFolder) -> None:
    """On Windows, a resumed run could not replace a file that its tensors are mapped from."""
    Checkpoint(CONFIG, METRICS, trained(), {}).save(folder.checkpoint)
    read = checkpoint.read(folder)
    assert str(folder.checkpoint) not in Path("/proc/self/maps").read_text()
    assert read.metrics == METRICS
