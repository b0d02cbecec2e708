"""Requests to the members of an etcd cluster: choice of the member, deadlines, and the meaning of failures.

* One channel for each member. After a failure or a timeout of a member the next one is
  used; gRPC's own choice among several addresses stays with a member
  that is frozen, because its connection is open.
* Every request has a deadline. A request that only reads is repeated, at other members, until
  then; a request that changes something is sent once, and only on an established connection:
  "not sent" is :class:`PoolUnavailable`, "sent and not answered"
  :class:`UnknownOutcome`, and the caller reads it back.
* ``hasleader``: a member that is cut off from the majority returns an error at once, and
  ends its watches, instead of waiting.
* Tokens of user authentication expire, and are lost with their member: a request refused
  for its token has changed nothing, and is sent again with a new one.

Used from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

from rgpu.migrate.registry.etcd import rpc as etcd_rpc
from rgpu.migrate.registry.etcd.address import EtcdAddress
from rgpu.migrate.registry.etcd.messages import Fault, fault
from rgpu.session.errors import AuthenticationFailed, PoolUnavailable, UnknownOutcome, UsageError

log = structlog.get_logger(__name__)

MAX_MESSAGE = 64 << 20  #: bytes received; a page of the largest records that the pool writes is below it
PAUSE = 0.05  #: seconds between two members
TOKENS = 3  #: most new tokens for one request

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # etcd's servers allow one every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),  # also the time limit of an attempt to connect
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.enable_retries", 0),  # gRPC repeats nothing: this module does
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class EtcdFault(Exception):
    """Definite error answer of etcd, to be interpreted by the caller: ``fault`` is one of NO_LEASE, LEASE_EXISTS,
    COMPACTED, FUTURE, INVALID. Never leaves this package."""

    def __init__(self, found: Fault, details: str) -> None:
        super().__init__(details)
        self.fault = found


class _Member:
    """Channel of one member, with its methods."""

    def __init__(self, endpoint: str, rpc: etcd_rpc.Rpc, channel: Any) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self._rpc = rpc
        self._methods: dict[str, Any] = {}

    def method(self, name: str) -> Any:
        if name not in self._methods:
            self._methods[name] = self._rpc.method(self.channel, name)
        return self._methods[name]

    async def connected(self, seconds: float) -> bool:
        """Whether a connection is established, after at most that time."""
        import grpc

        states = grpc.ChannelConnectivity
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (state := self.channel.get_state(try_to_connect=True)) is not states.READY:
                    if state in (states.TRANSIENT_FAILURE, states.SHUTDOWN):
                        return False
                    await self.channel.wait_for_state_change(state)
                return True
        return False


class EtcdClient:
    """Client of one cluster (see the module docstring). ``breaks`` counts lost connections and missing answers."""

    def __init__(self, address: EtcdAddress) -> None:
        """Make the channels. Raises :class:`UsageError` without gRPC and etcd3, :class:`AuthenticationFailed`,
        :class:`Refused`.
        """
        self.rpc = etcd_rpc.load()
        self.address = address
        self.closed = False
        self.breaks = 0
        self._token: str | None = None
        self._authenticating = asyncio.Lock()
        channels = _channels(address)
        self._members = [_Member(endpoint, self.rpc, channel) for endpoint, channel in channels.items()]
        self._at = random.randrange(len(self._members))  # spreads the nodes over the members

    async def call(self, name: str, request: Any, *, change: bool = False, timeout: float | None = None) -> Any:
        """Return the response to a method such as ``"KV.Range"``. ``timeout``: seconds, all members together.

        Raises :class:`PoolUnavailable` (nothing was changed), :class:`UnknownOutcome` (only with ``change``),
        :class:`AuthenticationFailed`, :class:`EtcdFault`.
        """
        seconds = timeout or self.address.timeout
        until = asyncio.get_running_loop().time() + seconds
        reasons: dict[str, str] = {}
        tokens = 0
        while True:
            member = await self._reach(until, reasons)
            left = until - asyncio.get_running_loop().time()
            share = left if change or len(self._members) == 1 else min(left, seconds / 2)
            sent = False
            try:
                metadata = await self._metadata(member, share)
                sent = True
                return await self._once(member, name, request, share, metadata)
            except asyncio.CancelledError:
                self._check_open()
                raise
            except Exception as error:  # noqa: BLE001 - sorted below; other errors than gRPC's are raised again
                found, details = self._sort(error)
                tokens += found is Fault.TOKEN
                if found is Fault.TOKEN and tokens > TOKENS:
                    found = Fault.DENIED
                self._raise(found, details, member, change and sent)
                if found is not Fault.TOKEN:
                    reasons[member.endpoint] = details
                    self.leave(member.endpoint)
                    await asyncio.sleep(PAUSE)

    async def _once(self, member: _Member, name: str, request: Any, seconds: float, metadata: Any) -> Any:
        """Send one request to one member; for a streaming method, one message, and read its answer."""
        call = member.method(name)
        if not name.startswith("Lease.LeaseKeepAlive"):
            return await call(request, timeout=seconds, metadata=metadata)
        stream = call(timeout=seconds, metadata=metadata)
        try:
            await stream.write(request)
            answer = await stream.read()
            if not hasattr(answer, "TTL"):
                raise asyncio.InvalidStateError("the member ended the stream without an answer")
            return answer
        finally:
            stream.cancel()

    def _sort(self, error: Exception) -> tuple[Fault, str]:
        """Return the meaning of a failure, with its details. Raises it again when it is not one of gRPC."""
        import grpc

        self._check_open()
        if isinstance(error, asyncio.InvalidStateError | grpc.aio.UsageError):  # the stream broke during a write
            return Fault.UNKNOWN, str(error)
        if not isinstance(error, grpc.aio.AioRpcError):
            raise error
        details = error.details() or error.code().name
        return fault(error.code().name, details), details

    def _raise(self, found: Fault, details: str, member: _Member, changed: bool) -> None:
        """Raise the error that ends the request; return where another try is allowed."""
        if found is Fault.TOKEN:
            self._token = None
        elif found is Fault.DENIED:
            hint = "" if self.address.user else "; name a user: user=NAME&password-file=FILE"
            raise AuthenticationFailed(f"{self.address} refuses us: {details}{hint}", endpoint=member.endpoint)
        elif found is Fault.SPACE:
            raise PoolUnavailable(f"{self.address} is full (its space alarm is on) and takes no writes: compact and "
                                  "defragment it, then disarm the alarm (etcdctl compact, defrag, alarm disarm)",
                                  reason="space")
        elif found is Fault.UNKNOWN and changed:
            self.leave(member.endpoint)
            raise UnknownOutcome(f"{member.endpoint} did not say whether it made the change: {details}")
        elif found not in (Fault.ELSEWHERE, Fault.UNKNOWN):
            raise EtcdFault(found, details)

    async def _reach(self, until: float, reasons: dict[str, str]) -> _Member:
        """Return a connected member. Raises :class:`PoolUnavailable` when ``until`` (loop's clock) passes first."""
        share = self.address.timeout / (2 * len(self._members))
        while True:
            self._check_open()
            left = until - asyncio.get_running_loop().time()
            if left <= 0:
                said = "; ".join(f"{endpoint}: {reason}" for endpoint, reason in reasons.items())
                raise PoolUnavailable(f"no member of {self.address} answers ({said or 'no time left'})", **reasons)
            member = self._members[self._at]
            if await member.connected(min(left, share)):
                return member
            reasons.setdefault(member.endpoint, "no connection")
            self.leave(member.endpoint)
            await asyncio.sleep(PAUSE)

    def leave(self, endpoint: str) -> None:
        """Switch to the next member, unless another request has done so already."""
        if self._members[self._at].endpoint == endpoint:
            self.breaks += 1
            self._at = (self._at + 1) % len(self._members)

    @asynccontextmanager
    async def stream(self, name: str) -> AsyncIterator[tuple[Any, str]]:
        """Yield an open stream and its member. Raises as :meth:`call`; failures on the stream are gRPC's."""
        until = asyncio.get_running_loop().time() + self.address.timeout
        member = await self._reach(until, {})
        try:
            metadata = await self._metadata(member, until - asyncio.get_running_loop().time())
        except Exception as error:  # noqa: BLE001 - sorted
            found, details = self._sort(error)
            self._raise(found, details, member, False)
            self.leave(member.endpoint)
            raise PoolUnavailable(f"{member.endpoint} does not answer: {details}") from error
        call = member.method(name)(metadata=metadata)
        try:
            yield call, member.endpoint
        finally:
            call.cancel()

    def forget_token(self) -> None:
        """Have the next request authenticate anew."""
        self._token = None

    async def _metadata(self, member: _Member, seconds: float) -> tuple[tuple[str, str], ...]:
        leader = ("hasleader", "true")
        if not self.address.user:
            return (leader,)
        async with self._authenticating:  # one new token, however many requests wait for it
            if self._token is None:
                self._token = await self._authenticate(member, max(seconds, 0.1))
        return (leader, ("token", self._token)) if self._token else (leader,)

    async def _authenticate(self, member: _Member, seconds: float) -> str:
        """Return a token; "" where etcd has authentication switched off."""
        import grpc

        request = self.rpc.AuthenticateRequest(name=self.address.user, password=self.address.password())
        try:
            answer = await member.method("Auth.Authenticate")(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if fault(error.code().name, error.details() or "") is not Fault.NO_AUTH:
                raise
            log.warning("etcd has no user authentication switched on: anybody who reaches it owns the pool",
                        registry=str(self.address))
            return ""
        return str(answer.token)

    def _check_open(self) -> None:
        if self.closed:
            raise PoolUnavailable(f"the registry at {self.address} is closed")

    async def close(self) -> None:
        """Close the channels; requests and streams under way end with :class:`PoolUnavailable`."""
        self.closed = True
        for member in self._members:
            await member.channel.close()


def _channels(address: EtcdAddress) -> dict[str, Any]:
    try:
        import grpc
    except ImportError as error:
        raise UsageError(f"a registry in etcd needs grpcio: {error}") from error
    options: list[tuple[str, int | str]] = list(_CHANNEL_OPTIONS)
    if not address.tls:
        return {endpoint: grpc.aio.insecure_channel(endpoint, options) for endpoint in address.endpoints}
    if address.server_name:
        options.append(("grpc.ssl_target_name_override", address.server_name))
    credentials = grpc.ssl_channel_credentials(*address.certificates())
    return {endpoint: grpc.aio.secure_channel(endpoint, credentials, options) for endpoint in address.endpoints}
