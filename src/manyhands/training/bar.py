"""The display for terminals: what stays scrolls up, and below it stands a bar with the step just finished.

epoch 3/10: train loss 0.1620, test accuracy 0.9778, 3.1 s of training
epoch 4/10 ━━━━━━━━━━━━━━━━━━━━━━━━  7/12  loss 0.0921  412 rows/s
cpu 60 rows 140 ms, cpu 60 rows 142 ms
"""

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from manyhands.training.work import StepReport

_REFRESHES_PER_SECOND = 8


class Bar:
    """A display for terminals. It takes over standard output and error until it is closed."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
        )
        self._task = self._bar.add_task("", figures="", visible=False)
        self._replicas = ""
        self._live = Live(
            console=self._console,
            get_renderable=self._picture,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )
        self._live.start()

    def say(self, line: str) -> None:
        """Write a line above the bar."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def busy(self, what: str) -> None:
        """Let the bar move to and fro until the next step."""
        self._bar.tasks[0].total = None  # what `update` is given as None it leaves alone
        self._bar.update(self._task, description=what, figures="", visible=True)

    def step(self, report: StepReport) -> None:
        """Move the bar to a step."""
        self._replicas = report.replicas
        self._bar.update(
            self._task,
            description=f"epoch {report.record.epoch}/{report.epochs}",
            completed=report.step_in_epoch,
            total=report.steps_per_epoch,
            figures=(
                f"{report.step_in_epoch}/{report.steps_per_epoch}  loss {report.record.loss:.4f}  "
                f"{report.rows_per_second:,.0f} rows/s"
            ),
            visible=True,
        )

    def download(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        """Move the bar to the bytes that have arrived."""
        of_total = f" of {total_bytes / 1e6:.1f}" if total_bytes else ""
        self._bar.update(
            self._task,
            description=f"downloading {name}",
            completed=done_bytes,
            total=total_bytes,
            figures=f"{done_bytes / 1e6:.1f}{of_total} MB",
            visible=True,
        )

    def close(self) -> None:
        """Take the bar away."""
        self._live.stop()

    def _picture(self) -> RenderableType:
        return Group(self._bar, Text(self._replicas, style="dim"))
