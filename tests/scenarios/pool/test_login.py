"""A user's machine joins by one invitation, with a key of its own, and runs; and what may go wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools import verbs
from tests.support.pools.pool import EXAMPLES, ROOT, LocalPool

pytestmark = pytest.mark.timeout(300)

#: Moves the clock that Python programs read, as on a machine whose time is wrong.
SITE = '''
import os, time
_real = time.time
_off = float(os.environ.get("CLOCK_OFF", "0"))
if _off:
    time.time = lambda: _real() + _off
'''


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    with LocalPool(tmp_path, nodes=2, lease=8.0) as running:
        yield running


class Laptop:
    """Another machine as far as files go: its own home, no pool's directory, no key."""

    def __init__(self, pool: LocalPool, name: str) -> None:
        self.home = pool.folder / name
        self.home.mkdir()
        hidden = ("RGPU_POOL", "RGPU_REGISTRY", "XDG_CONFIG_HOME", "XDG_STATE_HOME")
        self.environment = {key: value for key, value in pool.environment.items() if key not in hidden}
        self.environment |= {"HOME": str(self.home), "RGPU_JOURNAL_DIR": str(self.home / "journal")}

    def rgpu(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return verbs.run(words, self.environment, timeout)

    def json(self, *words: str) -> object:
        done = self.rgpu(*words, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "rgpu.cli.main", "run", *options, "--", sys.executable,
                               str(EXAMPLES / "heat.py"), "--steps", "20"], env=self.environment, cwd=ROOT,
                              capture_output=True, text=True, timeout=120)

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.home)): path.read_bytes() for path in self.home.rglob("*") if path.is_file()}


def test_one_word_joins_a_machine(pool: LocalPool) -> None:
    token = pool.rgpu("keys", "invite", "--user", "anna")["token"]
    laptop = Laptop(pool, "laptop")
    assert laptop.rgpu("ps").returncode == 3, "nothing is known here yet"
    done = laptop.rgpu("login", token)
    assert done.returncode == 0 and "as anna (user)" in done.stdout, done.stderr
    ran = laptop.run("--name", "first")
    assert ran.returncode == 0 and "digest" in ran.stdout, ran.stderr
    assert [row["session"] for row in laptop.json("ps", "--all")] == ["first"]  # type: ignore[attr-defined]
    assert [row["user"] for row in pool.rgpu("ps", "--all", "--all-users")] == ["anna"], "sessions are the user's"
    assert laptop.rgpu("cordon", "node-a").returncode == 3, "a user's, without an operator's key"

    # The secret half is on the laptop alone; nothing there lets anybody act as a node.
    (secret,) = [json.loads(data)["secret"] for path, data in laptop.files().items() if path.endswith("user.key")]
    for path in (pool.folder / "pool").rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    assert not any(path.endswith(("secret", "node.key")) for path in laptop.files())
    assert {key["name"] for key in laptop.json("keys", "list")} >= {"anna"}  # type: ignore[attr-defined]

    # Used: by nobody else, and by the same machine it is no harm.
    thief = Laptop(pool, "thief")
    again = thief.rgpu("login", token)
    assert again.returncode == 7 and "used already: it is good for one login" in again.stderr
    assert thief.rgpu("context", "ls", "-o", "json").stdout.strip() == "[]" and not thief.files()
    assert laptop.rgpu("login", token).returncode == 0
    taken = pool_error(pool, "keys", "invite", "--user", "anna")
    assert taken[0] == 4 and "rgpu keys revoke anna" in taken[1]

    # An operator, by a second context of the same machine.
    boss = pool.rgpu("keys", "invite", "--user", "boss", "--role", "operator")["token"]
    assert laptop.rgpu("login", boss, "--name", "boss", "--no-use").returncode == 0
    assert laptop.rgpu("cordon", "node-a", "--context", "boss").returncode == 0
    assert laptop.rgpu("uncordon", "node-a", "--context", "boss").returncode == 0
    assert laptop.run("--context", "boss").returncode == 0, "an operator runs programs, too"
    assert [row["name"] for row in laptop.json("context", "ls") if row["current"]] != ["boss"]  # type: ignore[attr-defined]
    pool.rgpu("keys", "revoke", "anna")
    eventually(lambda: laptop.rgpu("ps").returncode == 7, lambda: laptop.rgpu("ps"), 20, every=0.2)


