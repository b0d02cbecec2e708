"""What the store's tests share: devices of many pages, restores into fresh ones, a fake store that fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from rgpu.checkpoint.blobs.base import Blobs, Found
from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.session import restore
from rgpu.checkpoint.store.checkpoint_store import CheckpointStore, write_checkpoint
from rgpu.checkpoint.store.reader import StoredCheckpoint
from tests.support.checkpoint.fake_device import FakeDevice
from tests.support.checkpoint.samples import BASE, fresh, same, taken

__all__ = ["BASE", "PAGE", "FailingBlobs", "checkpoint_of", "many_pages", "restores_as"]


def many_pages(pages: int, seed: int = 3) -> FakeDevice:
    """Random pages: nothing compresses, nothing is equal."""
    device = FakeDevice(now=5, events={20: 1})
    device.add(BASE, pages * PAGE, data=random.Random(seed).randbytes(pages * PAGE))
    return device


def checkpoint_of(store: CheckpointStore, name: str, device: FakeDevice, position: int = 7, base: str | None = None,
             ) -> dict[str, Any]:
    return write_checkpoint(store, name, device, taken(device, position), base=base)  # type: ignore[arg-type]


def restores_as(found: StoredCheckpoint, device: FakeDevice) -> bool:
    """Whether a checkpoint restores, every page verified, as what ``device`` holds: page by page, by threads, in
    frames.
    """
    for pages in (found.pages(), found.deliver, found):
        target = fresh(device)
        restore.restore(target, found.state, [], print, pages)  # type: ignore[arg-type]
        if not same(device, target):
            return False
    return True


class FailingBlobs:
    """Another store, whose ``when(operation, name)`` may raise before anything is done."""

    def __init__(self, inner: Blobs, when: Callable[[str, str], None]) -> None:
        self.inner, self.when = inner, when
        self.pack_limit = inner.pack_limit

    def where(self, name: str) -> str:
        return self.inner.where(name)

    def read(self, name: str, limit: int = 1 << 31) -> bytes:
        self.when("read", name)
        return self.inner.read(name, limit)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        self.when("read", name)
        return self.inner.read_range(name, offset, length)

    def size(self, name: str) -> int | None:
        self.when("size", name)
        return self.inner.size(name)

    def ls(self, prefix: str) -> list[Found]:
        self.when("ls", prefix)
        return self.inner.ls(prefix)

    def leftovers(self, prefix: str) -> list[Found]:
        return self.inner.leftovers(prefix)

    def put(self, name: str, *data: bytes, new: bool = False) -> None:
        self.when("put", name)
        self.inner.put(name, *data, new=new)

    def create(self, name: str) -> Any:
        self.when("create", name)
        return _FailingSink(self, self.inner.create(name), name)

    def delete(self, name: str) -> None:
        self.when("delete", name)
        self.inner.delete(name)


class _FailingSink:
    def __init__(self, blobs: FailingBlobs, inner: Any, name: str) -> None:
        self._blobs, self._inner, self._name = blobs, inner, name

    @property
    def size(self) -> int:
        return int(self._inner.size)

    def write(self, data: Any) -> int:
        self._blobs.when("write", self._name)
        return int(self._inner.write(data))

    def commit(self) -> None:
        self._blobs.when("commit", self._name)
        self._inner.commit()

    def discard(self) -> None:
        self._inner.discard()


def copy_of(device: FakeDevice) -> FakeDevice:
    return FakeDevice({at: (region, bytearray(data)) for at, (region, data) in device.memory.items()},
                      dict(device.events), device.now)
