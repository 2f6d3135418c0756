"""torchrun on this machine."""

import contextlib
import signal
from collections.abc import Iterator, Sequence

import torch

from clusters import page, trainings, uneven_rows
from clusters.part import Check, Part
from clusters.site import CheckError, Site


class _Checks:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.data = site.folder / "fashion"
        trainings.write_data(self.data)
        site.write("train.py", page.training_script())

    def numbers(self) -> str:
        kept = self.site.new_folder("numbers")
        command = page.changed(
            page.block("clusters", number=1).strip(), {"--nproc-per-node 2": "--standalone --nproc-per-node 3"}
        )
        self.site.expect("sh", "-c", command, env={"UNISONO_CLUSTERS_KEEP": str(kept)})
        return uneven_rows.compared(kept, 3)

    def killed(self) -> str:
        output = self.site.folder / "runs" / "two"
        command = f"{page.block('torchrun', 'When a process dies').strip()} {trainings.OPTIONS} --data {self.data}"
        running = self.site.start("sh", "-c", command, to=self.site.folder / "killed.log")
        self.site.wait_until(lambda: len(trainings.records_of(output)) >= trainings.BEGUN, "the training has begun")
        (rank,) = self.site.processes(RANK="1")
        rank.kill()
        status = running.wait(180)
        text = self.site.read_log(self.site.folder / "killed.log")
        if status or "going on after step" not in text:
            raise CheckError(f"status {status}, expected that it goes on with its run")
        self.site.expect("sh", "-c", command.replace("runs/two", "runs/undisturbed"))
        trainings.expect_same_bytes(output, self.site.folder / "runs" / "undisturbed")
        return "torchrun starts both again; weights: the bytes of an undisturbed run"

    def stopped_and_resumed(self) -> str:
        output = self.site.folder / "runs" / "stopped"
        command = page.changed(
            f"{page.block('torchrun', 'The training command').strip()} {trainings.OPTIONS} --data {self.data}",
            {"runs/two": "runs/stopped"},
        )
        running = self.site.start("sh", "-c", f"exec {command}", to=self.site.folder / "stopped.log")
        self.site.wait_until(lambda: len(trainings.records_of(output)) >= trainings.BEGUN, "the training has begun")
        running.send_signal(signal.SIGTERM)
        running.wait(60)
        if "stopped after step" not in self.site.read_log(self.site.folder / "stopped.log"):
            raise CheckError("no line says after which step it stopped")
        launch, _, _ = command.partition(" train ")
        self.site.expect("sh", "-c", f"{launch} train --resume runs/stopped")
        trainings.expect_same_bytes(output, self.site.folder / "runs" / "undisturbed")
        return "saved after the step in flight; weights: the bytes of an undisturbed run"


@contextlib.contextmanager
def _open(site: Site) -> Iterator[Sequence[Check]]:
    checks = _Checks(site)
    yield [
        Check("3 ranks with uneven rows, against one device", checks.numbers),
        Check("a rank is killed", checks.killed),
        Check("SIGTERM, then `--resume`", checks.stopped_and_resumed),
    ]


PART = Part("torchrun", "torchrun", lambda: torch.__version__.partition("+")[0], _open)
