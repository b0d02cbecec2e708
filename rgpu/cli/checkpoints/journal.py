"""``rgpu journal show|verify|replay|diff``: look into journals and recorded sessions, and run them again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from rgpu.api.settings import parse_size
from rgpu.cli import common
from rgpu.cli.groups import Group
from rgpu.link.loggers import configure_logging
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME
from rgpu.session.errors import Corrupt, NotFound, UsageError
from rgpu.session.journal.record import AWAITED, Record
from rgpu.session.journal.recording import SUFFIX, Recording
from rgpu.session.printable import printable

#: Arguments that are printed as addresses.
ADDRESSES = ("address", "destination", "source")
#: Calls that free memory. By default a replay takes a snapshot before the last series of them.
ENDS = frozenset(BY_NAME[name].id for name in ("memory_free", "memory_free_wait", "memory_unmap"))


@click.group("journal", cls=Group)
def command() -> None:
    """Journal files and recorded sessions: show, verify, replay, compare.

    PATH is a journal file, or a folder of them that follow one another. Record a
    session with `rgpu run --record DIR`.
    """


_path = click.argument("path", type=click.Path(path_type=Path))
_device = click.option("--device", default="cpu:0", show_default=True, metavar="DEV", help="cpu:N or cuda:N.")
_memory = click.option("--device-memory", default="8GiB", show_default=True, metavar="SIZE",
                       help="Memory of a cpu device.")


@command.command("verify")
@_path
@common.output_option
@common.verb
def verify(path: Path, output: str) -> None:
    """Check every record of PATH; a damaged one exits 8 and names offset and reason."""
    report = Recording(path).verify()
    common.emit(report.as_dict(), output, lambda v: common.out.print(
        "\n".join(f"{key}: {item}" for key, item in v.items()), markup=False))


@command.command("show")
@_path
@click.option("--limit", default=0, help="Show at most this many records (0: all).")
@click.option("--from", "first", default=0, metavar="N", help="From this position on.")
@click.option("--to", "last", default=0, metavar="N", help="Up to this position (0: the end).")
@click.option("--call", "calls", multiple=True, metavar="NAME", help="Only this wire call; repeat for several.")
@click.option("--thread", type=int, metavar="T", help="Only calls of this thread of the client.")
@click.option("--awaited", is_flag=True, help="Only calls that the program waited for.")
@common.output_option
@common.verb
def show(path: Path, limit: int, first: int, last: int, calls: tuple[str, ...], thread: int | None, awaited: bool,
         output: str) -> None:
    """Print the calls of PATH in order; with -o json a list with one call in each line."""
    unknown = sorted(set(calls) - BY_NAME.keys())
    if unknown:
        raise UsageError(f"no wire call is named {', '.join(unknown)} (docs/users/coverage.md lists them)")
    wanted = {BY_NAME[name].id for name in calls}
    shown = 0
    print("[" if output != "text" else f"{'POSITION':>8s}  {'THREAD':6s} CALL")
    for record in Recording(path):
        if last and record.seq > last or limit and shown >= limit:
            break
        if record.seq < first or wanted and record.call_id not in wanted or awaited and not record.flags & AWAITED \
                or thread is not None and record.thread != thread:
            continue
        row = _row(record)
        print((",\n" if shown else "") + json.dumps(row) if output != "text" else printable(_line(row)),
              end="" if output != "text" else "\n")
        shown += 1
    if output != "text":
        print("\n]")


def _row(record: Record) -> dict[str, Any]:
    call = BY_ID.get(record.call_id)
    if call is None:
        raise Corrupt(f"position {record.seq}: unknown call id {record.call_id}", seq=record.seq, reason="unknown call")
    values = decoders.decode(record.call_id, record.args)._asdict()
    return {"seq": record.seq, "thread": record.thread, "call": call.name, "answer": call.answer.value,
            "awaited": bool(record.flags & AWAITED), "payload": len(record.payload),
            "arguments": {k: f"{len(v)} bytes" if isinstance(v, (bytes, memoryview)) else v for k, v in values.items()}}


def _line(row: dict[str, Any]) -> str:
    arguments = ", ".join(f"{k}={hex(v) if k in ADDRESSES and isinstance(v, int) else v}"
                          for k, v in row["arguments"].items())
    payload = f" +{row['payload']} bytes" if row["payload"] else ""
    return f"{row['seq']:8d}  t{row['thread']:<5d} {'*' if row['awaited'] else ' '}{row['call']}({arguments}){payload}"


@command.command("replay")
@_path
@_device
@_memory
@click.option("--at", "positions", multiple=True, type=int, metavar="N",
              help="Take a snapshot after this position; repeat for several.")
@click.option("--snapshot", "folder", type=click.Path(path_type=Path), metavar="DIR",
              help="Write the digests of all pages and objects to DIR/POSITION.json, for `rgpu journal diff`.")
@click.option("--image", "checkpoint", metavar="STORE/NAME",
              help="Also write a checkpoint of the end state into the directory store STORE.")
@common.output_option
@common.verb
def replay(path: Path, device: str, device_memory: str, positions: tuple[int, ...], folder: Path | None,
           checkpoint: str | None, output: str) -> None:
    """Run the recorded session PATH again on a device, without its program.

    Its answers are compared with the recorded ones; a difference exits 8. After the
    last call and after each --at (default: before memory is freed) it prints a
    snapshot: digests of all the session's pages and live objects.
    """
    configure_logging(level="warning")  # stdout is for the result
    result, snapshots = _replay(path, device, device_memory, positions, checkpoint)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for found in snapshots:
            (folder / f"{found.position}.json").write_bytes(found.encode())
    common.emit(result, output, _show_replay)
    if result["divergences"]:
        raise Corrupt(f"the replay diverged {len(result['divergences'])} times: {result['divergences'][0]['what']}",
                      seq=result["divergences"][0]["seq"], reason="divergence")


def _show_replay(result: dict[str, Any]) -> None:
    for key in ("session", "device", "position", "seconds", "answers", "answers_compared", "answers_digest", "error"):
        common.out.print(f"{key}: {result[key]}", markup=False)
    common.table(("POSITION", "PAGES", "OBJECTS", "DIGEST"), (
        (s["position"], s["pages"], s["objects"], s["digest"]) for s in result["snapshots"]), drop=("OBJECTS", "PAGES"))


def _replay(path: Path, device: str, memory: str, positions: tuple[int, ...], checkpoint: str | None = None
            ) -> tuple[dict[str, Any], list[Any]]:
    """Replay; return the result that `replay` prints, and the snapshots. Raises :class:`RgpuError`."""
    from rgpu.server.address_layout import ensure_fixed
    from rgpu.server.device.spec import make_device
    from rgpu.server.worker.apply.replaying import Replay

    recording = Recording(path)
    if device.startswith("cuda"):
        ensure_fixed("rgpu.cli.main", sys.argv[1:])
    made = make_device(device, parse_size(memory), own_stdout=True)
    if (text := getattr(made, "text", None)) is not None and text.holds_stdout:
        sys.stdout = text.former  # the kernels' output is dropped; this command prints to the former stdout
    try:
        replaying = Replay(recording, made, f"replay of {path} on {device}")
        done = replaying.run(positions or _before_the_end(recording))
        if checkpoint is not None:
            replaying.write_checkpoint(*_store_and_name(checkpoint))
    finally:
        made.close()
    return {"session": done.session, "device": device, "position": done.position, "seconds": round(done.seconds, 3),
            "answers": done.answers, "answers_compared": done.answers_compared, "answers_digest": done.answers_digest,
            "error": done.error, "error_detail": done.error_detail,
            "divergences": [{"seq": d.seq, "call": d.call, "what": d.what} for d in done.divergences],
            "snapshots": [{"position": s.position, "pages": s.page_count, "objects": len(s.objects),
                           "digest": s.digest()} for s in done.snapshots]}, done.snapshots


def _before_the_end(recording: Recording) -> tuple[int, ...]:
    """The position before the last calls that free memory: programs free theirs before they end."""
    ends = [record.seq for record in recording if record.call_id in ENDS]
    position = 0
    for seq in reversed(ends):  # the last series of such calls, with few others between them
        if position and position - seq > 16:
            break
        position = seq
    return (position - 1,) if position > 1 else ()


def _store_and_name(place: str) -> tuple[Path, str]:
    """Split ``STORE/NAME``; a checkpoint's name has no slash here. Raises :class:`UsageError`."""
    store, _, name = place.rpartition("/")
    if not store or not name:
        raise UsageError(f"{place!r} is no STORE/NAME")
    return Path(store), name


