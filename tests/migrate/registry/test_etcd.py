"""The etcd registry: the common suite, against real clusters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.registry.conformance import Conformance
from tests.support.registry.etcd_cluster import EtcdCluster, Tls, needs_etcd

_numbers = itertools.count()
PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three members; TLS to clients and among themselves; users, whose tokens end after a second."""
    folder = tmp_path_factory.mktemp("etcd3")
    tls = Tls.make(folder / "tls")
    (folder / "password").touch(mode=0o600)
    (folder / "password").write_text(PASSWORD + "\n")
    arguments = ("--auth-token-ttl", "1", "--bcrypt-cost", "4")
    with EtcdCluster(folder, size=3, tls=tls, arguments=arguments) as cluster:
        cluster.authentication("rgpu", PASSWORD, "secured")
        yield cluster


class EtcdConformance(Conformance):
    """etcd grants whole seconds, at least two with its default timing, and ends leases twice a second."""

    ttl = 2.0
    late = 3.0


@needs_etcd
class TestOneMember(EtcdConformance):
    @pytest.fixture
    def address(self, one: EtcdCluster) -> str:
        return one.address(f"one/test-{next(_numbers)}")


@needs_etcd
class TestThreeMembersSecured(EtcdConformance):
    @pytest.fixture
    def address(self, secured: EtcdCluster) -> str:
        return secured.address(f"secured/test-{next(_numbers)}", user="rgpu", password_file=secured.folder / "password")
