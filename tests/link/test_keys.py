"""Key files, authorized keys, and a pool's directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import structlog

from rgpu.link.keys import AuthorizedKeys, Endpoint, KeyPair, PoolFiles, PublicKey
from rgpu.link.loggers import configure_logging
from rgpu.session.errors import AlreadyExists, AuthenticationFailed, Corrupt, NotFound, UsageError


def test_a_key_is_private_and_comes_back(tmp_path: Path) -> None:
    pair = KeyPair.create("user", "alice")
    path = tmp_path / "keys" / "user.key"
    pair.save(path)
    assert KeyPair.load(path) == pair
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert pair.secret not in repr(pair)
    with pytest.raises(AlreadyExists):
        KeyPair.create("user", "bob").save(path)
    assert KeyPair.load(path) == pair


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "user.key"
    KeyPair.create("user", "alice").save(path)
    path.chmod(mode)
    with pytest.raises(AuthenticationFailed, match="chmod 600"):
        KeyPair.load(path)


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(AuthenticationFailed, match="written by others"):
        KeyPair.create("user", "alice").save(tmp_path / "open" / "user.key")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"role":"king","name":"a","public":"x"}',
                                     b'{"role":"user","name":"../a","public":"x"}'])
def test_rubbish_is_no_key(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "user.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(Corrupt):
        KeyPair.load(path)


def test_a_secret_of_another_key_is_refused(tmp_path: Path) -> None:
    one, two = KeyPair.create("user", "a"), KeyPair.create("user", "b")
    KeyPair("user", "a", one.public, two.secret).save(tmp_path / "k.key")
    with pytest.raises(Corrupt, match="belong together"):
        KeyPair.load(tmp_path / "k.key")


def test_missing_and_misnamed(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        KeyPair.load(tmp_path / "none.key")
    with pytest.raises(UsageError):
        KeyPair.create("root", "alice")
    with pytest.raises(UsageError):
        KeyPair.create("user", "../alice")


def test_authorized_keys_follow_the_directory(tmp_path: Path) -> None:
    keys = AuthorizedKeys(tmp_path / "authorized")
    pair = KeyPair.create("node", "a")
    assert keys.find(pair.public) is None
    keys.add(pair.public_key())
    found = keys.find(pair.public)
    assert found == PublicKey("node", "a", pair.public)
    with pytest.raises(AlreadyExists):
        keys.add(KeyPair.create("node", "a").public_key())
    other = AuthorizedKeys(tmp_path / "authorized")
    other.add(KeyPair.create("user", "u").public_key())
    assert [key.name for key in keys.all()] == ["a", "u"]
    (tmp_path / "authorized" / "broken.pub").write_text("not json")
    assert keys.find(pair.public) == found
    keys.remove("a")
    assert keys.find(pair.public) is None
    with pytest.raises(NotFound):
        keys.remove("a")


def test_a_pool_directory(tmp_path: Path) -> None:
    pool = PoolFiles(tmp_path / "pool")
    description = pool.create()
    secret = pool.secret()
    assert len(secret) == 32 and stat.S_IMODE((pool.root / "secret").stat().st_mode) == 0o600
    node = pool.add_node("a")
    assert pool.add_node("a") == node
    found = pool.authorized.find(node.public)
    assert found is not None and found.role == "node"
    user = pool.authorized.find(KeyPair.load(pool.key_path("user")).public)
    assert user is not None and user.role == "user"
    description.endpoints.append(Endpoint("tcp://127.0.0.1:1", node.public, "a"))
    pool.write_description(description)
    assert pool.read_description() == description
    with pytest.raises(AlreadyExists):
        pool.create()
    assert pool.secret() == secret
    os.chmod(pool.root / "secret", 0o644)
    with pytest.raises(AuthenticationFailed):
        pool.secret()


def test_logs_hold_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "log"
    try:
        configure_logging(file=path, level="debug")
        structlog.get_logger("x").info("hello", secret=b"abc", number=3,
                                       args={"ticket": b"t0p", "n": [b"raw", {"send_key": "k1"}]})
    finally:
        structlog.reset_defaults()
    text = path.read_text()
    assert '"number": 3' in text and "(3 bytes)" in text
    assert "abc" not in text and "t0p" not in text and "k1" not in text and "raw" not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
