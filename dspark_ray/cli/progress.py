"""The progress bar of long commands, on standard error."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


def progress_bar(console: Console | None = None) -> Progress:
    return Progress(
        TextColumn("{task.description:44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console or Console(stderr=True),
    )


def advancing(progress: Progress, task: TaskID) -> Callable[[object], None]:
    """Called with whatever is done: one step further."""
    return lambda _: progress.advance(task)
