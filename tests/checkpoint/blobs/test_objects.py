"""Checkpoints in object storage: against a real S3 server on loopback (moto's), and one that misbehaves."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.checkpoint.blobs import places
from rgpu.checkpoint.blobs.base import Blobs, DirectoryBlobs, check_name, now
from rgpu.checkpoint.blobs.objects import ObjectBlobs
from rgpu.checkpoint.blobs.places import Credentials
from rgpu.checkpoint.store import collect
from rgpu.checkpoint.store.checkpoint_store import CheckpointStore, user_key, user_tag
from rgpu.checkpoint.store.grants import Grant, granted
from rgpu.session.errors import (
    AlreadyExists,
    AuthenticationFailed,
    Corrupt,
    NotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreMissing,
    StoreUnreachable,
    UsageError,
)
from tests.support.checkpoint.moto_server import MotoServer
from tests.support.checkpoint.store_helpers import BASE, PAGE, FailingBlobs, checkpoint_of, many_pages, restores_as
from tests.support.pools.proxy import free_port

pytest.importorskip("moto.server", reason="moto is not installed (pip install 'moto[s3]' flask flask-cors)")

GRANTED = Credentials(access_key_id="test", secret_access_key="test")


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    with MotoServer() as running:
        yield running


@pytest.fixture(params=["directory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "directory":
        return DirectoryBlobs(tmp_path / "blobs")
    server: MotoServer = request.getfixturevalue("server")
    number = sum(map(ord, request.node.name))
    return places.connect(places.parse(server.bucket(f"bucket-{number}")), GRANTED)


# -- every place keeps the same promises --------------------------------------------------
def test_blobs(blobs: Blobs) -> None:
    with pytest.raises(StoreMissing):
        blobs.read("a/b")
    with pytest.raises(StoreMissing):
        blobs.read_range("a/b", 0, 5)
    assert blobs.size("a/b") is None and blobs.ls("a/") == []
    blobs.put("a/b", b"first")
    blobs.put("a/b", b"second")
    assert blobs.read("a/b") == b"second" and blobs.read("a/b", 3) == b"sec" and blobs.size("a/b") == 6
    assert blobs.read_range("a/b", 2, 3) == b"con" and blobs.read_range("a/b", 4, 100) == b"nd"
    with pytest.raises(AlreadyExists):
        blobs.put("a/b", b"third", new=True)
    blobs.put("a/c", b"", new=True)
    assert blobs.read("a/c") == b"" and blobs.read("a/c", 10) == b""
    sink = blobs.create("a/d")
    assert [sink.write(b"12"), sink.write(b"345"), sink.size] == [0, 2, 5]
    assert blobs.size("a/d") is None, "it appears only at its commit"
    sink.commit()
    gone = blobs.create("a/e")
    gone.write(b"x")
    gone.discard()
    assert [found.name for found in sorted(blobs.ls("a/"))] == ["a/b", "a/c", "a/d"]
    assert {found.size for found in blobs.ls("a/")} == {6, 0, 5}
    assert abs(now(blobs, "a/") - blobs.ls("a/")[0].modified) < 60
    blobs.delete("a/b")
    blobs.delete("a/b")
    assert len(blobs.ls("a/")) == 2
    for name in ("../a", "a//b", "/a", "a/../b", "", "a\nb"):
        with pytest.raises(StoreError):
            check_name(name)


def test_checkpoints(blobs: Blobs) -> None:
    store, device = CheckpointStore(blobs, bytes(range(32)), "users/0011/"), many_pages(20)
    blobs.pack_limit = 6 * PAGE
    first = checkpoint_of(store, "demo/1@7", device)
    assert first["new_chunks"] == 20
    device.write(BASE + 3 * PAGE, b"changed")
    second = checkpoint_of(store, "b", device, 8, base="demo/1@7")
    assert (second["new_chunks"], second["unchanged_pages"], second["pages"]) == (1, 19, 20)
    assert {info.name for info in store.ls()} == {"demo/1@7", "b"}
    with pytest.raises(AlreadyExists):
        store.writer("b")
    store.forget("demo/1@7")
    assert collect.collect(store, grace=0).removed == []
    store.verify("b")
    assert restores_as(store.open("b"), device)
    store.forget("b")
    assert len(collect.collect(store, grace=0).removed) == 5
    assert blobs.ls("users/") == []


def test_a_pack_s_damage_is_found(blobs: Blobs) -> None:
    store, device = CheckpointStore(blobs), many_pages(5)
    checkpoint_of(store, "a", device)
    pack = blobs.ls("packs/")[0].name
    whole = blobs.read(pack)
    blobs.put(pack, whole[:-9])
    with pytest.raises(Corrupt, match="bytes"):
        store.verify("a")
    changed = bytearray(whole)
    changed[-1000] ^= 8
    blobs.put(pack, bytes(changed))
    with pytest.raises(Corrupt):
        store.verify("a")
    with pytest.raises(Corrupt):
        list(store.open("a").pages())
    blobs.delete(pack)
    with pytest.raises(StoreMissing, match="missing"):
        store.verify("a")


# -- credentials and addresses ---------------------------------------------------------------
def test_addresses(tmp_path: Path) -> None:
    place = places.parse("s3://pool/some/where?endpoint=http://10.0.0.1:9000&region=eu")
    assert (place.bucket, place.path, place.endpoint, place.region) == ("pool", "some/where", "http://10.0.0.1:9000",
                                                                        "eu")
    assert places.parse(str(tmp_path)).path == str(tmp_path) and places.parse("file:///x/y").path == "/x/y"
    for wrong in ("", "gs://x/y", "s3://", "s3://a:b@bucket/x", "s3://b/x?secret=1", "s3://b/x?endpoint=ftp://h"):
        with pytest.raises(UsageError):
            places.parse(wrong)
    with pytest.raises(StoreDenied, match="AWS_ACCESS_KEY_ID"):
        places.connect(place, Credentials())


def test_credentials(tmp_path: Path) -> None:
    assert places.credentials(None, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}).access_key_id == "a"
    file = tmp_path / "c"
    with pytest.raises(NotFound):
        places.credentials(file, {})
    file.write_text(json.dumps({"access_key_id": "k", "secret_access_key": "hidden"}))
    os.chmod(file, 0o644)
    with pytest.raises(AuthenticationFailed):
        places.credentials(file, {})
    os.chmod(file, 0o600)
    found = places.credentials(file, {})
    assert found.secret_access_key == "hidden" and "hidden" not in repr(found)
    file.write_text("{")
    with pytest.raises(Corrupt):
        places.credentials(file, {})
    kept = places.without_credentials({"AWS_SECRET_ACCESS_KEY": "x", "RGPU_STORE_CREDENTIALS": "f", "PATH": "p"})
    assert kept == {"PATH": "p"}


# -- a store that misbehaves --------------------------------------------------------------------
class Moods(http.server.BaseHTTPRequestHandler):
    """Takes and gives objects; from the n-th write on it answers as ``mood`` says."""

    protocol_version = "HTTP/1.1"
    mood: tuple[int, str] = (200, "")
    patience = 10**9
    objects: dict[str, bytes] = {}

    def log_message(self, *_: Any) -> None: ...

    def _say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:  # noqa: N802
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        cls = type(self)
        cls.patience -= 1
        if cls.patience < 0:
            status, code = self.mood
            self._say(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())
            return
        cls.objects[self.path.split("?")[0]] = data
        self._say(200, ETag='"1"')

    def do_HEAD(self) -> None:  # noqa: N802
        data = self.objects.get(self.path)
        self._say(404) if data is None else self._say(200, data, ETag='"1"',
                                                      Last_Modified="Wed, 21 Oct 2026 07:28:00 GMT")

    do_GET = do_HEAD  # noqa: N815

    def do_DELETE(self) -> None:  # noqa: N802
        self.objects.pop(self.path, None)
        self._say(204)


@pytest.fixture
def moody() -> Iterator[tuple[type[Moods], ObjectBlobs]]:
    handler = type("Moody", (Moods,), {"objects": {}, "patience": 10**9})
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{served.server_address[1]}"
    yield handler, ObjectBlobs("bucket", "x", {"endpoint": endpoint, "region": "r", "access_key_id": "a",
                                               "secret_access_key": "b"}, retries=1, patience=2.0)
    served.shutdown()


@pytest.mark.parametrize("mood, kind", [
    ((403, "AccessDenied"), StoreDenied), ((403, "ExpiredToken"), StoreDenied),
    ((403, "RequestTimeTooSkewed"), StoreDenied), ((507, "InsufficientStorage"), StoreFull),
    ((403, "QuotaExceeded"), StoreFull), ((503, "SlowDown"), StoreUnreachable), ((404, "NoSuchBucket"), StoreError)])
def test_what_a_store_answers_becomes_an_error_of_its_class(moody: tuple[type[Moods], ObjectBlobs],
                                                            mood: tuple[int, str], kind: type[StoreError]) -> None:
    handler, blobs = moody
    blobs.put("a", b"x")
    handler.mood, handler.patience = mood, 0
    with pytest.raises(kind) as caught:
        blobs.put("b", b"y")
    assert caught.value.detail["reason"]
    assert blobs.size("a") == 1, "what was there before is not harmed"


def test_a_store_that_is_not_there() -> None:
    blobs = ObjectBlobs("bucket", "x", {"endpoint": f"http://127.0.0.1:{free_port()}", "region": "r",
                                        "access_key_id": "a", "secret_access_key": "b"}, retries=0, patience=1.0)
    with pytest.raises(StoreUnreachable):
        blobs.put("a", b"x")
    with pytest.raises(StoreUnreachable):
        blobs.size("a")


@pytest.mark.parametrize("after", range(0, 16, 3))
def test_credentials_revoked_in_mid_upload(server: MotoServer, after: int) -> None:
    """Nothing older is harmed, and the next checkpoint succeeds once the credentials are back."""
    real = places.connect(places.parse(server.bucket(f"revoked-{after}")), GRANTED)
    plain, device = CheckpointStore(real), many_pages(20)
    real.pack_limit = 3 * PAGE
    checkpoint_of(plain, "old", device)
    count = [0]

    def refused(operation: str, name: str) -> None:
        count[0] += 1
        if count[0] > after:
            raise StoreDenied("the store refuses the credentials")

    device.write(BASE, os.urandom(20 * PAGE))
    with pytest.raises(StoreDenied):
        checkpoint_of(CheckpointStore(FailingBlobs(real, refused)), "new", device, 8, base="old")
    plain.verify("old")
    assert [info.name for info in plain.ls()] == ["old"]
    checkpoint_of(plain, "next", device, 9, base="old")
    plain.verify("next")
    assert restores_as(plain.open("next"), device)


# -- workers have no credentials --------------------------------------------------------------
def test_a_worker_reaches_its_user_s_part_and_no_more(server: MotoServer) -> None:
    real = places.connect(places.parse(server.bucket("granted")), GRANTED)
    mine, other = user_tag("me"), user_tag("somebody else")
    real.put(f"users/{other}/images/x.image", b"theirs")
    device = many_pages(12)
    with Grant(real, mine, user_key(bytes(32), mine)) as grant, \
            granted(grant.values, [os.dup(fd) for fd in grant.descriptors]) as checkpoints:
        assert "secret" not in str(grant.values) and b"test" not in str(grant.values).encode()
        checkpoint_of(checkpoints.own, "a", device)
        device.write(BASE, b"changed")
        assert checkpoint_of(checkpoints.own, "b", device, 8, base="a")["new_chunks"] == 1
        assert restores_as(checkpoints.open("b"), device)
        with pytest.raises(NotFound):
            checkpoints.open("c")
        reach = checkpoints.own.blobs
        for forbidden in (lambda: reach.read(f"users/{other}/images/x.image"), lambda: reach.ls("users/"),
                          lambda: reach.put("images/x", b""), lambda: reach.delete(f"users/{other}/images/x.image"),
                          lambda: reach.read(f"users/{mine}/../{other}/images/x.image")):
            with pytest.raises(StoreDenied):
                forbidden()
        with pytest.raises(StoreMissing):
            reach.read(f"users/{mine}/images/none")
    with pytest.raises(StoreUnreachable):
        reach.size(f"users/{mine}/images/a")
    assert CheckpointStore(real, user_key(bytes(32), mine), f"users/{mine}/").verify("b")["pages"] == 12
    with pytest.raises(Corrupt, match="another key"):
        CheckpointStore(real, user_key(bytes(32), other), f"users/{mine}/").open("b")