def pool_error(pool: LocalPool, *words: str) -> tuple[int, str]:
    done = verbs.run(words, pool.environment, 60)
    return done.returncode, done.stderr


def test_what_is_no_way_in(pool: LocalPool) -> None:
    laptop = Laptop(pool, "laptop")
    token = pool.rgpu("keys", "invite", "--user", "anna", "--expires", "2s")["token"]
    cut = laptop.rgpu("login", token[:-5])
    assert cut.returncode == 2 and "may be cut" in cut.stderr
    host = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "server", "--host", "x", "--pool",
                           str(laptop.home / "p"), "--join", token], env=laptop.environment, cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert host.returncode == 2 and "rgpu login" in host.stderr
    time.sleep(2.5)
    late = laptop.rgpu("login", token)
    assert late.returncode == 7 and "expired" in late.stderr, late.stderr
    for_host = laptop.rgpu("login", pool.rgpu("keys", "invite", "--host", "x")["token"])
    assert for_host.returncode == 2 and "rgpu server --join" in for_host.stderr
    for words in (("--host", "x", "--user", "y"), ("--role", "operator"), ("--user", "node-x"), ("--user", "a b"),
                  ("--user", "u", "--expires", "8d"), ("--user", "u", "--expires", "soon")):
        assert pool_error(pool, "keys", "invite", *words)[0] == 2, words
    assert not laptop.files()


@pytest.mark.parametrize("off", [3600, -3600])
def test_clocks_an_hour_apart(pool: LocalPool, tmp_path: Path, off: int) -> None:
    """A login has no time in it but the pool's: it works, and says what it saw; programs run."""
    laptop = Laptop(pool, "laptop")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    laptop.environment |= {"CLOCK_OFF": str(off), "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}"}
    token = pool.rgpu("keys", "invite", "--user", "anna", "--expires", "5m")["token"]
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "login", token], env=laptop.environment, cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"{'ahead of' if off > 0 else 'behind'} the pool's" in done.stderr and "3600 s" in done.stderr
    ran = laptop.run()
    assert ran.returncode == 0 and "digest" in ran.stdout, ran.stderr


def test_addresses_that_moved_and_a_pool_that_is_gone(pool: LocalPool) -> None:
    laptop = Laptop(pool, "laptop")
    token = pool.rgpu("keys", "invite", "--user", "anna")["token"]
    assert laptop.rgpu("login", token, "--name", "here").returncode == 0
    (described,) = laptop.home.glob(".config/rgpu/contexts/*/pool.json")
    known = json.loads(described.read_bytes())
    assert {endpoint["host"] for endpoint in known["endpoints"]} == {"node-a", "node-b"}
    # One address of two is still right: the answer mends the other, and what is older than a moment is asked for.
    stale = {**known, "endpoints": [{**known["endpoints"][0], "address": "tcp://127.0.0.1:9"}, known["endpoints"][1]]}
    described.write_text(json.dumps(stale))
    os.utime(described, (1, 1))
    assert laptop.rgpu("ps").returncode == 0
    assert {e["address"] for e in json.loads(described.read_bytes())["endpoints"]} \
        == {e["address"] for e in known["endpoints"]}
    # None is: it is said, and one word of somebody who knows mends it.
    described.write_text(json.dumps({**known, "endpoints": [
        {**endpoint, "address": f"tcp://127.0.0.1:{9 + n}"} for n, endpoint in enumerate(known["endpoints"])]}))
    lost = laptop.rgpu("ps")
    assert lost.returncode == 6 and "context here" in lost.stderr and "rgpu context set here" in lost.stderr
    run = laptop.run()
    assert run.returncode == 6 and "Traceback" not in run.stderr
    address = known["endpoints"][1]["address"].removeprefix("tcp://")
    assert laptop.rgpu("context", "set", "here", "--address", address).returncode == 0
    assert laptop.run().returncode == 0
    assert laptop.rgpu("doctor").returncode == 0, laptop.rgpu("doctor").stdout
