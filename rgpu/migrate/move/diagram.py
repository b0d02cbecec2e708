"""Generates docs/developers/move-tables.md, the diagrams of the three tables of a move, from the tables.

    python -m rgpu.migrate.move.diagram           writes it
    python -m rgpu.migrate.move.diagram --check   exit status 1 if it differs
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rgpu.migrate.move.coordinator import COORDINATOR
from rgpu.migrate.move.destination import DESTINATION
from rgpu.migrate.move.machine import Machine
from rgpu.migrate.move.source import SOURCE

OUTPUT = "docs/developers/move-tables.md"

HEAD = """# The tables of a move

Made by `python -m rgpu.migrate.move.diagram` from the tables that the workers and the leader run. An arrow is a row:
event, [guard] where figures decide, / commands. A state's first row that fits is taken; an event without a row changes
nothing. What they mean is in [ownership.md](ownership.md#the-move), what is done in
[moves.md](moves.md).
"""
ROLES: tuple[tuple[str, str, Machine[Any]], ...] = (
    ("Source", "the worker that has the session: `rgpu/server/worker/move/departure.py`", SOURCE),
    ("Destination", "the worker that is to have it: `rgpu/server/worker/move/arrival.py`", DESTINATION),
    ("Coordinator", "the elected leader: `rgpu/migrate/leader/moving/mover.py`", COORDINATOR))


def diagram(machine: Machine[Any]) -> str:
    """Return a table as Mermaid's stateDiagram."""
    lines = ["stateDiagram-v2", "    direction TB", "    [*] --> idle"]
    for row in machine.rows:
        guard = f" [{row.guard}]" if row.guard else ""
        commands = f" / {', '.join(row.commands)}" if row.commands else ""
        lines.append(f"    {row.state} --> {row.next} : {row.event}{guard}{commands}")
    lines += [f"    {state} --> [*]" for state in sorted(machine.ends)]
    return "\n".join(lines)


def page() -> str:
    """Return the whole text of docs/developers/move-tables.md."""
    parts = [HEAD]
    for name, who, machine in ROLES:
        parts.append(f"\n## {name}\n\nRun by {who}. {len(machine.rows)} rows, {len(machine.commands)} commands.\n\n"
                     f"```mermaid\n{diagram(machine)}\n```\n")
    return "".join(parts)


def main(arguments: list[str]) -> int:
    """Write the page of the tables, or with ``--check`` report whether it is stale; return the exit status."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(__file__).resolve().parents[3] / OUTPUT
    if arguments:
        if not path.is_file() or path.read_text(encoding="utf-8") != page():
            print(f"{OUTPUT} does not follow from the tables: run python -m rgpu.migrate.move.diagram")
            return 1
        return 0
    path.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
