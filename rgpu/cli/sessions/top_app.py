"""The screen of ``rgpu top``: three tables that follow the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from rich.markup import escape
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable, Footer, Static

from rgpu.cli.sessions.top_tables import (
    MOVE_COLUMNS,
    NODE_COLUMNS,
    QUEUE_COLUMNS,
    SESSION_COLUMNS,
    Picture,
    Rows,
    headline,
    move_rows,
    node_rows,
    queue_rows,
    session_rows,
)
from rgpu.session.errors import RgpuError
from rgpu.session.printable import printable

TABLES: tuple[tuple[str, tuple[str, ...], Callable[[Picture], Rows]], ...] = (
    ("nodes", NODE_COLUMNS, node_rows), ("sessions", SESSION_COLUMNS, session_rows),
    ("queue", QUEUE_COLUMNS, queue_rows), ("moves", MOVE_COLUMNS, move_rows))


class TopApp(App[None]):
    """The screen. ``look`` is called in a thread, again ``interval`` seconds after each answer."""

    CSS = """
    #headline { height: 1; text-style: bold; }
    #trouble { height: auto; color: $error; }
    DataTable { height: auto; max-height: 40%; margin-bottom: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit"), ("p", "hold", "Stop / go on")]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, look: Callable[[], Picture], interval: float = 1.0) -> None:
        super().__init__()
        self._look = look
        self._interval = interval
        self.held = False
        self.looks = 0  #: answers shown so far
        # Kept here, not looked up: an answer may arrive while the screen is being closed.
        self._headline = Static("asking the pool …", id="headline", markup=False)
        self._trouble = Static("", id="trouble", markup=False)
        self._tables: dict[str, DataTable[str]] = {
            name: DataTable(id=name, cursor_type="row", zebra_stripes=True) for name, _, _ in TABLES}

    def compose(self) -> ComposeResult:
        """Lay out headline, trouble line, tables and footer."""
        yield self._headline
        yield self._trouble
        yield from self._tables.values()
        yield Footer()

    def on_mount(self) -> None:
        """Make the tables' columns and begin to follow the pool."""
        for name, columns, _ in TABLES:
            self.table(name).add_columns(*columns)
        self.run_worker(self._follow(), exit_on_error=True)

    def table(self, name: str) -> DataTable[str]:
        """Return the table of that name."""
        return self._tables[name]

    def action_hold(self) -> None:
        """Pause or resume the display (key: p)."""
        self.held = not self.held

    async def _follow(self) -> None:
        """Show the pool's current state; while it does not answer, the last state and the error."""
        while True:
            if not self.held:
                trouble = ""
                try:
                    self.show(await asyncio.to_thread(self._look))
                except RgpuError as error:
                    trouble = printable(error.message)
                self._trouble.update(trouble)
            await asyncio.sleep(self._interval)

    def show(self, picture: Picture) -> None:
        """Fill the tables; the cursor stays on its line."""
        self._headline.update(printable(headline(picture)))
        for name, _, rows in TABLES:
            table, found = self.table(name), rows(picture)
            line = table.cursor_row
            table.clear()
            for row in found:
                table.add_row(*(escape(printable(cell)) for cell in row))
            if found:
                table.move_cursor(row=min(line, len(found) - 1))
        self.looks += 1
