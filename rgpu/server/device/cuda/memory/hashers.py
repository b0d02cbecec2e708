"""Hashes the pages of several GPUs: each by the GPU that holds them.

The kernels of a GPU reach memory that was mapped on its peers, but not the variables
of modules that were loaded there: the driver gives those no peer access (an
H200, driver 580: illegal address), although cuCtxEnablePeerAccess documents access to "all
allocations". Therefore a session's memory on a GPU is read by that GPU alone; the
destination of the pages may be another's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.pages.pagehash import PageHashes, Ranges
from rgpu.server.device.cuda.memory.pagehash import PageHasher
from rgpu.session.addresses import DEVICE_BASE, DEVICE_STRIDE


class Homes:
    """The session's numbers of the GPUs that own addresses. Thread-safe: a change replaces the whole table."""

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._variables = np.zeros((0, 3), np.uint64)

    def set_variables(self, variables: Iterable[tuple[int, int, int]]) -> None:
        """Set (address, bytes, number) of modules' variables: the driver placed them, outside the session's ranges."""
        found = sorted(variable for variable in variables if variable[1])
        self._variables = np.array(found, np.uint64).reshape(-1, 3)

    def __call__(self, address: int) -> int:
        """Return the number of the GPU that owns an address; 0 also where none does, as for pinned memory."""
        return int(self.of(np.array([address], np.uint64))[0])

    def of(self, addresses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the numbers of the GPUs that own many addresses: uint64 → int64."""
        by_range = (addresses - np.uint64(DEVICE_BASE)) // np.uint64(DEVICE_STRIDE)  # addresses below wrap round
        numbers = np.where(by_range < self._gpus, by_range, np.uint64(0)).astype(np.int64)
        variables = self._variables
        if len(variables):
            at = np.searchsorted(variables[:, 0], addresses, "right") - 1
            inside = (at >= 0) & (by_range >= self._gpus) & (addresses - variables[at, 0] < variables[at, 1])
            numbers[inside] = variables[at[inside], 2]
        return numbers


class SeveralHashers:
    """A hasher like :class:`PageHasher`, for ranges of all GPUs. ``hashers``: one of each, by number. Thread-safe, as
    they are.
    """

    def __init__(self, hashers: Sequence[PageHasher],
                 homes: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
        """Wrap the hashers. ``homes``: returns the numbers of the GPUs that own addresses."""
        self._hashers = list(hashers)
        self._homes = homes

    def wrote(self) -> None:
        """Note that memory was written through the legacy stream of the GPU that owns it."""
        for hasher in self._hashers:
            hasher.wrote()

    def hash(self, ranges: Ranges, key: bytes) -> PageHashes:
        """See :meth:`PageHasher.hash`."""
        table, pages = _table(ranges)
        homes = self._homes(table[:, 0])
        result = PageHashes(np.empty((int(pages.sum()), 2), np.uint64), np.empty(int(pages.sum()), np.bool_))
        of_page = np.repeat(homes, pages)
        for number in np.unique(homes).tolist():
            found = self._hashers[number].hash(table[homes == number], key)
            result.hashes[of_page == number], result.zero[of_page == number] = found.hashes, found.zero
        return result

    def copy_and_hash(self, ranges: Ranges, staging: int, key: bytes) -> PageHashes:
        """See :meth:`PageHasher.copy_and_hash`. ``staging``: memory that all of the GPUs can write."""
        table, pages = _table(ranges)
        homes = self._homes(table[:, 0])
        cuts = [0, *(np.flatnonzero(np.diff(homes)) + 1).tolist(), len(table)]
        found = [PageHashes(np.empty((0, 2), np.uint64), np.empty(0, np.bool_))]
        for first, end in zip(cuts, cuts[1:], strict=False):
            if first < end:
                place = staging + int(pages[:first].sum()) * PAGE
                found.append(self._hashers[int(homes[first])].copy_and_hash(table[first:end], place, key))
        hashes, zero = zip(*found, strict=True)
        return PageHashes(np.concatenate(hashes), np.concatenate(zero))

    def close(self) -> None:
        """Close the hashers of all GPUs."""
        for hasher in self._hashers:
            hasher.close()


def _table(ranges: Ranges) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return (address, bytes) rows and the pages of each, without empty ranges, which have none."""
    table = np.array(ranges, np.uint64).reshape(-1, 2)
    table = table[table[:, 1] > 0]
    return table, -(-table[:, 1].astype(np.int64) // PAGE)
