"""A recorded history of writes, syncs and renames, and every state that a crash may leave of it.

The model is the weakest that POSIX allows: bytes written to a file are on the
disk only once that file was synced, and before that any of the writes may be
there and any not, whatever their order; a name made, renamed or removed is
durable only once its directory was synced, and before that each such change may
be there or not. What was synced is there.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class File:
    """An inode: its writes in order; None for bytes: cut, or made longer, to that length."""

    writes: list[tuple[int, bytes | None]] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True)
class Operation:
    """``what``: create, write, truncate, sync, link, rename, unlink, mkdir, syncdir, or a mark of the test.

    ``offset``: where a write begins (−1: at the file's end), or the length that a file is cut to.
    """

    what: str
    path: str = ""
    other: str = ""
    data: bytes = b""
    file: int = -1
    offset: int = -1


class Recorder:
    """Patches ``os`` and records what happens below ``root``."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = str(root)
        self.history: list[Operation] = []
        self._files: dict[int, int] = {}  #: descriptor → file
        self._folders: dict[int, str] = {}
        self._count = 0
        self._real = {name: getattr(os, name) for name in ("open", "write", "fsync", "close", "link", "rename",
                                                           "unlink", "mkdir")}
        for name in self._real:
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))

    def mark(self, text: str) -> None:
        self.history.append(Operation("mark", text))

    def _inside(self, path: Any) -> str | None:
        text = os.fspath(path) if not isinstance(path, int) else ""
        if isinstance(text, bytes) or not text.startswith(self.root):
            return None
        return os.path.relpath(text, self.root)

    def _open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        descriptor = int(self._real["open"](path, flags, mode, **more))
        inside = self._inside(path)
        if inside is not None and flags & os.O_CREAT:
            self._files[descriptor] = self._count
            self.history.append(Operation("create", inside, file=self._count))
            self._count += 1
        elif inside is not None and flags & os.O_DIRECTORY:
            self._folders[descriptor] = inside
        return descriptor

    def _write(self, descriptor: int, data: Any) -> int:
        written = int(self._real["write"](descriptor, data))
        if descriptor in self._files:
            self.history.append(Operation("write", file=self._files[descriptor], data=bytes(data)[:written]))
        return written

    def _fsync(self, descriptor: int) -> None:
        self._real["fsync"](descriptor)
        if descriptor in self._files:
            self.history.append(Operation("sync", file=self._files[descriptor]))
        elif descriptor in self._folders:
            self.history.append(Operation("syncdir", self._folders[descriptor]))

    def _close(self, descriptor: int) -> None:
        self._files.pop(descriptor, None)
        self._folders.pop(descriptor, None)
        self._real["close"](descriptor)

    def _link(self, source: Any, target: Any, **more: Any) -> None:
        self._real["link"](source, target, **more)
        self._named("link", source, target)

    def _rename(self, source: Any, target: Any, **more: Any) -> None:
        self._real["rename"](source, target, **more)
        self._named("rename", source, target)

    def _named(self, what: str, source: Any, target: Any) -> None:
        here, there = self._inside(source), self._inside(target)
        if here is not None and there is not None:
            self.history.append(Operation(what, here, there))

    def _unlink(self, path: Any, **more: Any) -> None:
        self._real["unlink"](path, **more)
        inside = self._inside(path)
        if inside is not None:
            self.history.append(Operation("unlink", inside))

    def _mkdir(self, path: Any, *arguments: Any, **more: Any) -> None:
        self._real["mkdir"](path, *arguments, **more)
        inside = self._inside(path)
        if inside is not None:
            self.history.append(Operation("mkdir", inside))


def after_a_crash(history: list[Operation], chance: random.Random | None,
                  keep: bool = False) -> dict[str, bytes | None]:
    """One state that the disk may be in: path → content, None for a directory.

    ``chance`` decides about each thing that was not synced; without it all of that is there (``keep``) or not.
    """
    def lucky() -> bool:
        return chance.random() < 0.5 if chance is not None else keep

    names: dict[str, int | None] = {".": None}
    pending: list[Operation] = []  #: changes of names that no directory's sync covers
    files: dict[int, File] = {}
    synced: dict[int, int] = {}  #: file → how many of its writes are on the disk for certain
    for operation in history:
        match operation.what:
            case "create":
                files[operation.file] = File()
                pending.append(operation)
            case "write":
                made = files[operation.file]
                at = made.length if operation.offset < 0 else operation.offset
                made.writes.append((at, operation.data))
                made.length = max(made.length, at + len(operation.data))
            case "truncate":
                files[operation.file].writes.append((operation.offset, None))
                files[operation.file].length = operation.offset
            case "sync":
                synced[operation.file] = len(files[operation.file].writes)
            case "syncdir":
                for change in [change for change in pending if _touches(change, operation.path)]:
                    _apply(names, change)
                    pending.remove(change)
            case "link" | "rename" | "unlink" | "mkdir":
                pending.append(operation)
    for change in pending:
        if lucky():
            _apply(names, change)
    found: dict[str, bytes | None] = {}
    for name, number in names.items():
        if number is None:
            found[name] = None
            continue
        sure, data = synced.get(number, 0), bytearray()
        for index, (at, written) in enumerate(files[number].writes):
            if not (index < sure or lucky()):
                continue
            if written is None:
                del data[at:]
                data.extend(bytes(max(0, at - len(data))))
            else:
                data.extend(bytes(max(0, at + len(written) - len(data))))
                data[at:at + len(written)] = written
        found[name] = bytes(data)
    return found


def _touches(change: Operation, folder: str) -> bool:
    return folder in {os.path.dirname(change.path) or ".", os.path.dirname(change.other or change.path) or "."}


def _apply(names: dict[str, int | None], change: Operation) -> None:
    if change.what == "create":
        names[change.path] = change.file
    elif change.what == "mkdir":
        names[change.path] = None
    elif change.what == "unlink":
        names.pop(change.path, None)
    elif change.path in names:  # else its first name never reached the disk: nor does this one
        names[change.other] = names[change.path]
        if change.what == "rename":
            del names[change.path]


def lay_out(state: dict[str, bytes | None], root: Path) -> None:
    """Make the state real below ``root``; what lies in no directory that exists is not there."""
    root.mkdir(parents=True)
    for name in sorted(state):
        path, content = root / name, state[name]
        if not path.parent.is_dir():
            continue
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)