@command.command("diff")
@click.argument("a")
@click.argument("b")
@_device
@_memory
@click.option("--at", type=int, metavar="N", help="Position at which recordings are compared (default: a checkpoint's "
                                                  "or "
                                                  "snapshot's own; of two recordings the end).")
@common.output_option
@common.verb
def diff(a: str, b: str, device: str, device_memory: str, at: int | None, output: str) -> None:
    """Compare A with B, page by page and object by object; a difference exits 8.

    Each is a snapshot (.json, from `replay --snapshot`), a checkpoint (STORE/NAME of a directory store), or a
    recording, which is replayed on --device up to the other's position.
    """
    from rgpu.checkpoint.session.snapshot import compare

    kept = [_kept_snapshot(place) for place in (a, b)]
    position = at if at is not None else next((found.position for found in kept if found is not None), None)
    sides = [found if found is not None else _snapshot_of(Path(place), device, device_memory, position)
             for place, found in zip((a, b), kept, strict=True)]
    found = compare(*sides)
    values = {name: getattr(found, name) for name in found.__struct_fields__}
    common.emit({"a": sides[0].source or a, "b": sides[1].source or b, **values}, output, _show_difference)
    if not found.equal:
        raise Corrupt(_summary(found), reason="difference")


def _kept_snapshot(place: str) -> Any:
    """The snapshot of a snapshot file or a checkpoint; None for a recording."""
    from rgpu.checkpoint.session import snapshot
    from rgpu.checkpoint.store.checkpoint_store import DirectoryStore

    path = Path(place)
    if path.is_dir() or path.suffix == SUFFIX:
        return None
    if path.is_file():
        if path.stat().st_size > snapshot.MAX_FILE:
            raise Corrupt(f"{path} is too large for a snapshot", offset=0, reason="length")
        return snapshot.Snapshot.decode(path.read_bytes())
    store, name = _store_and_name(place)
    if not store.is_dir():
        raise NotFound(f"{place} is no file, and {store} no store")
    with DirectoryStore(store).open(name) as checkpoint:
        return snapshot.of_checkpoint(checkpoint, f"checkpoint {place}")


