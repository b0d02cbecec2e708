"""The pure parts of the etcd registry: addresses, messages, what errors mean, the guard against one that went back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rgpu.migrate.registry.base import Delete, Put, absent, has_value, unchanged
from rgpu.migrate.registry.etcd import rpc as etcd_rpc
from rgpu.migrate.registry.etcd.address import parse
from rgpu.migrate.registry.etcd.messages import Fault, Keys, changes, fault, successor, txn_request, txn_result
from rgpu.migrate.registry.guard import Guard
from rgpu.session.errors import AuthenticationFailed, Corrupt, PoolUnavailable, Refused, UsageError


def test_addresses() -> None:
    plain = parse("etcd://10.0.0.1,[::1]:4001,etcd-c.example:2380/pools/left")
    assert plain.endpoints == ("10.0.0.1:2379", "[::1]:4001", "etcd-c.example:2380")
    assert (plain.prefix, plain.tls, plain.timeout) == ("pools/left", False, 4.0)
    assert parse("etcd://a").prefix == "rgpu"
    assert str(plain) == "etcd://10.0.0.1:2379,[::1]:4001,etcd-c.example:2380/pools/left"
    full = parse("etcd://a/p?ca=/ca&cert=/c&key=/k&user=u&password-file=/p&timeout=2.5&server-name=etcd")
    assert full.tls and (full.user, full.password_file, full.timeout, full.server_name) == ("u", "/p", 2.5, "etcd")
    assert parse("etcd://a?tls=on").tls


@pytest.mark.parametrize(("text", "says"), [
    ("etcd://", "write etcd"), ("http://a", "no registry"),
    ("etcd://a:0", "HOST:PORT"), ("etcd://a:99999", "HOST:PORT"),
    ("etcd://a,,b", "HOST:PORT"), ("etcd://a,a", "twice"), ("etcd://u:p@a", "password-file"), ("etcd://a b", "HOST"),
    ("etcd://a/../x y", "prefix"), ("etcd://a?colour=1", "unknown option colour"), ("etcd://a?ca=1&ca=2", "twice"),
    ("etcd://a?timeout=never", "timeout"), ("etcd://a?timeout=nan", "timeout"), ("etcd://a?cert=/c", "belong together"),
    ("etcd://a?user=u", "belong together"), ("etcd://a?tls=off&ca=/x", "tls=off"), ("etcd://a?tls=maybe", "tls=maybe"),
    ("etcd://a#x", "no registry"), ("etcd://[::1", "registry"), ("etcd://a/" + "/".join("abcdefghi"), "prefix"),
])
def test_wrong_addresses_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(text)


def test_a_password_stays_private(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="in clear"):
        parse("etcd://10.0.0.1?user=u&password-file=/p")
    assert parse("etcd://127.0.0.1,localhost,[::1]?user=u&password-file=/p").user == "u"
    file = tmp_path / "password"
    address = parse(f"etcd://127.0.0.1?user=u&password-file={file}")
    with pytest.raises(AuthenticationFailed, match="cannot be read"):
        address.password()
    file.write_text("secret word\n")
    file.chmod(0o644)
    with pytest.raises(Refused, match="0644"):
        address.password()
    file.chmod(0o600)
    assert address.password() == "secret word"


def test_keys_and_spans() -> None:
    keys = Keys("pools/left")
    assert keys.outer("nodes/a") == b"pools/left/pool/nodes/a" and keys.inner(keys.outer("nodes/a")) == "nodes/a"
    assert keys.span("") == (b"pools/left/pool/", b"pools/left/pool0")
    assert keys.inner(b"pools/left/pool/\xff\xfe") == "\\xff\\xfe"
    assert (successor(b"a\xff\xff"), successor(b"ab"), successor(b"\xff")) == (b"b", b"ac", b"\0")


def test_a_transaction_reads_what_it_compared() -> None:
    rpc, keys = etcd_rpc.load(), Keys("p")
    compares = [unchanged("a", 7), absent("b"), has_value("a", b"x")]
    request = txn_request(rpc, keys, compares, [Put("a", b"1", 5), Delete("b")])
    assert [(c.key, c.target, c.result) for c in request.compare] == [
        (b"p/pool/a", rpc.Compare.MOD, rpc.Compare.EQUAL), (b"p/pool/b", rpc.Compare.CREATE, rpc.Compare.EQUAL),
        (b"p/pool/a", rpc.Compare.VALUE, rpc.Compare.EQUAL)]
    assert [op.request_range.key for op in request.failure] == [b"p/pool/a", b"p/pool/b"], "each key once"
    assert request.success[0].request_put.lease == 5 and request.success[1].request_delete_range.key == b"p/pool/b"

    response = rpc.TxnResponse(succeeded=False)
    response.header.revision = 9
    kv = response.responses.add().response_range.kvs.add()
    kv.key, kv.value, kv.mod_revision, kv.create_revision = b"p/pool/a", b"y", 8, 3
    response.responses.add().response_range.SetInParent()
    result = txn_result(keys, compares, response)
    assert not result.succeeded and result.revision == 9
    assert result.entries["b"] is None and result.entries["a"] is not None and result.entries["a"].value == b"y"


def test_events_become_whole_changes() -> None:
    def event(kind: int, key: bytes, revision: int) -> SimpleNamespace:
        return SimpleNamespace(type=kind, kv=SimpleNamespace(key=b"p/pool/" + key, value=b"v", create_revision=revision,
                                                             mod_revision=revision, lease=0))

    found = changes(Keys("p"), [event(0, b"a", 4), event(1, b"b", 4), event(0, b"a", 6)])
    assert [(c.revision, [(e.key, e.entry is None) for e in c.events]) for c in found] == [
        (4, [("a", False), ("b", True)]), (6, [("a", False)])]


@pytest.mark.parametrize(("code", "details", "expected"), [
    ("UNAVAILABLE", "etcdserver: no leader", Fault.ELSEWHERE),
    ("UNAVAILABLE", "failed to connect to all addresses; last error: Connection refused", Fault.ELSEWHERE),
    ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Fault.ELSEWHERE),
    ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Fault.SPACE),
    ("UNAVAILABLE", "etcdserver: request timed out, possibly due to previous leader failure", Fault.UNKNOWN),
    ("UNAVAILABLE", "etcdserver: leader changed", Fault.UNKNOWN), ("UNAVAILABLE", "Socket closed", Fault.UNKNOWN),
    ("DEADLINE_EXCEEDED", "Deadline Exceeded", Fault.UNKNOWN), ("INTERNAL", "who knows", Fault.UNKNOWN),
    ("UNKNOWN", "", Fault.UNKNOWN), ("UNAUTHENTICATED", "etcdserver: invalid auth token", Fault.TOKEN),
    ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Fault.TOKEN),
    ("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user ID or password", Fault.DENIED),
    ("PERMISSION_DENIED", "etcdserver: permission denied", Fault.DENIED),
    ("NOT_FOUND", "etcdserver: requested lease not found", Fault.NO_LEASE),
    ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", Fault.COMPACTED),
    ("INVALID_ARGUMENT", "etcdserver: request is too large", Fault.INVALID),
])
def test_what_an_error_means(code: str, details: str, expected: Fault) -> None:
    assert fault(code, details) is expected


def test_etcd3_gives_todays_messages_and_the_fields_of_3_4() -> None:
    rpc = etcd_rpc.load()
    request = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
    assert request.SerializeToString() == b"\x1a\x00"
    assert rpc.WatchCreateRequest(fragment=True).SerializeToString() == b"\x40\x01"
    assert rpc.WatchResponse.FromString(b"\x38\x01").fragment is True
    with pytest.raises(AttributeError, match="no message Nothing"):
        rpc.Nothing  # noqa: B018


def test_a_package_that_is_not_known_is_said_to_be(tmp_path: Path) -> None:
    for name in ("kv", "auth", "rpc"):
        (tmp_path / f"{name}_pb2.py").write_text("DESCRIPTOR = _pool.AddSerializedFile(b'newer')\n")
    with pytest.raises(ValueError, match="no serialized descriptor"):
        etcd_rpc.Rpc(tmp_path)


# -- the guard ---------------------------------------------------------------------


def test_the_guard_remembers(tmp_path: Path) -> None:
    file = tmp_path / "registry.json"
    guard = Guard(file)
    guard.check("x", 10)
    guard.check("x", 30)
    guard.save()
    assert json.loads(file.read_text()) == {"v": 1, "cluster": "x", "revision": 30}
    again = Guard(file)
    for cluster, revision, says in (("x", 29, "revision 30 to 29"), ("y", 40, "identity changed from x to y")):
        with pytest.raises(PoolUnavailable, match=says) as caught:
            again.check(cluster, revision)
        assert caught.value.detail["reason"] == "went back" and "rgpu pool adopt" in caught.value.message
    assert (again.cluster, again.revision) == ("x", 30), "what is not believed is not remembered"
    again.check("x", 30)
    assert again.reason == ""


def test_a_person_makes_the_guard_believe(tmp_path: Path) -> None:
    file = tmp_path / "registry.json"
    guard = Guard(file)
    guard.check("x", 30)
    with pytest.raises(PoolUnavailable):
        guard.check("y", 4)
    guard.believe("y", 4)
    guard.check("y", 4)
    assert guard.reason == ""
    for other in (guard, Guard(file)):
        with pytest.raises(PoolUnavailable, match="identity changed from y to x"):
            other.check("x", 40)


def test_what_is_doubted_stays_so_until_a_person_decides() -> None:
    guard = Guard()
    guard.check("x", 10)
    guard.distrust("node-a holds s at epoch 4, and the registry says 3")
    for _ in range(2):
        with pytest.raises(PoolUnavailable, match="epoch 4"):
            guard.check("x", 11)
    assert guard.reason and guard.revision == 10
    guard.believe("x", 12)
    guard.check("x", 12)
    assert guard.reason == ""


def test_an_answer_that_was_overtaken_is_none_that_went_back() -> None:
    guard = Guard()
    guard.check("x", 10)
    floor = guard.revision
    guard.check("x", 12, floor)
    guard.check("x", 11, floor)
    assert guard.revision == 12
    with pytest.raises(PoolUnavailable):
        guard.check("x", 11)


@pytest.mark.parametrize("content", [
    "", "{}", "[]", '{"v": 2, "cluster": "x", "revision": 1}', '{"v": 1, "cluster": 3, "revision": 1}', "\xff",
    '{"v": 1, "cluster": "x", "revision": -1}', '{"v": 1, "cluster": "x", "revision": true}'])
def test_a_damaged_memory_is_said_to_be(tmp_path: Path, content: str) -> None:
    file = tmp_path / "registry.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(Corrupt, match="registry.json"):
        Guard(file)
