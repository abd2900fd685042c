"""The demo's output: steps with a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.status import Status
from rich.syntax import Syntax
from rich.table import Table

from tailrace_demo.proof import Claim

_PLAIN_INTERVAL_S = 5.0


class ScreenStep:
    """A running step. `note` shows its progress; `result` is shown at its end."""

    def __init__(self, title: str, status: Status | None, console: Console) -> None:
        self._title = title
        self._status = status
        self._console = console
        self._noted_at = time.monotonic()
        self.result = ""

    def note(self, text: str) -> None:
        """Show progress: at once on a terminal, every few seconds elsewhere."""
        if self._status is not None:
            self._status.update(f"{self._title}  [dim]{escape(text)}[/]")
        elif time.monotonic() - self._noted_at >= _PLAIN_INTERVAL_S:
            self._noted_at = time.monotonic()
            self._console.print(f"        … {escape(text)}", highlight=False)


class Screen:
    """Prints the demo's steps and results to standard output."""

    def __init__(self) -> None:
        self._console = Console()
        if not self._console.is_terminal:  # so that paths in a file or pipe are not wrapped at 80 columns
            self._console = Console(width=160)
        self._started = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Iterator[ScreenStep]:
        """Show `title` while the body runs, and its result and duration at the end."""
        began = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(title, spinner="dots") as status:
                yield (step := ScreenStep(title, status, self._console))
        else:
            yield (step := ScreenStep(title, None, self._console))
        result = f"  [dim]{escape(step.result)}[/]" if step.result else ""
        seconds = time.monotonic() - began
        self._console.print(f"[green]✓[/] [dim]{seconds:5.1f} s[/]  {title}{result}", highlight=False)

    def headline(self, text: str, below: str) -> None:
        self._console.print(f"\n[bold]{text}[/]\n[dim]{below}[/]\n", highlight=False)

    def file(self, path: Path, text: str) -> None:
        """Show a configuration file."""
        body = Syntax(text.rstrip(), "yaml", background_color="default", theme="ansi_dark")
        title = f"[dim]{escape(str(path))}[/]"
        if self._console.is_terminal:
            self._console.print(Panel.fit(body, title=title, title_align="left", border_style="dim"))
        else:
            self._console.print(Group(f"\n{path}:", body, ""))

    def findings(self, found: list[Claim]) -> None:
        """Show what was claimed and what was found."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("")
        table.add_column("claimed")
        table.add_column("found")
        for finding in found:
            mark = "[green]✓[/]" if finding.holds else "[bold red]✗[/]"
            table.add_row(mark, escape(finding.claim), escape(finding.found))
        self._console.print()
        self._console.print(table, highlight=False)

    def verdict(self, proven: bool) -> None:
        seconds = time.monotonic() - self._started
        if proven:
            text = "[bold green]Proven:[/] killed in the middle, and not one change lost, doubled or torn."
        else:
            text = "[bold red]Not proven:[/] see above. This is a bug of Tailrace; please report it."
        self._console.print(f"\n{text} [dim]({seconds:.0f} s)[/]", highlight=False)

    def pointers(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Show commands or paths, each with a description."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column(no_wrap=True)
        table.add_column(style="dim")
        for what, why in rows:
            table.add_row(escape(what), escape(why))
        self._console.print(f"\n[bold]{title}[/]")
        self._console.print(table, highlight=False)
