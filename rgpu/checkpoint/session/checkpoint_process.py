"""A process that writes a worker's checkpoints, so that this does not hold the worker's GIL. See
:mod:`.checkpoint_link`.

    python -m rgpu.checkpoint.session.checkpoint_process FD LIFE

``FD``: a socket of packets (:mod:`rgpu.link.local.packets`); ``LIFE``: a descriptor that only this process and its
children hold open. The process has access to the store that it is granted, and not to the device: pages are handed
over in frames.

============ =================================================================================
``begin``    checkpoint, base, others, staging, rate, and the grant of a store with its descriptors
``wanted``   bulk: a table of regions and their hashes (:func:`pack_regions`); answered with
             bulk: the pages of them that are to be added (:func:`pack_wanted`)
``inherit``  bulk: the session's state
``rows``     ticket, frame (with its descriptor the first time), its size, count, hash key; pages
             (:func:`pack_pages`); answered with ``done`` and the ticket, also after an error
``zeros``    bulk: pages
``page``     address of its region, index, hash; bulk: its bytes
``hurry``    whether the session is paused
``pace``     bytes/s from now on; answered with the bytes/s used, and whether a thread waited
``give_up``  the reason
``finish``   statistics, facts; answered with the checkpoint's counts
``abort``    remove what was written of the checkpoint; answered when that is done
============ =================================================================================

Requests with ``id`` are answered with ``ok`` or ``error``. The first error of a request without is reported as
``failed``; then only ``abort`` and ``finish``, which fails as well, have an effect. Bulk is a memfd beside the message.
The process ends when the socket is closed; the collector removes what it was writing
(docs/developers/image-format.md).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog

from rgpu.checkpoint.codec import encoders
from rgpu.checkpoint.codec.frames import PITCH, Shared
from rgpu.checkpoint.device import Region
from rgpu.checkpoint.manifest.reuse import Array, Wanted
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.pages.pages import Page, PageList
from rgpu.checkpoint.store.grants import granted
from rgpu.checkpoint.store.pace import Pace
from rgpu.checkpoint.store.writer import CheckpointWriter
from rgpu.link.local.packets import Channel
from rgpu.link.loggers import configure_logging
from rgpu.session.errors import LinkError, RgpuError, StoreError, from_dict

log = structlog.get_logger(__name__)

KINDS = ("mapped", "global", "pinned")
LARGE = 1 << 20  #: bytes from which on a piece is written without being copied
_PAGE = np.dtype([("owner", "<u4"), ("index", "<u4"), ("hash", "<u8", 2)])
_REGION = np.dtype([("address", "<u8"), ("size", "<u8"), ("kind", "<u4"), ("hashes", "<u4")])


# -- what messages carry -------------------------------------------------------------
def bulk(pieces: Sequence[Any]) -> int:
    """Make a memfd that holds the pieces, one behind the other. Raises OSError.

    Small pieces are written together, since the thread waits for the GIL again after each write.
    """
    fd = os.memfd_create("rgpu-bulk", os.MFD_CLOEXEC)
    try:
        for large, some in itertools.groupby(pieces, lambda piece: memoryview(piece).nbytes >= LARGE):
            for piece in some if large else [b"".join(some)]:
                view = memoryview(piece).cast("B")
                while view:
                    view = view[os.write(fd, view):]
    except BaseException:
        os.close(fd)
        raise
    return fd


def unbulk(fds: list[int]) -> memoryview:
    """Return the contents of the memfd that is the only one of ``fds``, and close it."""
    (fd,) = fds
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size else b"")
    finally:
        os.close(fd)


def pack_regions(regions: Sequence[RegionState]) -> list[Any]:
    """Encode regions as pieces: a table of fixed rows, then the page hashes of each."""
    rows = [(region.address, region.size, KINDS.index(region.kind), len(region.hashes)) for region in regions]
    table = np.array(rows, _REGION)
    return [len(regions).to_bytes(8, "little"), table, *(region.hashes for region in regions if region.hashes)]


def unpack_regions(data: memoryview) -> list[RegionState]:
    """Decode what :func:`pack_regions` made."""
    count = int.from_bytes(data[:8], "little")
    table, at, found = np.frombuffer(data[8:8 + count * _REGION.itemsize], _REGION), 8 + count * _REGION.itemsize, []
    for address, size, kind, length in table.tolist():
        found.append(RegionState(address, size, KINDS[kind], hashes=bytes(data[at:at + length])))
        at += length
    return found


def pack_wanted(wanted: Wanted) -> list[Any]:
    """Encode the list of wanted pages as pieces."""
    return [len(wanted.counts).to_bytes(8, "little"), wanted.counts.astype("<u4"), wanted.indices.astype("<u4")]


def unpack_wanted(data: memoryview) -> Wanted:
    """Decode what :func:`pack_wanted` made."""
    count = int.from_bytes(data[:8], "little")
    values = np.frombuffer(data[8:], "<u4")
    return Wanted(values[count:].astype(np.int64), values[:count].astype(np.int64))


def pack_pages(pages: PageList) -> bytes:
    """Encode a list of pages as fixed rows."""
    table = np.empty(len(pages), _PAGE)
    table["owner"], table["index"], table["hash"] = pages.owners, pages.indices, pages.hashes
    return table.tobytes()


def unpack_pages(regions: Sequence[Region], data: Any) -> PageList:
    """Decode what :func:`pack_pages` made, for these regions."""
    table = np.frombuffer(data, _PAGE)
    return PageList.at(regions, table["owner"].astype(np.int64), table["index"].astype(np.int64),
                       table["hash"].astype(np.uint64))


# -- the process -----------------------------------------------------------------------
class Server:
    """State of the process: it writes one checkpoint at a time."""

    def __init__(self, channel: Channel, count: int, life: int) -> None:
        self._channel = channel
        self._encoders = encoders.Encoders(count, keep=(life,)) if count else None
        self._messages: queue.SimpleQueue[tuple[dict[str, Any], list[int]]] = queue.SimpleQueue()
        self._checkpoint = contextlib.ExitStack()
        self._writer: CheckpointWriter | None = None
        self._pace = Pace()
        self._failure: RgpuError | None = None
        self._regions: list[Region] = []  #: regions of the last ``wanted``
        self._by_address: dict[int, Region] = {}
        self._state: SessionState | None = None
        self._hurried: contextlib.AbstractContextManager[None] | None = None
        self._frames: dict[int, tuple[Shared, Array]] = {}

    def run(self) -> None:
        """Serve requests until the socket is closed, which ends the process."""
        threading.Thread(target=self._read, name="read", daemon=True).start()
        while True:
            self._do(*self._messages.get())

    def _read(self) -> None:
        """Receive messages; those that must not wait behind the store are handled here."""
        try:
            while True:
                message, fds = self._channel.receive()
                if message["do"] == "give_up":
                    if (writer := self._writer) is not None:
                        writer.give_up(from_dict(message["why"]))
                elif message["do"] == "pace":
                    used, waited = self._pace.renew(message["rate"])
                    self._channel.send({"id": message["id"], "ok": {"used": used, "waited": waited}})
                else:
                    self._messages.put((message, fds))
        except BaseException:  # the worker has ended, or its requests cannot be served any more
            os._exit(0)

    def _do(self, message: dict[str, Any], fds: list[int]) -> None:
        number, name = message.pop("id", None), message.pop("do")
        try:
            if self._failure is not None and name not in ("begin", "abort", "rows"):
                raise self._failure
            answer, beside = getattr(self, f"_do_{name}")(fds, **message)
        except Exception as error:
            told = error if isinstance(error, RgpuError) else StoreError(f"a checkpoint cannot be written: {error!r}")
            if told is not error:
                log.exception("a checkpoint cannot be written", doing=name)
            if number is not None:
                self._channel.send({"id": number, "error": told.as_dict()})
            elif self._failure is None:
                self._failure = told
                self._channel.send({"failed": told.as_dict()})
            return
        if number is not None:
            self._channel.send({"id": number, "ok": answer}, beside)
        for fd in beside:
            os.close(fd)

    def _do_begin(self, fds: list[int], *, store: dict[str, Any], image: str, base: str, others: list[str],
                  staging: int, rate: float) -> tuple[Any, tuple[int, ...]]:
        self._failure = self._state = None
        self._pace = Pace(rate)
        try:
            checkpoints = self._checkpoint.enter_context(granted(store, fds))
            writer = self._checkpoint.enter_context(checkpoints.own.writer(
                image, base or None, others=others, staging=staging, pace=self._pace, encoders=self._encoders))
            writer.prepare()
            self._writer = writer
        except BaseException:
            self._end()
            raise
        return None, ()

    @property
    def _writing(self) -> CheckpointWriter:
        if self._writer is None:
            raise StoreError("no checkpoint is being written")
        return self._writer

    def _do_wanted(self, fds: list[int], *, hash_key: bytes) -> tuple[Any, tuple[int, ...]]:
        regions = unpack_regions(unbulk(fds))
        self._regions = [region.region() for region in regions]
        self._by_address = {region.address: region for region in self._regions}
        return None, (bulk(pack_wanted(self._writing.wanted(hash_key, regions))),)

    def _do_inherit(self, fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        self._state = SessionState.decode(unbulk(fds))  # type: ignore[arg-type]
        self._writing.inherit(self._state)
        return None, ()

    def _do_rows(self, fds: list[int], *, ticket: int, frame: int, size: int, hash_key: bytes, pages: bytes) -> Any:
        def done() -> None:
            with contextlib.suppress(LinkError):
                self._channel.send({"done": ticket})

        try:
            for fd in fds:
                memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
                self._frames[frame] = Shared(frame, fd, size), np.frombuffer(memory, np.uint8).reshape(-1, PITCH)
            if self._failure is not None:
                raise self._failure
            listed = unpack_pages(self._regions, pages)
            shared, rows = self._frames[frame]
            writing = self._writing
        except BaseException:
            done()
            raise
        writing.add_rows(rows[:len(listed)], listed, hash_key, done, shared)
        return None, ()

    def _do_zeros(self, fds: list[int]) -> Any:
        self._writing.add_zeros(unpack_pages(self._regions, unbulk(fds)))
        return None, ()

    def _do_page(self, fds: list[int], *, region: int, index: int, hash: list[int]) -> Any:
        self._writing.add_page(Page(self._by_address[region], index, bytes(unbulk(fds)), (hash[0], hash[1])))
        return None, ()

    def _do_hurry(self, fds: list[int], *, on: bool) -> Any:
        if on and self._hurried is None:
            self._hurried = self._writing.hurried()
            self._hurried.__enter__()
        elif not on and self._hurried is not None:
            hurried, self._hurried = self._hurried, None
            hurried.__exit__(None, None, None)
        return None, ()

    def _do_finish(self, fds: list[int], *, statistics: dict[str, Any], facts: dict[str, Any]) -> Any:
        if self._state is None:
            raise StoreError("a checkpoint without a state")
        counts = self._writing.finish(self._state, statistics, facts)
        self._end()
        return counts, ()

    def _do_abort(self, fds: list[int]) -> Any:
        self._end()
        return None, ()

    def _end(self) -> None:
        """End the checkpoint; an unfinished one is removed."""
        self._writer = self._state = self._hurried = None
        self._failure = None
        try:
            self._checkpoint.close()
        finally:
            frames, self._frames = self._frames, {}
            for shared, _ in frames.values():
                os.close(shared.fd)


def main(fd: int, life: int) -> None:
    """Serve the worker on socket ``fd`` until it is closed. ``life``: a descriptor to hold open, see the module's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the worker
    configure_logging()  # to the worker's log
    with contextlib.suppress(OSError):
        os.nice(encoders.NICE)
    Server(Channel(socket.socket(fileno=fd)), encoders.wanted(), life).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
