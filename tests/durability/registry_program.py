"""Uses the embedded registry as daemons do, and marks each transaction that was acknowledged. usage: … ROOT"""

from __future__ import annotations

import sys
from pathlib import Path

from rgpu.migrate.registry.base import Delete, Put
from rgpu.migrate.registry.store import Store
from tests.support.disk.preloaded import mark

#: (key, value) of the transaction of each number; a value of None deletes.
SIZES = (10, 3000, 50_000, 7, 9000)


def changes(number: int) -> list[tuple[str, bytes | None]]:
    """Two keys of its own, one that all of them write, and the removal of an older one's."""
    size = SIZES[number % len(SIZES)]
    found: list[tuple[str, bytes | None]] = [
        (f"sessions/{number}", bytes([number]) * size), (f"history/{number}", b"%d" % number), ("last", b"%d" % number)]
    if number >= 5:
        found.append((f"history/{number - 5}", None))
    return found


def do(store: Store, number: int) -> None:
    done = store.txn([], [Delete(key) if value is None else Put(key, value) for key, value in changes(number)])
    assert done.succeeded
    mark(str(number))


def main() -> None:
    path = Path(sys.argv[1]) / "registry.db"
    store = Store(path)
    mark("made")
    for number in range(6):
        do(store, number)
    other = Store(path)  # another process' connection: what it commits goes into the same log
    do(other, 6)
    do(store, 7)
    with store._locked():
        store._db.execute("PRAGMA wal_checkpoint(RESTART)")
    do(store, 8)  # at the log's beginning again
    do(other, 9)
    store.close()
    other.close()  # the last one: the log goes into the file and is removed
    store = Store(path)
    do(store, 10)
    do(store, 11)


if __name__ == "__main__":
    main()
