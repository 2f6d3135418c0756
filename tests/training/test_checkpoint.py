import hashlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers.programs import run_script
from unisono.console.errors import FolderError
from unisono.training import checkpoint
from unisono.training.checkpoint import StepCount
from unisono.training.metrics import Written
from unisono.training.run_folder import RunFolder
from unisono.training.weights import Weights

CPU = [torch.device("cpu")]
WRITTEN = Written(123, hashlib.sha256(b"metrics").hexdigest())


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
    checkpoint.save(folder, trained.weights, StepCount(steps=steps, epochs=1), WRITTEN, CPU)
    return trained


def restore(folder: RunFolder) -> tuple[Trained, StepCount, list[str]]:
    said: list[str] = []
    saved = checkpoint.read(folder, said.append)
    assert saved.metrics == WRITTEN
    fresh = Trained(steps=0)
    return fresh, checkpoint.restore(saved, folder, fresh.weights, CPU), said


def test_everything_comes_back(folder: RunFolder) -> None:
    """T1"""
    trained = save(folder, steps=3)
    expected = (torch.rand(5), random.random())
    fresh, progress, said = restore(folder)
    assert (progress, said) == (StepCount(steps=3, epochs=1), [])
    assert all(map(torch.equal, fresh.state(), trained.state()))
    assert torch.equal(torch.rand(5), expected[0])
    assert random.random() == expected[1]


def test_equal_states_are_equal_files(folder: RunFolder) -> None:
    """T1"""
    trained = save(folder, steps=3)
    first = folder.checkpoint.read_bytes()
    restore(folder)
    checkpoint.save(folder, trained.weights, StepCount(steps=3, epochs=1), WRITTEN, CPU)
    assert folder.checkpoint.read_bytes() == first


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
    """T4"""
    earlier = save(folder, steps=2)
    save(folder, steps=3)
    damage(folder.checkpoint)

    fresh, progress, said = restore(folder)
    assert progress.steps == 2
    assert torch.equal(fresh.state()[0], earlier.state()[0])
    (line,) = said
    assert line.startswith("checkpoint.safetensors is ")
    assert line.endswith("using checkpoint.previous.safetensors, of step 2")

    save(folder, steps=4)
    truncate(folder.checkpoint)
    assert restore(folder)[1].steps == 2, "the good one has been kept, not the damaged one"
    save(folder, steps=5)
    truncate(folder.checkpoint)
    truncate(folder.previous_checkpoint)
    with pytest.raises(FolderError, match=r"no checkpoint in .* can be used: checkpoint.safetensors is damaged"):
        restore(folder)


def outcome_of(content: bytes, folder: RunFolder) -> list[torch.Tensor] | str:
    """Return what a file with this content is loaded to, or the error, which must be one line."""
    folder.checkpoint.write_bytes(content)
    try:
        return restore(folder)[0].state()
    except FolderError as error:
        message = str(error)
    assert "\n" not in message
    assert str(folder) in message
    return message


def places_of(content: bytes) -> list[int]:
    """Return every byte of the header and of the digest, which ends the file, and some of the tensors."""
    header = 8 + int.from_bytes(content[:8], "little")
    return [*range(header), *range(header, len(content) - 32, 53), *range(len(content) - 32, len(content))]


def test_a_checkpoint_that_was_cut_anywhere_is_an_error(folder: RunFolder) -> None:
    """T4"""
    save(folder, steps=1)
    content = folder.checkpoint.read_bytes()
    for length in places_of(content):
        assert "is damaged" in outcome_of(content[:length], folder)


def test_a_flipped_bit_is_an_error_or_changes_nothing(folder: RunFolder) -> None:
    """T4: a bit of a byte, and every bit of the header's size."""
    expected = save(folder, steps=1).state()
    content = folder.checkpoint.read_bytes()
    draw = random.Random(0)
    places = [(at, bit) for at in range(8) for bit in range(8)]
    places += [(at, draw.randrange(8)) for at in places_of(content)[8:]]
    changed_nothing = 0
    for at, bit in places:
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        outcome = outcome_of(bytes(damaged), folder)
        if not isinstance(outcome, str):
            assert all(map(torch.equal, outcome, expected))
            changed_nothing += 1
    assert changed_nothing < 8, "only blanks and the like in the header may change"


# ---- files that were written on purpose ----------------------------------------------------------------------


def forged(folder: RunFolder, change: Callable[[dict[str, torch.Tensor]], None]) -> bytes:
    """Return a checkpoint that someone has changed, with the digest of what is in it then."""
    tensors = safetensors.torch.load(folder.checkpoint.read_bytes())
    del tensors["sha256"]
    change(tensors)
    tensors["sha256"] = checkpoint._digest(tensors)
    return safetensors.torch.save(tensors)


