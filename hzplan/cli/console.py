"""Consoles, tables and progress in the terminal; units of measure are ``show.readable``'s."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from hzplan.errors import printable
from hzplan.show.readable import count, difference, duration, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Bar", "count", "difference", "duration", "remark", "size", "stderr", "stdout", "table"]

WIDTH = 80
FIRST_LINE_S, LAST_LINE_S = 5.0, 600.0
"""Seconds between lines of progress where stderr is no terminal: at first, and at most."""

_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
"""Names and paths are the user's: ``[bold]`` in them is text."""


def _plain(value: object) -> Any:
    """Text from outside made safe to print: one line, without commands for a terminal or a CI system."""
    return printable(value).replace("::", ": :").replace("##[", "# #[") if isinstance(value, str) else value


class _Table(Table):
    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(_plain, cells), **options)


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Line breaks are ours; what is on the lines need not be."""
        shown = ("\n".join(map(_plain, o.split("\n"))) if isinstance(o, str) else o for o in objects)
        super().print(*shown, **options)


def stdout() -> Console:
    """Results go here; 80 columns unless a terminal says otherwise."""
    return _Console(width=None if sys.stdout.isatty() else WIDTH, **_PLAIN)


def stderr() -> Console:
    """Progress and remarks go here."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH, **_PLAIN)


def remark(text: str) -> None:
    """A line for the user that is no result; never wrapped, so that it can be copied."""
    print(text, file=sys.stderr, flush=True)


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = _Table(
        title=_plain(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", overflow="fold")
    return made


class Bar:
    """Progress on stderr: a moving bar in a terminal, else a line now and then."""

    def __init__(self, title: str, *, shown: bool = True) -> None:
        """``shown`` is False on every rank but one."""
        self._title, self._shown = title, shown
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._began_at = self._said_at = time.monotonic()
        self._unsaid, self._spoke = "", False

    def __enter__(self) -> Bar:
        if self._shown and sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                console=stderr(),
                transient=True,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task(self._title, total=1.0, text="")
            self._progress.start()
        return self

    def update(self, text: str, fraction: float) -> None:
        """Show a text, and the fraction of the whole that is done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=fraction, text=text)
        elif self._shown:
            self._unsaid = f"{self._title} {fraction:4.0%}  {text}"
            now = time.monotonic()
            if now - self._said_at >= min(max(FIRST_LINE_S, (now - self._began_at) / 4), LAST_LINE_S):
                self._say()

    def _say(self) -> None:
        if self._unsaid:
            print(self._unsaid, file=sys.stderr, flush=True)
            self._spoke = True
        self._said_at, self._unsaid = time.monotonic(), ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if kind is None and self._spoke:  # what was over at once needs no last word
            self._say()
