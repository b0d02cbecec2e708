"""Who gets at an etcd registry: TLS, users, and tokens that end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.migrate.registry.base import Put, absent, txn_certain, unchanged
from rgpu.migrate.registry.etcd.registry import EtcdRegistry
from rgpu.session.errors import AuthenticationFailed, PoolUnavailable
from tests.support.registry.etcd_cluster import EtcdCluster, Tls, needs_etcd
from tests.support.registry.etcd_use import Follower, eventually, prefix, use, works

pytestmark = needs_etcd

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    folder = tmp_path_factory.mktemp("secured")
    tls = Tls.make(folder / "tls")
    (folder / "password").touch(mode=0o600)
    (folder / "password").write_text(PASSWORD + "\n")
    with EtcdCluster(folder, tls=tls, arguments=("--auth-token-ttl", "1", "--bcrypt-cost", "4")) as cluster:
        cluster.authentication("rgpu", PASSWORD, "faults")
        yield cluster


def as_user(cluster: EtcdCluster, where: str = "", **options: object) -> str:
    return cluster.address(where or prefix(), user="rgpu", password_file=cluster.folder / "password", **options)


def test_a_token_that_ended_is_replaced(secured: EtcdCluster) -> None:
    """While nothing is asked, and when the member that knew it has died; watches too."""
    async def test(registry: EtcdRegistry) -> None:
        first = await registry.put_if(absent("a"), b"1")
        follower = Follower(registry, "", first + 1)
        token = registry._client._token
        await asyncio.sleep(4.0)
        second = await registry.put_if(unchanged("a", first), b"2")
        assert registry._client._token != token, "the token did not end: this test shows nothing"
        secured.members[0].kill()
        secured.start(secured.members[0])
        await asyncio.to_thread(secured.wait_ready)
        await eventually(lambda: txn_certain(registry, [unchanged("a", second)], [Put("a", b"3")]))
        entry = await eventually(lambda: registry.get("a"))
        await follower.reached(entry.mod_revision)
        await follower.stop()

    use(as_user(secured), test)


def test_who_is_not_let_in_is_told_so(secured: EtcdCluster, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("not it")
    for address in (secured.address(prefix()), secured.address(prefix(), user="rgpu", password_file=wrong),
                    secured.address(prefix(), user="nobody", password_file=wrong), as_user(secured, "elsewhere")):
        with pytest.raises(AuthenticationFailed, match="refuses us"):
            use(address, works)


def test_strangers_certificates(secured: EtcdCluster, tmp_path: Path) -> None:
    """A server that our authority does not vouch for, and a client that theirs does not."""
    other = Tls.make(tmp_path / "tls")
    for options in ({"ca": other.ca}, {"cert": other.cert, "key": other.key}, {"server_name": "else.where"}):
        with pytest.raises(PoolUnavailable, match="no member"):
            use(as_user(secured, timeout=1, **options), works)
    plain = f"etcd://{secured.members[0].endpoint}/{prefix()}?timeout=1"
    with pytest.raises(PoolUnavailable, match="no member"):
        use(plain, works)
