"""A watch on etcd that survives lost connections, frozen and cut-off members, and expired tokens.

It resumes at the revision after the last change that it yielded; where etcd no
longer keeps that revision it raises :class:`Compacted`, and the caller lists again.

It corrects for two properties of etcd:

* Compaction at revision C may drop a *deletion* made at C itself, and a watch from
  C gets no error (etcd before 3.4.36 and 3.5.18, issue 19179). The watch therefore begins
  one revision earlier and drops the changes of that: then etcd answers "compacted" for every
  revision up to C.
* An open connection may lead to a process that does not run. After ``SILENCE``
  seconds without a message a progress report is requested. Its revision is not used: etcd
  may send one before it has sent the changes up to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import structlog

from rgpu.migrate.registry.base import Change, Compacted
from rgpu.migrate.registry.etcd.client import PAUSE, EtcdClient
from rgpu.migrate.registry.etcd.messages import Fault, Keys, changes, fault
from rgpu.session.errors import AuthenticationFailed, PoolUnavailable

log = structlog.get_logger(__name__)

SILENCE = 2.0  #: seconds
PATIENCE = 15.0  #: seconds without a message of any member, after which the watch raises an error


class _Broken(Exception):
    """This stream has ended; the watch continues with another one."""


class Watch:
    """Position of one watcher. Iterate :meth:`changes`."""

    def __init__(self, client: EtcdClient, keys: Keys, prefix: str, following: int) -> None:
        self._client = client
        self._keys = keys
        self._prefix = prefix
        self._following = following  #: lower bound of the revision of the next change
        self._denied = 0
        self.void = False  #: the registry's data were replaced, so the awaited revisions will not occur

    async def changes(self) -> AsyncGenerator[Change, None]:
        """Yield changes. Raises :class:`Compacted`, :class:`PoolUnavailable`, :class:`AuthenticationFailed`."""
        clock = asyncio.get_running_loop().time
        heard = clock()
        while True:
            try:
                async with self._client.stream("Watch.Watch") as (call, endpoint):
                    try:
                        await self._begin(call)
                        async with aclosing(self._batches(call)) as batches:
                            async for batch in batches:
                                heard = clock()
                                for change in batch:
                                    yield change
                    except _Broken as error:
                        self._client.leave(endpoint)
                        reason = f"{endpoint}: {error}"
            except PoolUnavailable as error:
                if self._client.closed:
                    raise
                reason = error.message
            if clock() - heard > PATIENCE:
                raise PoolUnavailable(f"no member of {self._client.address} serves a watch: {reason}")
            log.debug("a watch goes on with another stream", prefix=self._prefix, reason=reason)
            await asyncio.sleep(PAUSE)

    async def _begin(self, call: Any) -> None:
        """Send the request for the watch. Raises :class:`_Broken` when the member has refused the stream already."""
        rpc = self._client.rpc
        key, end = self._keys.span(self._prefix)
        # One revision earlier: see the module docstring. 0 would mean "from now".
        writing = asyncio.ensure_future(call.write(rpc.WatchRequest(create_request=rpc.WatchCreateRequest(
            key=key, range_end=end, start_revision=max(self._following - 1, 1), fragment=True))))
        try:
            done, _ = await asyncio.wait([writing], timeout=self._client.address.timeout)
            if not done:
                raise _Broken("the stream takes nothing")
            self._result(writing)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _batches(self, call: Any) -> AsyncGenerator[list[Change], None]:
        """Yield whole changes from one stream, an empty list for any other message. Raises :class:`_Broken`."""
        events: list[Any] = []
        while True:
            if self.void:
                raise Compacted("the registry's data are others now", oldest=0)
            response = await self._read(call)
            if response.canceled:
                self._canceled(response)
            events.extend(response.events)
            if response.fragment:
                continue
            fresh = [change for change in changes(self._keys, events) if change.revision >= self._following]
            events = []
            if fresh:
                self._following = fresh[-1].revision + 1
                self._denied = 0
            yield fresh

    def _canceled(self, response: Any) -> None:
        if response.compact_revision:
            raise Compacted(f"changes up to revision {response.compact_revision} are not kept; {self._following} was "
                            "asked for", oldest=response.compact_revision + 1)
        if fault("", response.cancel_reason) in (Fault.DENIED, Fault.TOKEN):
            self._client.forget_token()  # etcd answers "permission denied" for an expired token, too
            self._denied += 1
            if self._denied > 2:
                raise AuthenticationFailed(f"{self._client.address} refuses the watch: {response.cancel_reason}")
        raise _Broken(response.cancel_reason or "the member ended the watch")

    async def _read(self, call: Any) -> Any:
        """Return the next response. Raises :class:`_Broken` when the stream ended or the member makes no progress."""
        read = asyncio.ensure_future(call.read())  # awaited apart: to cancel a read is to cancel the stream
        try:
            done, _ = await asyncio.wait([read], timeout=SILENCE)
            if not done:
                rpc = self._client.rpc
                asking = asyncio.ensure_future(
                    call.write(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())))
                done, _ = await asyncio.wait([read], timeout=max(1.0, self._client.address.timeout / 2))
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            if not done:
                raise _Broken("no sign of life")
            response = self._result(read)
            if not hasattr(response, "watch_id"):
                raise _Broken("the member ended the stream")
            return response
        finally:
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)

    def _result(self, done: asyncio.Future[Any]) -> Any:
        """Return the result of a read or a write. Raises :class:`_Broken`."""
        import grpc

        if done.cancelled():
            raise _Broken("the channel was closed")
        error = done.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            found = fault(error.code().name, error.details() or "")
            if found is Fault.TOKEN:
                self._client.forget_token()
            raise _Broken(error.details() or error.code().name)
        if error is not None:
            raise _Broken(str(error))
        return done.result()
