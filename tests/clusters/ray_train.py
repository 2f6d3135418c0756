"""Ray Train on this machine: a cluster of one node, which Ray starts and ends with the script."""

import contextlib
import importlib.metadata
import os
import signal
from collections.abc import Iterator, Sequence

from clusters import page, trainings, uneven_rows
from clusters.part import Check, Part
from clusters.site import CheckError, Site

_BEGIN = "import ray\n\nray.init(num_cpus=8, include_dashboard=False, _temp_dir={folder!r})\n\n"


class _Checks:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.shared = site.folder / "shared"
        trainings.write_data(self.shared / "fashion")
        site.environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}

    def numbers(self) -> str:
        kept = self.site.new_folder("numbers")
        function = page.with_training(page.block("ray"))
        self._run_script("numbers", function, UNISONO_CLUSTERS_KEEP=str(kept))
        return uneven_rows.compared(kept, 4)

    def killed(self) -> str:
        kept = self.site.new_folder("killed")
        function = page.with_training(page.block("ray"))
        script = self._script("killed", function, {"max_failures=3": "max_failures=0"})
        env = {"UNISONO_CLUSTERS_KEEP": str(kept), "UNISONO_CLUSTERS_KILL": "1"}
        ended = self.site.run("python", script, env=env)
        if not ended.status:
            raise CheckError("status 0, expected that fit() raises")
        return f"fit() raises: all have ended {uneven_rows.seconds_since_kill(kept)}"

    def command(self) -> str:
        self._run_script("command", self._command("undisturbed"))
        alone = self.site.folder / "alone"
        trainings.run_alone(self.site, self.shared / "fashion", alone)
        difference = trainings.loss_difference(self.shared / "runs" / "undisturbed", alone)
        return f"losses of one process, within {difference:.0e}, in float32"

    def command_with_a_killed_worker(self) -> str:
        script = self._script("restarted", self._command("ray"))
        output, log = self.shared / "runs" / "ray", self.site.folder / "restarted.log"
        running = self.site.start("python", script, to=log)
        self.site.wait_until(lambda: len(trainings.records_of(output)) >= trainings.BEGUN, "the training has begun")
        os.kill(trainings.pid_of_first_rank(output), signal.SIGKILL)
        status = running.wait(180)
        text = self.site.read_log(log)
        if status or "going on after step" not in text:
            raise CheckError(f"status {status}, expected that it goes on with its run")
        trainings.expect_same_bytes(output, self.shared / "runs" / "undisturbed")
        return "Ray calls the function again, which goes on; weights: the bytes of an undisturbed run"

    def _command(self, name: str) -> str:
        words = ", ".join(f'"{word}"' for word in trainings.OPTIONS.split())
        changes = {"/shared/": f"{self.shared}/", "runs/ray": f"runs/{name}", '"--resume"]': f'"--resume", {words}]'}
        return page.changed(page.block("ray", "The training command"), changes)

    def _script(self, name: str, function: str, changes: dict[str, str] | None = None) -> str:
        begin = _BEGIN.format(folder=str(self.site.folder / "ray-files"))
        trainer = page.changed(page.block("ray", number=1), changes or {})
        return str(self.site.write(f"ray_{name}.py", f"{begin}{function}\n\n{trainer}"))

    def _run_script(self, name: str, function: str, **env: str) -> None:
        self.site.expect("python", self._script(name, function), env=env)


@contextlib.contextmanager
def _open(site: Site) -> Iterator[Sequence[Check]]:
    checks = _Checks(site)
    yield [
        Check("4 workers with uneven rows, against one device", checks.numbers),
        Check("a worker is killed", checks.killed),
        Check("`unisono train` in 4 workers", checks.command),
        Check("`unisono train`, a worker is killed", checks.command_with_a_killed_worker),
    ]


PART = Part("ray", "Ray Train", lambda: importlib.metadata.version("ray"), _open, packages=("ray",))
