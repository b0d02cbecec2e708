"""Contexts: which pool is meant, what a login leaves behind, and what a wrong one is told."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rgpu.api.contexts import Contexts
from rgpu.api.settings import Settings
from rgpu.cli.command_line import cli
from rgpu.link import invitations
from rgpu.link.keys import Endpoint, KeyPair, PoolDescription, PoolFiles
from rgpu.link.private_files import private_directory
from rgpu.session.errors import AlreadyExists, NotFound, UsageError

NODE = KeyPair.create("node", "a")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RGPU_POOL", "RGPU_CONTEXT", "RGPU_CONFIG", "RGPU_JOIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def made(name: str, role: str = "user", pool: str = "0123456789abcdef") -> PoolFiles:
    """A context as a login leaves it."""
    files = Contexts().files(name)
    private_directory(files.root.parent)
    private_directory(files.root)
    KeyPair.create(role, "anna").save(files.key_path(role))
    files.write_description(PoolDescription(id=pool, endpoints=[Endpoint("tcp://10.0.0.1:7070", NODE.public, "a")]))
    return files


def rgpu(*words: str, **more: str) -> Result:
    return CliRunner().invoke(cli, list(words), env=more or None)


def meant(**options: str) -> tuple[str, str]:
    environment = {name: value for name, value in options.items() if name.startswith("RGPU")}
    found = Settings({name: value for name, value in options.items() if not name.startswith("RGPU")},
                     {**os.environ, **environment})
    source = next(row["source"] for row in found.explain() if row["name"] == "pool")
    return Path(found.pool).name, source


def test_which_pool_is_meant(home: Path) -> None:
    local = meant()[0]
    made("one")
    made("two")
    assert meant() == (local, "default"), "a context that nobody chose changes nothing"
    Contexts().use("one")
    assert meant() == ("one", "context one (current)")
    assert meant(RGPU_CONTEXT="two") == ("two", "context two (environment RGPU_CONTEXT)")
    assert meant(RGPU_POOL="/p/here") == ("here", "environment RGPU_POOL")
    assert meant(RGPU_POOL="/p/here", context="two") == ("two", "context two (option --context)")
    assert meant(RGPU_CONTEXT="two", pool="/p/here") == ("here", "option --pool")
    assert meant(context="local")[0] == meant(RGPU_CONTEXT="local")[0] == local
    with pytest.raises(UsageError, match="both named"):
        meant(RGPU_CONTEXT="two", RGPU_POOL="/p/here")
    with pytest.raises(UsageError, match="both named"):
        meant(context="two", pool="/p/here")
    with pytest.raises(NotFound, match=r"no context is called three \(there are: one, two\)"):
        meant(context="three")
    assert Path(Settings({}, contexts=False).pool).name == local, "`rgpu up` and the like mean this machine"
    (home / "config" / "rgpu" / "config.toml").write_text('pool = "/p/file"\n')
    assert meant() == ("file", f"file {home}/config/rgpu/config.toml")
    Contexts().remove("one")
    assert Contexts().current() == ""


def test_the_verbs(home: Path) -> None:
    assert "rgpu login" in rgpu("context", "ls").output
    made("one")
    made("two", role="operator", pool="f" * 16)
    assert rgpu("context", "use", "two").exit_code == 0
    rows = {row["name"]: row for row in json.loads(rgpu("context", "ls", "-o", "json").output)}
    assert rows["two"]["current"] and not rows["one"]["current"]
    assert rows["two"]["role"] == "operator" and rows["one"]["pool"] == "0123456789abcdef"
    shown = rgpu("context", "show")
    assert "two" in shown.output and "tcp://10.0.0.1:7070" in shown.output
    secret = KeyPair.load(Contexts().files("two").key_path("operator")).secret
    assert secret not in shown.output and secret not in rgpu("context", "ls", "-o", "json").output
    assert rgpu("context", "use", "three").exit_code == NotFound.exit_code
    for bad in ("../x", "local", ".current"):
        assert rgpu("context", "rm", bad).exit_code == UsageError.exit_code
    assert rgpu("context", "rm", "two").exit_code == 0 and Contexts().names() == ["one"]
    assert rgpu("context", "show").exit_code == NotFound.exit_code, "none is current any more"
    modes = {path.name: path.stat().st_mode & 0o777 for path in Contexts().root.rglob("*")}
    assert modes == {"one": 0o700, "keys": 0o700, "pool.json": 0o600, "user.key": 0o600}


def test_a_broken_context_is_named_and_can_be_removed(home: Path) -> None:
    made("one").key_path("user").chmod(0o644)
    Contexts().use("one")
    row = json.loads(rgpu("context", "ls", "-o", "json").output)[0]
    assert "can be read by others" in row["wrong"]
    assert rgpu("context", "rm", "one").exit_code == 0


def test_verbs_of_this_machine_mean_no_context(home: Path) -> None:
    """`rgpu down --purge` with a current context must not touch it."""
    files = made("one")
    Contexts().use("one")
    assert rgpu("down", "--purge").exit_code == NotFound.exit_code
    assert rgpu("keys", "init").exit_code == 0
    assert files.description_path.exists() and (home / "state" / "rgpu" / "pool" / "secret").exists()


def test_a_pool_that_does_not_answer_is_named_by_its_context(home: Path) -> None:
    files = made("one")
    files.write_description(PoolDescription(id="0" * 16, endpoints=[Endpoint("tcp://127.0.0.1:9", NODE.public, "a")]))
    gone = rgpu("ps", "--context", "one")
    assert gone.exit_code == 6 and "context one" in gone.output and "rgpu context set one" in gone.output
    needs = rgpu("cordon", "a", "--context", "one")
    assert needs.exit_code == NotFound.exit_code and "--role operator" in needs.output
    moved = rgpu("context", "set", "one", "--address", "127.0.0.1:9")
    assert moved.exit_code == 6 and "tcp://127.0.0.1:9" in moved.output


def token(role: str = "user", member: str = "anna") -> str:
    pair = invitations.new_pair()
    return invitations.encode(invitations.Token(
        pool="0123456789abcdef", name=pair.name, public=pair.public, secret=pair.secret, expires=time.time() + 60,
        endpoints=[Endpoint("tcp://127.0.0.1:9", NODE.public, "a")], role=role, member=member))


def test_what_is_no_login(home: Path) -> None:
    assert rgpu("login").exit_code == UsageError.exit_code
    whole = token()
    for bad in ("x", whole[:-3], whole[:40], whole.replace("rgpu-join-", "rgpu-join-x")):
        assert rgpu("login", bad).exit_code == UsageError.exit_code, bad
    host = rgpu("login", token(role="node", member=""))
    assert host.exit_code == UsageError.exit_code and "rgpu server --join" in host.output
    made("anna-012345", pool="f" * 16)
    taken = rgpu("login", whole)
    assert taken.exit_code == AlreadyExists.exit_code and "of pool ffff" in taken.output and "--name" in taken.output
    gone = rgpu("login", whole, "--name", "other")
    assert gone.exit_code == 6 and Contexts().names() == ["anna-012345"], "what is not logged in is no context"
    assert Contexts().current() == ""
