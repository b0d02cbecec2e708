"""Questions before harm, and the nearest names, by processes on a terminal and without one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.session.errors import NotFound, Refused, UsageError
from tests.support.canned import ROOT, CannedPool, on_terminal

GIB = 1 << 30
SESSION = {"session": "heat", "state": "running", "host": "node-a", "command": "/usr/bin/python3", "age_s": 7300.0,
           "memory_bytes": 3 * GIB}
SHOWN = {"image": "heat-e1-p7", "session": "heat", "position": 7, "regions": [{"size": GIB}]}


def known(args: dict[str, Any]) -> Any:
    if args["session"] != "heat":
        raise NotFound(f"no session is called {args['session']}; `rgpu ps` lists them", session=args["session"])
    return SESSION


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CannedPool]:
    canned = CannedPool(tmp_path / "pool", {
        "session.describe": known, "session.kill": lambda args: {**args, **known(args), "reason": "killed"},
        "session.list": {"sessions": [SESSION], "queue": []}, "image.show": SHOWN,
        "image.rm": {"image": "heat-e1-p7", "freed": 1, "condemned_packs": 0},
        "node.list": {"nodes": [{"host": "node-a"}]}, "node.remove": {},
        "node.cordon": NotFound("no host is called 'nod-a'", host="nod-a")})
    yield canned
    canned.stop()


def done(pool: CannedPool, verb: str) -> int:
    return sum(1 for name, _ in pool.asked if name == verb)


@pytest.mark.parametrize(("verb", "asked", "says"), [
    (("kill", "heat"), "session.kill", ("heat (/usr/bin/python3)", "running on node-a for 2 h", "3.0 GiB")),
    (("image", "rm", "heat-e1-p7"), "image.rm", ("heat-e1-p7 of heat", "1.0 GiB", "for good")),
    (("leave", "node-z"), "node.remove", ("node-z leaves the pool", "key forgotten"))])
def test_a_person_is_asked_and_a_script_is_not(pool: CannedPool, verb: tuple[str, ...], asked: str,
                                               says: tuple[str, ...]) -> None:
    code, text = pool.on_terminal(100, *verb, said="n\n")
    assert code == Refused.exit_code and all(part in text for part in (*says, "go on? [y/N]", "nothing was done"))
    assert done(pool, asked) == 0
    code, text = pool.on_terminal(100, *verb, said="y\n")
    assert code == 0 and done(pool, asked) == 1
    code, text = pool.on_terminal(100, *verb, "--yes")
    assert code == 0 and "go on?" not in text and done(pool, asked) == 2
    assert pool.rgpu(*verb).returncode == 0 and done(pool, asked) == 3


def test_down_purge_says_what_it_deletes_and_needs_a_yes(tmp_path: Path) -> None:
    environ = {**os.environ, "RGPU_POOL": str(tmp_path / "pool"), "RGPU_CONFIG": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rgpu.cli.main"]

    def rgpu(*verb: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *verb], env=environ, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=60)

    assert rgpu("keys", "init").returncode == 0
    refused = rgpu("down", "--purge")
    assert refused.returncode == Refused.exit_code and len(refused.stderr.splitlines()) == 1
    assert "key pairs" in refused.stderr and "--yes" in refused.stderr and (tmp_path / "pool" / "keys").exists()
    code, text = on_terminal([*command, "down", "--purge"], environ, 80, "\n")
    assert code == Refused.exit_code and "checkpoints" in text and (tmp_path / "pool").exists()
    assert rgpu("down").returncode == 0 and (tmp_path / "pool").exists(), "without --purge nobody is asked"
    assert rgpu("down", "--purge", "--yes").returncode == 0 and not (tmp_path / "pool").exists()


@pytest.mark.parametrize(("verb", "error", "near"), [
    (("kill", "haet"), NotFound, "did you mean 'heat'?"), (("describe", "heatt"), NotFound, "did you mean 'heat'?"),
    (("cordon", "nod-a"), NotFound, "did you mean 'node-a'?"), (("describe", "quite-another"), NotFound, "rgpu ps"),
    (("migrat", "x"), UsageError, "did you mean 'migrate'?"),
    (("image", "sho", "x"), UsageError, "did you mean 'show'?"),
    (("xyzzy",), UsageError, "No such command 'xyzzy'.")])
def test_the_nearest_name(pool: CannedPool, verb: tuple[str, ...], error: type[Exception], near: str) -> None:
    refused = pool.rgpu(*verb)
    assert refused.returncode == error.exit_code and near in refused.stderr  # type: ignore[attr-defined]
    assert ("did you mean" in refused.stderr) == ("did you mean" in near)


def without_rights() -> None:
    """In the child: root may read what is another's no more (PR_CAPBSET_DROP of CAP_DAC_OVERRIDE, _READ_SEARCH)."""
    for capability in (1, 2):
        assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
@pytest.mark.parametrize("verb", [("ps",), ("doctor",), ("run", "--", "true"), ("keys", "list"), ("down",)])
def test_a_folder_that_cannot_be_read_is_one_line(tmp_path: Path, verb: tuple[str, ...]) -> None:
    root = tmp_path / "pool"
    root.mkdir(mode=0o700)
    (root / "pool.json").write_text("{}")
    os.chown(root, 65534, 65534)
    environ = {**os.environ, "RGPU_POOL": str(root), "RGPU_CONFIG": "", "PYTHONPATH": str(ROOT)}
    seen = subprocess.run([sys.executable, "-m", "rgpu.cli.main", *verb], env=environ, cwd=ROOT, capture_output=True,
                          preexec_fn=without_rights, text=True, timeout=60)
    said = seen.stdout + seen.stderr
    assert seen.returncode != 0 and "Traceback" not in said and "lambda" not in said, said
    assert str(root) in said and ("Permission denied" in said or "cannot be read by this user" in said), said
    if verb != ("doctor",):
        assert len(seen.stderr.splitlines()) == 1, said
    if verb == ("ps",):
        assert "belongs to nobody, mode 0700, this is root" in said, said


def test_plots_are_refused_before_the_work(tmp_path: Path) -> None:
    """Where matplotlib is not installed: also before the files are read."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text("import importlib.util as u\nf = u.find_spec\n"
                    "u.find_spec = lambda name, *a: None if name == 'matplotlib' else f(name, *a)\n")
    refused = subprocess.run(
        [sys.executable, "-m", "rgpu.cli.main", "simulate", "--nodes", str(tmp_path / "no"), "--tasks",
         str(tmp_path / "none"), "--plot", str(tmp_path / "plots")], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, timeout=60)
    assert refused.returncode == UsageError.exit_code and "matplotlib" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and not (tmp_path / "plots").exists()
