"""The registry in etcd, for a pool of many hosts.

The functions of etcd itself (revisions, transactions, leases, linearizable reads)
are passed through; see :mod:`.client` for members, deadlines and unknown
outcomes, :mod:`.watch` for watches, :mod:`.messages` for the layout.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rgpu.migrate.registry.base import (
    Change,
    Compacted,
    Compare,
    Entry,
    Listing,
    Operation,
    Put,
    TxnResult,
    check_txn,
    require,
)
from rgpu.migrate.registry.etcd.address import EtcdAddress, parse
from rgpu.migrate.registry.etcd.client import EtcdClient, EtcdFault
from rgpu.migrate.registry.etcd.messages import PAGE, Fault, Keys, entry, txn_request, txn_result
from rgpu.migrate.registry.etcd.watch import Watch
from rgpu.migrate.registry.guard import Guard
from rgpu.session.errors import NotFound, PoolUnavailable


class EtcdRegistry:
    """Implements :class:`rgpu.migrate.registry.base.Registry`. Make it with :meth:`open`."""

    def __init__(self, client: EtcdClient, guard: Guard) -> None:
        self._client = client
        self._guard = guard
        self._rpc = client.rpc
        self._keys = Keys(client.address.prefix)
        self._name = ""
        self._verified = -1  #: the client's count of breaks when the identity was last read
        self._watches: set[Watch] = set()
        self._verifying = asyncio.Lock()

    @property
    def cluster_id(self) -> str:
        return self._guard.cluster

    @property
    def mistrust(self) -> str:
        """Reason to refuse every request: the registry went back. Empty while it is trusted."""
        return self._guard.reason

    def believe(self, cluster: str, revision: int) -> None:
        """Accept these data as the pool's from now on (:meth:`rgpu.migrate.registry.guard.Guard.believe`).

        Watches end with :class:`Compacted`: they wait for revisions of other data.
        """
        self._guard.believe(cluster, revision)
        self._verified = -1
        for watch in self._watches:
            watch.void = True

    def distrust(self, reason: str) -> None:
        """Refuse every request from now on (:meth:`rgpu.migrate.registry.guard.Guard.distrust`)."""
        self._guard.distrust(reason)
        self._verified = -1

    @classmethod
    async def open(cls, address: EtcdAddress | str, seen: Path | None = None, *,
                   doubtful: bool = False) -> EtcdRegistry:
        """Open the registry. ``seen``: the file in which this host records it (:mod:`rgpu.migrate.registry.guard`).

        ``doubtful``: one that went back is opened too; :attr:`mistrust` gives the reason, and every request fails.
        Raises :class:`UsageError`, :class:`PoolUnavailable`, :class:`AuthenticationFailed`, :class:`Refused`,
        :class:`Corrupt`.
        """
        guard = Guard(seen)
        client = EtcdClient(parse(address) if isinstance(address, str) else address)
        registry = cls(client, guard)
        try:
            await registry._verify()
        except BaseException:
            if not (doubtful and guard.reason):
                await client.close()
                raise
        return registry

    # -- reading ----------------------------------------------------------------
    async def revision(self) -> int:
        return int((await self._range(key=self._keys.identity, keys_only=True)).header.revision)

    async def get(self, key: str) -> Entry | None:
        return (await self.read(key))[0]

    async def read(self, key: str) -> tuple[Entry | None, int]:
        """Return the entry as :meth:`get` does, and the registry's revision at that moment."""
        answer = await self._range(key=self._keys.outer(key))
        return (entry(self._keys, answer.kvs[0]) if answer.kvs else None), int(answer.header.revision)

    async def list(self, prefix: str) -> Listing:
        """List in pages, all at the first one's revision; from the start if that is compacted meanwhile."""
        while True:
            try:
                return await self._pages(prefix)
            except Compacted:
                continue

    async def _pages(self, prefix: str) -> Listing:
        key, end = self._keys.span(prefix)
        entries: list[Entry] = []
        revision = 0
        while True:
            answer = await self._range(key=key, range_end=end, limit=PAGE, revision=revision)
            revision = revision or int(answer.header.revision)
            entries.extend(entry(self._keys, kv) for kv in answer.kvs)
            if not answer.more or not answer.kvs:
                return Listing(revision, tuple(entries))
            key = answer.kvs[-1].key + b"\0"

    async def _range(self, **fields: Any) -> Any:
        await self._verify()
        floor = self._guard.revision
        try:
            answer = await self._client.call("KV.Range", self._rpc.RangeRequest(**fields))
        except EtcdFault as error:
            if error.fault is Fault.COMPACTED:
                raise Compacted(str(error), oldest=0) from error
            raise _unexpected(error) from error
        self._look(answer, floor)
        return answer

    # -- changing -----------------------------------------------------------------
    async def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
        check_txn(compares, operations)
        await self._verify()
        request = txn_request(self._rpc, self._keys, compares, operations)
        floor = self._guard.revision
        try:
            response = await self._client.call("KV.Txn", request, change=bool(operations))
        except EtcdFault as error:
            if error.fault is Fault.NO_LEASE:
                leases = [operation.lease for operation in operations if isinstance(operation, Put) and operation.lease]
                raise NotFound(f"a lease of {leases} has ended", leases=leases) from error
            raise _unexpected(error) from error
        self._look(response, floor)
        return txn_result(self._keys, compares, response)

    async def put_if(self, compare: Compare, value: bytes, lease: int = 0) -> int:
        return require(await self.txn([compare], [Put(compare.key, value, lease)]), f"put of {compare.key}")

    async def compact(self, revision: int) -> None:
        await self._verify()
        revision = min(revision, await self.revision())
        try:
            await self._client.call("KV.Compact", self._rpc.CompactionRequest(revision=revision))
        except EtcdFault as error:
            if error.fault is not Fault.COMPACTED:  # compacted already
                raise _unexpected(error) from error

    # -- leases -------------------------------------------------------------------
    async def lease_grant(self, ttl: float) -> int:
        """Grant a lease: etcd grants whole seconds, and no less than its own minimum (three halves of its election
        timeout).
        """
        if not 0.05 <= ttl <= 86400:
            raise ValueError(f"a lease of {ttl} s; 0.05 s to a day allowed")
        await self._verify()
        # The id is chosen here, so that a grant whose answer was lost can be repeated: no lease leaks.
        request = self._rpc.LeaseGrantRequest(TTL=math.ceil(ttl), ID=secrets.randbits(62) + 1)
        try:
            await self._client.call("Lease.LeaseGrant", request)
        except EtcdFault as error:
            if error.fault is not Fault.LEASE_EXISTS:
                raise _unexpected(error) from error
        return int(request.ID)

    async def keepalive(self, lease: int, timeout: float | None = None) -> float:
        """Renew a lease; return the seconds granted. ``timeout``: seconds, instead of the address's."""
        try:
            answer = await self._client.call("Lease.LeaseKeepAlive", self._rpc.LeaseKeepAliveRequest(ID=lease),
                                             timeout=timeout)
        except EtcdFault as error:
            if error.fault is not Fault.NO_LEASE:
                raise _unexpected(error) from error
            raise NotFound(f"lease {lease} has ended", lease=lease) from error
        if answer.TTL <= 0:
            raise NotFound(f"lease {lease} has ended", lease=lease)
        return float(answer.TTL)

    async def lease_revoke(self, lease: int) -> None:
        try:
            await self._client.call("Lease.LeaseRevoke", self._rpc.LeaseRevokeRequest(ID=lease))
        except EtcdFault as error:
            if error.fault is not Fault.NO_LEASE:
                raise _unexpected(error) from error

    # -- watching -----------------------------------------------------------------
    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncIterator[Change]:
        following = from_revision or await self.revision() + 1
        watch = Watch(self._client, self._keys, prefix, following)
        self._watches.add(watch)
        try:
            async with aclosing(watch.changes()) as changes:
                async for change in changes:
                    yield change
        finally:
            self._watches.discard(watch)

    async def close(self) -> None:
        """Save what the guard has seen and close the connections."""
        self._guard.save()
        await self._client.close()

    # -- identity of the data -----------------------------------------------------
    async def _verify(self) -> None:
        """Read the data's identity, at the start and after every break: etcd may have been replaced meanwhile.

        Raises :class:`PoolUnavailable` when it was, at every call.
        """
        if self._verified == self._client.breaks:
            return
        async with self._verifying:
            while self._verified != (breaks := self._client.breaks):
                answer = await self._client.call("KV.Range", self._rpc.RangeRequest(key=self._keys.identity))
                if not answer.kvs and not self._guard.cluster:
                    await self._give_name()
                    continue
                self._name = answer.kvs[0].value.decode(errors="replace") if answer.kvs else "unnamed"
                self._look(answer)
                self._verified = breaks

    def _look(self, answer: Any, floor: int | None = None) -> None:
        """Check the revision of an answer. Raises :class:`PoolUnavailable` when the registry went back."""
        header = answer.header
        try:
            self._guard.check(f"{header.cluster_id:016x}-{self._name}", int(header.revision), floor)
        except PoolUnavailable:
            self._verified = -1  # every request reads the identity first, until it is the expected one
            raise

    async def _give_name(self) -> None:
        """Give new data their identity; of two nodes that try, one succeeds, and both read it afterwards."""
        rpc, key = self._rpc, self._keys.identity
        request = rpc.TxnRequest(
            compare=[rpc.Compare(key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=0)],
            success=[rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=secrets.token_hex(8).encode()))])
        await self._client.call("KV.Txn", request)  # the outcome need not be known: the identity is read next


class EtcdLeases:
    """Keep-alives for the lease keeper, a process without an event loop."""

    TIMEOUT = 1.0  #: seconds for one renewal, all members together: a lease of 5 s is renewed each 1.3 s

    def __init__(self, address: str) -> None:
        """Open the registry. Raises as :meth:`EtcdRegistry.open`."""
        self._loop = asyncio.new_event_loop()
        try:
            self._registry = self._loop.run_until_complete(EtcdRegistry.open(address))
        except BaseException:
            self._loop.close()
            raise

    def keepalive(self, lease: int) -> float:
        """Renew a lease; return the seconds granted. Raises :class:`NotFound`, :class:`PoolUnavailable`."""
        return self._loop.run_until_complete(self._registry.keepalive(lease, self.TIMEOUT))

    def close(self) -> None:
        """Close the registry and the event loop of this thread."""
        self._loop.run_until_complete(self._registry.close())
        self._loop.close()


def _unexpected(error: EtcdFault) -> ValueError:
    return ValueError(f"etcd refuses the request: {error}")
