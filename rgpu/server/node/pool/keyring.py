"""The keys that a node admits: those in its own folder, and those on the pool's record.

Keys that were made in the folder (`rgpu keys create` works on files) are put on
record, so that every node of the pool admits them; one that was removed from
the folder is removed from the record. ``origin`` names the folder that a key is from.
Revoked keys are on record as such: no node admits them, and their
files are deleted in every folder. Each node keeps the list of revoked keys in its folder, too, and
writes entries that a registry has lost back on record.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from rgpu.link.inotify import ENTRIES, FileWatch
from rgpu.link.keys import AuthorizedKeys, PublicKey
from rgpu.link.private_files import private_directory, write_file
from rgpu.migrate.records.keys import INVITATIONS, KEYS, member_key
from rgpu.migrate.records.revoked import REVOKED, RevokedRecord, revoked_key
from rgpu.migrate.records.schema import InvitationRecord, KeyRecord, decode, encode
from rgpu.migrate.registry.base import Compacted, Delete, Put, Registry, absent, txn_certain, unchanged
from rgpu.session.errors import AlreadyExists, AuthenticationFailed, RgpuError

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0  #: between two looks at the folder, without notifications by the kernel
QUIET_SECONDS = 10.0  #: with them; the kernel does not notify of changes by another host in a shared folder


def origin_of(directory: Path) -> str:
    """Return the name of a folder of keys, made on the first call."""
    path = directory / "origin"
    private_directory(directory)
    with contextlib.suppress(AlreadyExists):
        write_file(path, secrets.token_hex(8).encode(), mode=0o600, replace=False)
    return path.read_text().strip()[:64]


class Keyring:
    """Keeps ``authorized.on_record`` equal to the registry; see the module docstring."""

    def __init__(self, authorized: AuthorizedKeys, registry: Registry, own: str = "",
                 stop: Callable[[], object] = lambda: None) -> None:
        """``own``: this node's public key; ``stop``: called when that is revoked while the node runs."""
        self.authorized, self._own, self._stop = authorized, own, stop
        self.registry = registry
        self._origin = origin_of(authorized.directory)
        self._files: list[PublicKey] | None = None
        self._changed = asyncio.Event()  #: the record has changed
        self._looked = asyncio.Event()  #: the record or the folder is to be looked at

    async def start(self) -> None:
        """Publish the folder's keys and read the record.

        Raises what the registry raises, :class:`AuthenticationFailed` where this node's own key was revoked,
        :class:`Corrupt` for a list of revoked keys that cannot be read.
        """
        self.authorized.revoked.read()
        await self._read_revoked()
        if self._own in self.authorized.revoked:
            raise AuthenticationFailed("this host's key was revoked: it belongs to the pool no more. To come back, "
                                       "remove its folder and join by an invitation (`rgpu keys invite --host`)")
        await self._publish()
        await self._read()

    async def read(self) -> None:
        """Read the keys on record once, and publish nothing. Raises what the registry raises."""
        await self._read()

    def again(self) -> None:
        """Publish and read everything anew, because the registry's data were replaced."""
        self._files = None
        self._news()

    async def run(self) -> None:
        """Follow the record and the folder until cancelled."""
        watches = [asyncio.ensure_future(self._watch(prefix)) for prefix in (KEYS, INVITATIONS, REVOKED)]
        folder = self._watch_folder()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(QUIET_SECONDS if folder else LOOK_SECONDS):
                        await self._looked.wait()
                self._looked.clear()
                await self._guarded(self._read_revoked)  # whatever the state of the watch
                await self._guarded(self._publish)
                if self._changed.is_set():
                    self._changed.clear()
                    await self._guarded(self._read)
        finally:
            if folder is not None:
                asyncio.get_running_loop().remove_reader(folder.fileno())
                folder.close()
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    def _watch_folder(self) -> FileWatch | None:
        watch = None
        try:
            watch = FileWatch()
            watch.add(self.authorized.directory, ENTRIES)
        except OSError as error:
            log.info("the folder of keys is looked at each second: the kernel does not tell of it", reason=str(error))
            if watch is not None:
                watch.close()
            return None

        def told() -> None:
            if watch.drain():
                self._looked.set()

        asyncio.get_running_loop().add_reader(watch.fileno(), told)
        return watch

    def _news(self) -> None:
        self._changed.set()
        self._looked.set()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except RgpuError as error:
            self._files = None
            self._news()
            log.info("the keys on record are not known now; the last known ones stay", reason=error.message)
            await asyncio.sleep(LOOK_SECONDS)

    async def _watch(self, prefix: str) -> None:
        while True:
            try:
                # From a revision that was read before the record: a write between that reading and the watch's own
                # start would be seen only at the next change, and it may be the removal of a key.
                revision = (await self.registry.list(prefix)).revision
                self._news()
                async for _ in self.registry.watch(prefix, revision + 1):
                    self._news()
            except Compacted:
                continue
            except RgpuError:
                await asyncio.sleep(LOOK_SECONDS)

    async def _read_revoked(self) -> None:
        """Refuse keys that are revoked on record, and write there those that are revoked only in this folder."""
        found: dict[str, str] = {}
        for entry in (await self.registry.list(REVOKED)).entries:
            with contextlib.suppress(RgpuError):
                record = decode(entry.value, RevokedRecord, entry.key)
                found[record.public] = record.name
        await asyncio.to_thread(self.authorized.revoke, found)
        for public, name in self.authorized.revoked.names().items():
            if public not in found:
                record = RevokedRecord(name=name, public=public, when=time.time())
                at = revoked_key(public)
                await txn_certain(self.registry, [absent(at)], [Put(at, encode(record))])
        if self._own in found:
            self._stop()

    async def _read(self) -> None:
        found: dict[str, PublicKey] = {}
        for entry in (await self.registry.list(INVITATIONS)).entries:
            with contextlib.suppress(RgpuError):
                record = decode(entry.value, InvitationRecord, entry.key)
                # The leader decides whether it has expired, by its clock: this host's may differ.
                found[record.public] = PublicKey("invited", record.name, record.public)
        for entry in (await self.registry.list(KEYS)).entries:
            with contextlib.suppress(RgpuError):
                key = decode(entry.value, KeyRecord, entry.key)
                found[key.public] = PublicKey(key.role, key.name, key.public, key.user)
        await self._read_revoked()
        self.authorized.on_record = found

    async def _publish(self) -> None:
        """Put the folder's keys on record, and remove those that were removed from the folder."""
        files = await asyncio.to_thread(self.authorized.all)
        if files == self._files:
            return
        names = {key.name for key in files}
        entries = {entry.key: entry for entry in (await self.registry.list(KEYS)).entries}
        for key in files:
            at = member_key(key.name)
            if at not in entries:
                record = KeyRecord(name=key.name, role=key.role, public=key.public, origin=self._origin,  # type: ignore[arg-type]
                                   user=key.user)
                await txn_certain(self.registry, [absent(at)], [Put(at, encode(record))])
            elif decode(entries[at].value, KeyRecord, at).public != key.public:
                log.warning("another key of this name is on record; this one counts on this node only", name=key.name)
        for at, entry in entries.items():
            record = decode(entry.value, KeyRecord, at)
            if record.origin == self._origin and record.name not in names:
                await self.registry.txn([unchanged(at, entry.mod_revision)], [Delete(at)])
        self._files = files
