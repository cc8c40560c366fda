"""What a run tells while it runs: a progress bar or plain lines, TensorBoard and metrics.jsonl."""

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter


class Telemetry:
    """The log of one run. Only the leading process has one."""

    def __init__(self, folder: Path, *, title: str, first_step: int, total_steps: int, steps_per_epoch: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._title, self._per_epoch, self._total = title, steps_per_epoch, total_steps
        self._board = SummaryWriter(str(folder), purge_step=first_step)
        self._lines = _reopened(folder / "metrics.jsonl", first_step=first_step)
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(title, total=total_steps, completed=first_step, speed="")
        self._since, self._images = time.monotonic(), 0

    def __enter__(self) -> "Telemetry":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._board.close()
        self._lines.close()

    def step(self, images: int) -> None:
        """Count one step of `images` images over all processes."""
        self._images += images
        speed = self._images / max(time.monotonic() - self._since, 1e-9)
        self._progress.update(self._task, advance=1, speed=f"{speed:,.0f} images/s")

    def epoch(self, number: int, *, step: int, **values: float) -> None:
        """Record the end of epoch `number` (from 1), after `step` steps."""
        seconds = max(time.monotonic() - self._since, 1e-9)
        values["images_per_s"] = self._images / seconds
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._lines.write(json.dumps({"title": self._title, "epoch": number, "step": step, **values}) + "\n")
        self._lines.flush()
        left_s = (self._total - step) / self._per_epoch * seconds
        speed = f"{values.pop('images_per_s'):,.0f} images/s"
        numbers = "  ".join([*(f"{name} {value:.4g}" for name, value in values.items()), speed])
        self._console.print(
            f"{self._title}: epoch {number}/{self._total // self._per_epoch}  {numbers}  {left_s:.0f} s left",
            highlight=False,
            soft_wrap=True,
        )
        self._since, self._images = time.monotonic(), 0


def _reopened(path: Path, *, first_step: int) -> TextIO:
    """Open the log of a run that goes on at `first_step`: what was written of later steps is repeated, so it goes."""
    lines = path.read_text().splitlines() if path.is_file() else []
    kept = [line for line in lines if json.loads(line)["step"] <= first_step]
    stream = path.open("w")
    stream.writelines(f"{line}\n" for line in kept)
    return stream
