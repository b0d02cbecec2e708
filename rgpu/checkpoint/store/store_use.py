"""Bytes that checkpoints take in a store: their manifests, and the packs that these name, each once.

Packs that no manifest names any more are not counted: the next collection (:mod:`.collect`) removes them, and a user
who removed checkpoints need not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from rgpu.checkpoint.store.checkpoint_store import LOOKERS, CheckpointStore
from rgpu.session.errors import Corrupt, NotFound, UsageError, VersionMismatch

#: (length of a manifest, when it was written): while these are the same, so are the packs that it names.
Version = tuple[int, float]


class StoreUse:
    """Counter of the bytes in namespaces of one store. Each manifest is read once, as it never changes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[Version, dict[str, int]]] = {}  #: (prefix, name) → packs' lengths

    def count(self, stores: Iterable[CheckpointStore]) -> int:
        """Return the bytes that the checkpoints of these namespaces take. Raises :class:`StoreError`.

        A manifest that cannot be read counts by its own length.
        """
        return sum(self._one(store) for store in stores)

    def _one(self, store: CheckpointStore) -> int:
        names = store.names()
        with self._lock:
            known = {name: self._known.get((store.prefix, name)) for name in names}
        packs: dict[str, int] = {}
        unknown = []
        for name, version in names.items():
            found = known[name]
            if found is not None and found[0] == version:
                packs |= found[1]
            else:
                unknown.append(name)
        if unknown:
            with ThreadPoolExecutor(LOOKERS, thread_name_prefix="count") as threads:
                for name, read in zip(unknown, threads.map(lambda name: _packs(store, name), unknown), strict=True):
                    packs |= read
                    with self._lock:
                        self._known[store.prefix, name] = names[name], read
        with self._lock:
            for prefix, name in [key for key in self._known if key[0] == store.prefix and key[1] not in names]:
                del self._known[prefix, name]
        return sum(size for size, _ in names.values()) + sum(packs.values())


def _packs(store: CheckpointStore, name: str) -> dict[str, int]:
    try:
        return {pack.name: pack.size for pack in store.summary(name).packs}
    except (NotFound, Corrupt, VersionMismatch, UsageError):  # removed meanwhile, or damaged: `image ls` shows it
        return {}
