"""What setting up tells the person who waits: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol


class Progress(Protocol):
    """Told of every step that can take long."""

    def step(self, what: str) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """One step, from its start to its end. The value given takes short news of how far it is."""
        ...

    def say(self, what: str) -> None:
        """A line of its own."""
        ...


class Silent:
    """Says nothing."""

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Callable[[str], None]]:  # noqa: ARG002
        """Nothing is shown."""
        yield lambda _news: None

    def say(self, what: str) -> None:
        """Nothing is shown."""


class Lines:
    """One plain line at the start and one at the end of a step: for logs and pipes."""

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Callable[[str], None]]:
        """Two lines."""
        start = time.monotonic()
        print(f"{what} ...", flush=True)
        yield lambda _news: None
        print(f"  done in {time.monotonic() - start:.1f} s", flush=True)

    def say(self, what: str) -> None:
        """One line."""
        print(what, flush=True)


class Spinner:
    """A spinner with the elapsed time while a step runs, then one line."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Callable[[str], None]]:
        """A moving line, replaced by a still one at the end."""
        from rich.progress import Progress as RichProgress
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        start = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with RichProgress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda news: bar.update(task, description=f"{what}: {news}")
        self._console.print(f"{what}: done in {time.monotonic() - start:.1f} s", markup=False)

    def say(self, what: str) -> None:
        """One line."""
        self._console.print(what, markup=False)


def make_progress(quiet: bool = False) -> Progress:
    """What fits where the output goes."""
    if quiet:
        return Silent()
    return Spinner() if sys.stdout.isatty() else Lines()


def size(bytes_: int) -> str:
    """A size for people: "98 MB"."""
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{max(1, round(bytes_ / 1e6))} MB"