def _snapshot_of(path: Path, device: str, memory: str, position: int | None) -> Any:
    result, snapshots = _replay(path, device, memory, () if position is None else (position,))
    if position is None:
        return snapshots[-1]
    for found in snapshots:
        if found.position == position:
            return found
    raise NotFound(f"{path} ends at position {result['position']}: there is no position {position}")


def _show_difference(values: dict[str, Any]) -> None:
    for line in _difference(values):
        common.out.print(line, markup=False)


def _difference(values: dict[str, Any]) -> Iterator[str]:
    yield f"A: {values['a']}, position {values['position_a']}"
    yield f"B: {values['b']}, position {values['position_b']}"
    yield f"pages compared: {values['pages']}, differing: {values['pages_differing']}"
    if values["first_page"]:
        first = values["first_page"]
        yield (f"first differing page: {first['address']:#x}, page {first['page']} of the {first['kind']} range "
               f"{first['region']:#x} {first['name']}".rstrip())
    yield from values["regions"]
    yield from values["objects"]
    yield "equal" if values["equal"] else "different"


def _summary(found: Any) -> str:
    parts = [f"{found.pages_differing} of {found.pages} pages differ"] if found.pages_differing else []
    parts += [f"{len(found.regions)} ranges are in one only"] if found.regions else []
    parts += [f"{len(found.objects)} live objects differ ({found.objects[0]})"] if found.objects else []
    if found.position_a != found.position_b:
        parts.append(f"A is at position {found.position_a}, B at {found.position_b}")
    return "; ".join(parts)


