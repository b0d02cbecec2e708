"""Tables for terminals and for pipes: one renderer, which never breaks a name, an address or a number.

On a terminal a line is as wide as the terminal: free text (``cut``) is shortened first, down to :data:`LEAST_TEXT`
columns; then whole columns are left out, in the order of their ``drop``. The columns that must stay may be wider than
the terminal. In a file or a pipe, and with ``-o wide``, each row is one line, however long.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.cells import cell_len, set_cell_size

from rgpu.session.errors import PoolUnavailable, UsageError
from rgpu.session.printable import printable

GAP = "  "
LEAST_TEXT = 20  #: terminal columns that free text keeps before other columns are left out
FORMATS = ("text", "wide", "json", "yaml", "name")
Row = Any


@dataclass(frozen=True, slots=True)
class Column:
    """One column. ``value(row)``: the sort key; ``text(value)``: the text shown.

    ``drop``: narrow terminals lose the columns with the highest numbers first; 0: never. ``wide``: only with
    ``-o wide``. ``cut``: free text, which may be shortened.
    """

    title: str
    value: Callable[[Row], Any]
    text: Callable[[Any], str] = str
    drop: int = 0
    wide: bool = False
    cut: bool = False

    def cell(self, row: Row) -> str:
        """Return the text of a row, in one line, without control characters."""
        value = self.value(row)
        return printable("" if value is None else " ".join(self.text(value).split()))


def lines(columns: Sequence[Column], rows: Iterable[Row], width: int | None = None, wide: bool = False,
          ellipsis: str = "…") -> list[str]:
    """Return heading and rows, each in one line. ``width``: of the terminal, in its columns; None: no limit."""
    columns = [column for column in columns if wide or not column.wide]
    rows = list(rows)
    grid = {column.title: [column.cell(row) for row in rows] for column in columns}
    room = None if wide else width
    widths = {column.title: max(map(cell_len, [column.title, *grid[column.title]])) for column in columns}
    columns, widths = fitting(columns, widths, room)
    found = []
    for cells in zip(*([column.title, *grid[column.title]] for column in columns), strict=True):
        parts = [_fit(cell, widths[column.title], ellipsis) for cell, column in zip(cells, columns, strict=True)]
        found.append(GAP.join(parts).rstrip())
    return found


def fitting(columns: Sequence[Column], widths: dict[str, int], room: int | None) -> tuple[list[Column], dict[str, int]]:
    """Return the columns that fit into ``room`` terminal columns, and the width of each."""
    kept = list(columns)
    if room is None:
        return kept, widths

    def least(column: Column) -> int:
        return min(widths[column.title], max(LEAST_TEXT, cell_len(column.title))) if column.cut else \
            widths[column.title]

    def total() -> int:
        return sum(map(least, kept)) + len(GAP) * (len(kept) - 1)

    while total() > room and (droppable := [column for column in kept if column.drop]):
        kept.remove(max(droppable, key=lambda column: column.drop))
    left, given = room - total(), {}
    for column in kept:
        more = min(widths[column.title] - least(column), max(0, left))
        given[column.title] = least(column) + more
        left -= more
    return kept, given


def _fit(cell: str, width: int, ellipsis: str) -> str:
    if cell_len(cell) <= width:
        return set_cell_size(cell, width)
    return set_cell_size(set_cell_size(cell, width - cell_len(ellipsis)).rstrip() + ellipsis, width)


def print_lines(found: Sequence[str]) -> None:
    """Print on stdout, with the heading in bold on a terminal."""
    for number, line in enumerate(found):
        print(f"\033[1m{line}\033[0m" if number == 0 and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
              else line)


def terminal_width() -> int | None:
    """Return the number of columns of stdout's terminal; None where it is none."""
    if not sys.stdout.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdigit() and int(given) else os.get_terminal_size(sys.stdout.fileno()).columns or 80


def ellipsis() -> str:
    """Return the mark of shortened text, in the terminal's encoding."""
    try:
        "…".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "~"
    return "…"


def show(columns: Sequence[Column], rows: Iterable[Row], wide: bool = False) -> None:
    """Print a table as wide as the terminal, if there is one."""
    print_lines(lines(columns, rows, terminal_width(), wide, ellipsis()))


def as_yaml(value: Any) -> str:
    """Return the data of ``-o json`` as YAML."""
    import yaml

    return str(yaml.safe_dump(json.loads(json.dumps(value, default=str)), sort_keys=False, allow_unicode=True))


def list_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``-o``, ``--sort`` and ``--watch`` to a verb that lists things."""
    for option in (
        click.option("--watch", metavar="SECONDS", type=click.FloatRange(0.1, 3600.0), is_flag=False, flag_value=2.0,
                     help="Repeat every so many seconds (2, where none are given), until Ctrl-C."),
        click.option("--sort", metavar="COLUMN", help="Sort by that column; -COLUMN: the other way round."),
        click.option("-o", "--output", type=click.Choice(FORMATS), default="text",
                     help="text fits the terminal; wide has every column; json and yaml have every field; name: names "
                          "alone.")):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Listing:
    """The listing of a verb's rows. ``name``: the field that ``-o name`` prints."""

    columns: Sequence[Column]
    name: str
    output: str = "text"
    sort: str | None = None

    def __post_init__(self) -> None:
        self.sorted([])  # a wrong column is reported before the pool is queried

    def sorted(self, rows: list[Row]) -> list[Row]:
        """Return the rows in the order of ``sort``. Raises :class:`UsageError` for a column that does not exist."""
        if not self.sort:
            return rows
        wanted = self.sort.lstrip("-+").lower()
        column = next((column for column in self.columns if column.title.lower() == wanted), None)
        if column is None:
            raise UsageError(f"there is no column {wanted!r}{did_you_mean(wanted, self.titles)}; there are: "
                             f"{', '.join(self.titles)}")
        there = [row for row in rows if column.value(row) not in (None, "")]
        there.sort(key=lambda row: _key(column.value(row)), reverse=self.sort.startswith("-"))
        return there + [row for row in rows if column.value(row) in (None, "")]

    @property
    def titles(self) -> list[str]:
        """The columns' names, for ``sort``."""
        return [column.title.lower() for column in self.columns if column.title]

    def print(self, rows: list[Row], compact: bool = False) -> None:
        """Print the rows. ``compact``: JSON in one line."""
        rows = self.sorted(rows)
        if self.output == "json":
            print(json.dumps(rows, indent=None if compact else 2, default=str))
        elif self.output == "yaml":
            print(as_yaml(rows), end="---\n" if compact else "")
        elif self.output == "name":
            for name in dict.fromkeys(str(row[self.name]) for row in rows):
                print(printable(str(name)))
        else:
            show(self.columns, rows, self.output == "wide")

    def follow(self, look: Callable[[], list[Row]], watch: float | None) -> None:
        """Print the rows that ``look`` returns; with ``watch`` again every ``watch`` seconds, until Ctrl-C."""
        if watch is None:
            self.print(look())
            return
        clear = sys.stdout.isatty() and self.output in ("text", "wide", "name")
        while True:
            try:
                rows = look()
            except PoolUnavailable as error:  # it may answer the next time
                print(f"rgpu: {printable(error.message)}", file=sys.stderr, flush=True)
            else:
                print("\033[H\033[2J" if clear else "", end="")
                self.print(rows, compact=True)
                sys.stdout.flush()
            time.sleep(watch)


def _key(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, str(value).casefold())


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?``, or nothing where no known name is near."""
    near = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
