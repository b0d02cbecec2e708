"""``rgpu journal show|verify PATH``: look into a journal file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rgpu.cli import common
from rgpu.session import journal_file
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID
from rgpu.session.errors import Corrupt, NotFound


@click.group("journal")
def command() -> None:
    """Look into journal files."""


@command.command("verify")
@click.argument("path", type=click.Path(path_type=Path))
@common.output_option
@common.verb
def verify(path: Path, output: str) -> None:
    """Check every record of the journal at PATH; a damaged one exits 8 and names offset and reason."""
    _exists(path)
    report = journal_file.verify(path)
    common.emit(report.as_dict(), output, lambda v: common.out.print(
        "\n".join(f"{key}: {item}" for key, item in v.items()), markup=False))


@command.command("show")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--limit", default=0, help="Show at most this many records (0: all).")
@common.output_option
@common.verb
def show(path: Path, limit: int, output: str) -> None:
    """Print the calls of the journal at PATH in order."""
    _exists(path)
    rows = []
    with journal_file.JournalFileReader(path) as reader:
        for record in reader:
            rows.append(_row(record))
            if limit and len(rows) >= limit:
                break
    common.emit(rows, output, lambda values: print("\n".join(_line(v) for v in values)))


def _exists(path: Path) -> None:
    if not path.is_file():
        raise NotFound(f"{path} is no file")


def _row(record: Any) -> dict[str, Any]:
    call = BY_ID.get(record.call_id)
    if call is None:
        raise Corrupt(f"position {record.seq}: unknown call id {record.call_id}", seq=record.seq, reason="unknown call")
    values = decoders.decode(record.call_id, record.args)._asdict()
    return {"seq": record.seq, "thread": record.thread, "call": call.name, "answer": call.answer.value,
            "payload": len(record.payload),
            "arguments": {k: f"{len(v)} bytes" if isinstance(v, (bytes, memoryview)) else v for k, v in values.items()}}


def _line(row: dict[str, Any]) -> str:
    arguments = ", ".join(f"{k}={hex(v) if k in ('address', 'destination', 'source') else v}"
                          for k, v in row["arguments"].items())
    payload = f" +{row['payload']} bytes" if row["payload"] else ""
    return f"{row['seq']:8d}  t{row['thread']:<3d} {row['call']}({arguments}){payload}"
