"""Make a fixture of this version of the package: one session's record, image, journal and answers.

    python -m tests.previous.record tests/previous/VERSION

run at a release, by its code; the versions after it are tested against the files (test_previous.py here and in
tests/scenarios). A program runs on a pool, an image is taken in the middle, and the program goes on; kept are

record          the registry's value of ``sessions/old`` after the image, while the session ran
images/         the store: the image that the record names
old.rgpuj       every call of the session, from its first to its last; ``old.answers``: digests of what it was answered
secret, keys/   the pool's secret, by which images are named, and the user's key, whose session it is

(Of 0.1.0 the path of Python on the machine that recorded it was replaced by one as long, in the record and in the
manifest, whose two checksums were calculated anew.)
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from rgpu.migrate.registry.embedded import EmbeddedRegistry
from tests.support.pools.pool import LocalPool
from tests.support.pools.storm import SMALL, TICKS

SESSION = "old"


async def _value(database: Path) -> bytes:
    registry = await EmbeddedRegistry.open(database)
    try:
        entry = await registry.get(f"sessions/{SESSION}")
        assert entry is not None
        return entry.value
    finally:
        await registry.close()


def main(out: Path) -> None:
    out.mkdir(parents=True)
    folder = Path(tempfile.mkdtemp(prefix="rgpu-record-"))
    with LocalPool(folder, nodes=2) as pool:
        released = folder / "released"
        program = pool.run(sys.executable, "-W", "ignore", TICKS, released, "0.1", name=SESSION,
                           options=(*SMALL, "--record", str(folder / "recorded")))
        program.wait_lines(1)
        pool.rgpu("checkpoint", SESSION)
        program.wait_lines(len(program.lines) + 1)
        (out / "record").write_bytes(asyncio.run(_value(folder / "pool" / "registry.db")))
        shutil.copytree(folder / "pool" / "images", out / "images")
        released.touch()
        program.finish()
        for name in (f"{SESSION}.rgpuj", f"{SESSION}.answers"):
            shutil.copy(folder / "recorded" / name, out / name)
        (out / "keys").mkdir()
        shutil.copy(folder / "pool" / "secret", out / "secret")
        shutil.copy(folder / "pool" / "keys" / "user.key", out / "keys" / "user.key")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
