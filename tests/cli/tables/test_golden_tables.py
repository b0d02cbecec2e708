"""Every table, on terminals of 60, 80, 120 and 200 columns, as golden files; ``RGPU_WRITE_GOLDEN=1`` writes them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from rgpu.link.keys import Endpoint, KeyPair, PoolDescription, PoolFiles
from rgpu.link.runs.folder import Runs, this_host
from rgpu.link.runs.record import RunRecord
from tests.support import canned_rows as rows
from tests.support.canned import CannedPool, on_terminal
from tests.support.shown import pieces

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (60, 80, 120, 200)


def contexts(folder: Path) -> None:
    for name, addresses in (("lab", 2), ("the-department-s-own-pool-of-many-hosts", 1)):
        files = PoolFiles(folder / "rgpu" / "contexts" / name)
        KeyPair.create("user", f"user-of-{name}"[:63]).save(files.key_path("user"))
        files.write_description(PoolDescription(id="0123456789abcdef", endpoints=[
            Endpoint(f"tcp://[2001:db8:85a3::8a2e:370:7334]:{5000 + n}", "a" * 40, f"node-{n}")
            for n in range(addresses)]))
    (folder / "rgpu" / "contexts" / ".current").write_text("lab\n")


def detached(folder: Path) -> None:
    runs = Runs(folder)
    for name, code, reason in ((rows.NAME, 0, "its program ended with exit code 0"),
                               ("short", 143, "its time limit of 2 h was reached: SIGTERM")):
        lock = runs.claim(name)
        runs.put(RunRecord(name=name, command="python train.py --steps 100000", host=this_host(), begun=rows.BEGUN,
                           ended=rows.BEGUN + 7300.0, exit_code=code, reason=reason))
        os.close(lock)


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[dict[str, Any]], dict[str, str]]]:
    """(what is printed, the environment of the process that prints it)."""
    folder = tmp_path_factory.mktemp("canned")
    canned = CannedPool(folder / "pool", {
        "session.list": lambda args: {"sessions": rows.SESSIONS + (rows.ENDED if args.get("all") else []),
                                      "queue": rows.QUEUE},
        "node.list": {"nodes": rows.NODES, "lost": rows.LOST}, "pool.history": {"events": rows.EVENTS, "revision": 9},
        "image.ls": {"images": rows.CHECKPOINTS}, "keys.list": {"keys": rows.KEYS}, "quota.show": rows.QUOTAS,
        "pool.adopt": rows.ADOPTED, "pool.ping": {"endpoints": []}})
    contexts(folder / "config")
    detached(folder / "runs")
    here = {"RGPU_RUNS_DIR": str(folder / "runs"), "XDG_CONFIG_HOME": str(folder / "config")}
    verbs: dict[str, list[str]] = {
        "ps": ["ps"], "ps-all": ["ps", "--all"], "nodes": ["nodes"], "history": ["history"],
        "image-ls": ["image", "ls"], "keys-list": ["keys", "list"], "quota-show": ["quota", "show"],
        "adopt": ["pool", "adopt"]}
    of_pool = [{"name": name, "verb": verb} for name, verb in verbs.items()]
    shown = [{"name": name, "show": f"rgpu.cli.{module}", "value": value} for name, module, value in (
        ("up", "pools.up:_show", rows.STARTED), ("journal-replay", "checkpoints.journal:_show_replay", rows.REPLAYED),
        ("simulate", "helpers.simulate:_show", rows.SIMULATED))]
    yield [*of_pool, *shown, {"name": "ps-detached", "verb": ["ps", "--detached", "--all"], "environment": here},
           {"name": "context-ls", "verb": ["context", "ls"], "environment": here},
           {"name": "config-explain", "verb": ["config", "explain"], "environment": {
               "HOME": "/home/ada", "RGPU_JOURNAL_LIMIT": "1GiB", "RGPU_POOL": "/srv/rgpu/pool"}}], {
        **canned.environment(), "RGPU_RUNS_DIR": str(folder / "none"), "XDG_CONFIG_HOME": str(folder / "none")}
    canned.stop()


@pytest.mark.parametrize("columns", WIDTHS)
def test_tables_are_the_golden_ones(order: tuple[list[dict[str, Any]], dict[str, str]], columns: int) -> None:
    what, environment = order
    code, text = on_terminal([sys.executable, "-m", "tests.support.shown", json.dumps(what)], environment, columns)
    found = pieces(text)
    assert code == 0 and list(found) == [one["name"] for one in what], text[-3000:]
    assert "\033[1m" in text, "headings are bold"
    for name, printed in found.items():
        path = GOLDEN / f"{name}-{columns}.txt"
        if os.environ.get("RGPU_WRITE_GOLDEN"):
            path.write_text(printed, encoding="utf-8")
        assert printed == path.read_text(encoding="utf-8"), name
        if max(map(cell_len, printed.splitlines())) > columns:  # then only what stays on every terminal is there
            least = (GOLDEN / f"{name}-{WIDTHS[0]}.txt").read_text(encoding="utf-8")
            assert headings(printed) == headings(least), name


def headings(text: str) -> list[str]:
    """The titles of its tables' columns: words in capitals."""
    return [word for line in text.splitlines() if line.upper() == line for word in line.split()]