def with_rest(**changes: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        rest = {**json.loads(tensors["run"].numpy().tobytes()), **changes}
        tensors["run"] = text(json.dumps(rest))

    return change


def text(content: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)


def with_generator(at: int, number: int) -> Callable[[dict[str, torch.Tensor]], None]:
    """Change a number in the state of torch's generator."""
    return lambda tensors: tensors["random.cpu"][at : at + 4].copy_(
        torch.tensor([number], dtype=torch.int32).view(torch.uint8)
    )


def beyond_the_generator(tensors: dict[str, torch.Tensor]) -> None:
    """Each number is one that torch accepts; then it would read 600 numbers beyond the end of its array."""
    with_generator(8, 624)(tensors)
    with_generator(16, 600)(tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("model.0.weight"),
        lambda tensors: tensors.update({"model.0.weight": torch.ones(3, 4, dtype=torch.complex64)}),
        lambda tensors: tensors.update({"model.0.weight": torch.ones(3, 0)}),
        lambda tensors: tensors.update({"model.more": torch.ones(1)}),
        lambda tensors: tensors.pop("momentum.2"),
        lambda tensors: tensors.update({"momentum.4": torch.ones(1)}),
        lambda tensors: tensors.pop("random.cpu"),
        lambda tensors: tensors.update({"random.cpu": torch.zeros(3, dtype=torch.uint8)}),
        lambda tensors: tensors.update({"random.cpu": torch.zeros(5056)}),
        with_generator(8, 625),
        with_generator(8, -1),
        with_generator(16, -1),
        beyond_the_generator,
        lambda tensors: tensors.update(run=text("[" * 100_000)),
        lambda tensors: tensors.update(run=text("[1" + ", 1" * 1_000_000 + "]")),
        lambda tensors: tensors.update(run=text('{"format": 1}')),
        lambda tensors: tensors.update(run=text("[]")),
        lambda tensors: tensors.update(run=torch.ones(100)),
        with_rest(format=2),
        with_rest(progress={"steps": -1, "epochs": 0}),
        with_rest(progress={"steps": "1", "epochs": 0}),
        with_rest(progress={"steps": True, "epochs": 0}),
        with_rest(progress={"steps": 1, "epochs": 0, "more": 1}),
        with_rest(progress=[1]),
        with_rest(metrics={"num_bytes": 1e300, "sha256": ""}),
        with_rest(metrics=None),
        with_rest(python_random=None),
        with_rest(python_random=[3, [1, 2], None]),
        with_rest(python_random=[3, [2**40] * 625, None]),
        with_rest(python_random=[3, [0.5] * 625, None]),
        with_rest(python_random=[3, [1] * 624 + [10**9], None]),
    ],
)
def test_a_forged_checkpoint_is_an_error(folder: RunFolder, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """T5: its digest is that of what is in it."""
    save(folder, steps=1)
    python, cpu = random.getstate(), torch.get_rng_state()
    assert isinstance(outcome_of(forged(folder, change), folder), str)
    random.setstate(python)
    torch.set_rng_state(cpu)


ABSURD = [0, 1, 7, 8, 2**20, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, 1.5, None, "1", [], {}]


@pytest.mark.property
@given(data=st.data())
def test_absurd_sizes_in_the_header_are_an_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """T5: shapes, offsets and types that the bytes of the file do not bear out."""
    folder = RunFolder(tmp_path_factory.getbasetemp() / "absurd")
    if not folder.path.exists():
        folder.path.mkdir()
        save(folder, steps=1)
        folder.checkpoint.rename(folder.path / "good")
    content = (folder.path / "good").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    entry = header[data.draw(st.sampled_from(sorted(header)))]
    numbers = st.lists(st.sampled_from(ABSURD), max_size=4)
    key, values = data.draw(
        st.sampled_from(
            [("shape", numbers), ("data_offsets", numbers), ("dtype", st.sampled_from(["F64", "U8", "BOOL", "F4", ""]))]
        )
    )
    before, entry[key] = entry[key], data.draw(values)
    if entry[key] == before:
        return
    changed = json.dumps(header).encode()
    outcome = outcome_of(len(changed).to_bytes(8, "little") + changed + content[8 + size :], folder)
    assert isinstance(outcome, str)


def test_a_checkpoint_of_another_model_is_an_error(folder: RunFolder) -> None:
    """T4"""
    save(folder, steps=1)
    other = nn.Linear(2, 2)
    saved = checkpoint.read(folder, print)
    with pytest.raises(FolderError, match="does not fit the run"):
        checkpoint.restore(saved, folder, Weights(other), CPU)


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
        checkpoint.save(folder, trained, StepCount(steps=1), WRITTEN, CPU)
        checkpoint.restore(checkpoint.read(folder, print), folder, other, CPU)
        for ours, theirs in zip([*other.masters, *other.momenta], [*trained.masters, *trained.momenta], strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dim() < 4 or ours.is_contiguous(memory_format=resumed[0])


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on memory")
def test_small_files_that_promise_much_take_no_memory() -> None:
    """T5: each promises gigabytes; the program that reads them may have a quarter of one more than it has."""
    done = run_script("""
        import json, resource, tempfile
        from pathlib import Path

        import safetensors.torch
        from unisono.console.errors import FolderError
        from unisono.training import checkpoint
        from unisono.training.metrics import Metrics, Written
        from unisono.training.run_folder import RunFolder

        folder = RunFolder(Path(tempfile.mkdtemp()))
        tensor = {"dtype": "F32", "shape": [1 << 30], "data_offsets": [0, 1 << 32]}
        header = json.dumps({"run": tensor}).encode()
        folder.checkpoint.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1000))
        folder.previous_checkpoint.write_bytes((1 << 32).to_bytes(8, "little") + b"{" * 1000)
        folder.config.write_text("[" * 1_000_000)
        folder.metrics.write_bytes(b"[" * 1_000_000)

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28),) * 2)
        for read, error in [
            (lambda: checkpoint.read(folder, print), FolderError),
            (folder.saved_config, FolderError),
            (lambda: Metrics.read(folder.metrics, steps=1, epochs=0, written=Written(1 << 50, "")), FolderError),
        ]:
            try:
                read()
            except error:
                continue
            raise SystemExit("no error")
    """)
    assert (done.returncode, done.stderr) == (0, "")
