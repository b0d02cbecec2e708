"""The pool's secrets in a node's folder: generations, what counts, what was dropped for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rgpu.link.keys import PoolFiles
from rgpu.link.secrets import FILE, PoolSecrets, mark, write_joined
from rgpu.session.errors import AuthenticationFailed, Corrupt, NotFound, PoolUnavailable

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def files(tmp_path: Path) -> PoolFiles:
    made = PoolFiles(tmp_path / "pool")
    made.create()
    return made


def test_a_pool_that_never_rotated_has_the_secret_that_it_was_made_with(files: PoolFiles) -> None:
    """Also one of an earlier version: nothing is written until there is something to write."""
    secrets = PoolSecrets(files)
    assert secrets.marks() == {1: mark(files.secret())} and not (files.root / FILE).exists()
    with pytest.raises(PoolUnavailable, match="keys rotate --status"):
        secrets.issuing()
    assert secrets.accepted() == ()
    secrets.count(1, (1,))
    assert secrets.issuing() == files.secret() and secrets.accepted() == (files.secret(),)


def test_generations_and_what_was_dropped_outlive_the_daemon(files: PoolFiles) -> None:
    secrets = PoolSecrets(files)
    second = secrets.make(2)
    secrets.count(2, (1, 2))
    assert secrets.issuing() == second and secrets.accepted() == (second, files.secret())
    assert (files.root / FILE).stat().st_mode & 0o777 == 0o600
    again = PoolSecrets(files)
    assert again.secret(2, mark(second)) == second
    assert again.drop(1) and not again.drop(1)
    again.count(1, (1, 2))
    assert again.accepted() == (second,)
    again.add(1, files.secret())  # it never comes back
    last = PoolSecrets(files)
    assert last.marks() == {2: mark(second)} and last.dropped == 1
    assert last.of_checkpoints == files.secret(), "what checkpoints' keys derive from stays"
    with pytest.raises(NotFound):
        last.secret(1, mark(files.secret()))
    with pytest.raises(NotFound):
        last.secret(2, mark(bytes(32)))


def test_no_secret_stands_in_a_mark(files: PoolFiles) -> None:
    secret = files.secret()
    assert len(mark(secret)) == 32 and mark(secret) not in secret.hex() and mark(secret) != mark(bytes(32))


def test_several_daemons_of_one_folder_lose_nothing_of_each_other(files: PoolFiles) -> None:
    code = ("import sys; from pathlib import Path; from rgpu.link.keys import PoolFiles; "
            "from rgpu.link.secrets import PoolSecrets\n"
            "secrets = PoolSecrets(PoolFiles(Path(sys.argv[1])))\n"
            "[secrets.make(number) for number in range(int(sys.argv[2]), 60, 4)]")
    writers = [subprocess.Popen([sys.executable, "-c", code, str(files.root), str(2 + which)], cwd=ROOT,
                                env={**os.environ, "PYTHONPATH": str(ROOT)}) for which in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert sorted(PoolSecrets(files).marks()) == list(range(1, 60))


@pytest.mark.parametrize("content", [
    b"", b"{}", b"[1]", b'{"secrets":{"2":"00"}}', b'{"secrets":{"2":"zz"}}', b'{"secrets":{"x":"00"}}',
    b'{"secrets":{},"rgpu_secrets":2}', b'{"secrets":{},"dropped":-1}', b'{"secrets":{},"more":1}', b"\xff" * 100])
def test_files_that_are_none(files: PoolFiles, content: bytes) -> None:
    path = files.root / FILE
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(Corrupt):
        PoolSecrets(files)


def test_one_that_others_may_read_is_refused(files: PoolFiles) -> None:
    PoolSecrets(files).make(2)
    (files.root / FILE).chmod(0o640)
    with pytest.raises(AuthenticationFailed, match="chmod 600"):
        PoolSecrets(files)


def test_what_a_host_that_joins_is_given(files: PoolFiles, tmp_path: Path) -> None:
    secrets = PoolSecrets(files)
    secrets.make(2)
    secrets.make(3)
    secrets.drop(1)
    other = PoolFiles(tmp_path / "other")
    other.root.mkdir(mode=0o700)
    (other.root / "secret").write_bytes(files.secret())
    (other.root / "secret").chmod(0o600)
    given = msgspec.msgpack.decode(msgspec.msgpack.encode(secrets.everything()))
    write_joined(other, given)
    joined = PoolSecrets(other)
    assert joined.marks() == secrets.marks() and joined.dropped == 1
    write_joined(other, None)  # by a coordinator of an earlier version
    for bad in (1, {}, {"held": {"x": bytes(32)}}, {"held": {"2": b"short"}}, {"held": {"2": "text"}}):
        with pytest.raises(Corrupt):
            write_joined(other, bad)
