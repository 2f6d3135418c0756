"""`make races`: what it says, how it ends, and that it finds a planted fault."""

import sys
from pathlib import Path

import pytest

from async_device import races

LATE = 9  # a seed of the longest delays


def test_a_seed_whose_bits_are_those_without_delays(capsys: pytest.CaptureFixture[str]) -> None:
    assert races.main(["--only", "training", "--seed", str(LATE)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"seed {LATE}, delays up to 3000 us: training has the same bits")
    assert last.startswith("1 runs with 1 seeds")


def test_the_first_failure_ends_it_and_is_repeated_by_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(races, "KEPT", tmp_path)
    fault = "a copy to the host is not waited for"
    assert races.main(["--only", "training", "--first", str(LATE), "--seeds", "9", "--fault", fault]) == 1
    out = capsys.readouterr().out
    assert "tensors have other bits than without delays:\n    step 0, " in out
    assert (tmp_path / f"training-seed-{LATE}.txt").read_text().startswith("[{")
    last = out.splitlines()[-1]
    assert last.startswith("1 runs with 1 seeds")
    assert last.endswith(f"-m async_device.races --seed {LATE} --only training --devices 2 --fault '{fault}'")


def test_a_run_that_hangs_is_ended_with_its_stacks() -> None:
    ended = races._end([sys.executable, "-c", "import time; time.sleep(1000)"], {}, 5.0)
    assert ended.failure is not None
    assert "it takes longer than 5 s" in ended.failure
    assert 'File "<string>", line 1' in ended.failure


def test_ctrl_c_ends_it_with_a_summary(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(self: races.Races, program: str, seed: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(races.Races, "run", interrupted)
    assert races.main([]) == 130
    assert capsys.readouterr().out.strip().startswith("0 runs with 1 seeds in 0.0 minutes: interrupted")


@pytest.mark.parametrize("ends_by", ["a failure", "an error of the machine"])
def test_what_was_found_is_kept(
    ends_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It showed the last lines only; and an error of its own ended it without a word on what had been run."""

    def ended(self: races.Races, program: str, seed: int, delay_us: int) -> races.Run:
        if ends_by == "a failure":
            return races.Run("exit status 1:\nthe last line", "all lines\nthe last line")
        raise OSError("no memory")

    monkeypatch.setattr(races.Races, "_ended", ended)
    monkeypatch.setattr(races, "KEPT", tmp_path / "kept")
    assert races.main(["--only", "map", "--seed", "3"]) == 1
    out = capsys.readouterr().out
    if ends_by == "a failure":
        kept = tmp_path / "kept" / "map-seed-3.txt"
        assert f"all of its output: {kept})" in out
        assert kept.read_text() == "all lines\nthe last line"
    else:
        assert out.splitlines()[-1] == "0 runs with 1 seeds in 0.0 minutes: ended by OSError: no memory"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--minutes", "0"], "--minutes, --seeds and --limit: expected more than 0"),
        (["--seed", "-1"], "--seed and --first: expected 0 or more"),
        (["--only", "trainin"], "argument --only: invalid choice: 'trainin'"),
        (["--fault", "none"], "--fault: expected one of "),
        (["--devices", "5"], "--devices: expected 2, 3 or 4, but got 5"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        races.main(arguments)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"races: error: {error}")
