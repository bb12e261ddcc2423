"""Progress bars of long commands on stderr; none without a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Bar:
    """A progress bar, in bytes or in items. Safe to use from many threads."""

    def __init__(self, progress: Progress, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def advance(self, count: int) -> None:
        """Add `count` to the work done."""
        self._progress.advance(self._task, count)

    def expect(self, total: Callable[[], int]) -> None:
        """Set the total; `total` is called only if the bar is visible."""
        if not self._progress.disable:
            self._progress.update(self._task, total=total())


def byte_bar(doing: str, total: int | None = None) -> AbstractContextManager[Bar]:
    """Show a bar of bytes, with speed and remaining time."""
    return _bar(doing, total, DownloadColumn(), TransferSpeedColumn())


def count_bar(doing: str, total: int | None = None) -> AbstractContextManager[Bar]:
    """Show a bar of items that are done one by one."""
    return _bar(doing, total, MofNCompleteColumn())


@contextmanager
def _bar(doing: str, total: int | None, *more: ProgressColumn) -> Iterator[Bar]:
    columns = (TextColumn(doing), BarColumn(), *more, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress, total)
