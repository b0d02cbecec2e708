"""Tables as a process prints them: on terminals of several widths, into pipes, and in other forms."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from rgpu.cli.tables import Column, fitting, lines
from rgpu.session.errors import UsageError
from tests.support.canned import ROOT, CannedPool
from tests.support.canned_rows import ENDED, EVENTS, LOST, NAME, NODES, QUEUE, SESSIONS, WAITS

VERBS: dict[str, tuple[str, ...]] = {"ps": ("ps",), "ps-all": ("ps", "--all"), "nodes": ("nodes",),
                                     "history": ("history",)}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CannedPool]:
    canned = CannedPool(tmp_path_factory.mktemp("canned") / "pool", {
        "session.list": lambda args: {"sessions": SESSIONS + (ENDED if args.get("all") else []), "queue": QUEUE},
        "node.list": {"nodes": NODES, "lost": LOST}, "pool.history": {"events": EVENTS, "revision": 9},
        "pool.status": {"sessions": {"running": 1}, "moves": {}, "queue": [], "leader": "b", "paused": False}})
    yield canned
    canned.stop()


def plain(text: str) -> str:
    return re.sub(r"\033\[[0-9;]*m", "", text)


def test_without_a_terminal_nothing_is_cut_and_nothing_wraps(pool: CannedPool) -> None:
    done = pool.rgpu("ps", COLUMNS="60")
    found = done.stdout.splitlines()
    assert len(found) == 4 and found[3].endswith(WAITS.strip()) and "\033" not in done.stdout
    assert found[1].split() == [NAME, "running", "node-with-a-rather-long-name-001.cluster.example.org", "12", "63.0",
                                "GiB", "42%", "50%", "1234567890", "98765", "4194303", "3987654"]


def test_wide_has_every_column_on_any_terminal(pool: CannedPool) -> None:
    code, text = pool.on_terminal(60, "ps", "-o", "wide")
    heading, first, *_ = plain(text).splitlines()
    assert code == 0 and heading.split() == ["SESSION", "STATE", "HOST", "EPOCH", "MEMORY", "GPU", "OF", "CALLS",
                                             "AWAITED", "PID", "WORKER", "USER", "LABELS", "AGE", "COMMAND", "NOTE"]
    assert "team=vision,stage=pre" in first and "2 h" in first and "/usr/bin/python3.11" in first


def test_a_terminal_of_forty_columns_without_utf_8(pool: CannedPool) -> None:
    for verb in VERBS.values():
        code, text = pool.on_terminal(40, *verb, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert code == 0 and "Traceback" not in text and text.isascii(), text
    done = pool.rgpu("ps", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and NAME in done.stdout and "gr\\xf6\\xdfe-\\u6570\\u636e" in done.stdout


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_top_on_a_small_terminal(pool: CannedPool, encoding: str) -> None:
    """Its screen, and once without one; q ends it."""
    code, text = pool.on_terminal(40, "top", said="q", PYTHONIOENCODING=encoding, LC_ALL="C", PYTHONUTF8="0")
    assert code == 0 and "Traceback" not in text and "\033[?1049h" in text, text[-2000:]
    done = pool.rgpu("top", PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and "2 nodes (1 lost)" in done.stdout and "97%" in done.stdout


def test_the_same_data_as_json_and_yaml_and_names(pool: CannedPool) -> None:
    rows = json.loads(pool.rgpu("ps", "-o", "json").stdout)
    assert rows == json.loads(json.dumps(SESSIONS + QUEUE)) == yaml.safe_load(pool.rgpu("ps", "-o", "yaml").stdout)
    assert pool.rgpu("ps", "-o", "name").stdout.splitlines() == [NAME, "größe-数据", "waits"]
    assert json.loads(pool.rgpu("nodes", "-o", "json").stdout) == NODES + LOST
    assert pool.rgpu("nodes", "-o", "name").stdout.splitlines() == [NODES[0]["host"], "b", "c"]


@pytest.mark.parametrize(("options", "expected"), [
    (("--sort", "memory"), ["größe-数据", NAME, "waits"]), (("--sort", "-memory"), [NAME, "größe-数据", "waits"]),
    (("--sort", "session"), ["größe-数据", NAME, "waits"]),
    (("--state", "moving", "--state", "queued"), ["größe-数据", "waits"]), (("--host", "node-b"), ["größe-数据"]),
    (("--user", "ada"), [NAME]), (("--label", "team=vision", "--label", "stage=pre"), [NAME]),
    (("--label", "team=vision", "--label", "stage=post"), []), (("--state", "ended"), ["done"])])
def test_sorting_and_selecting(pool: CannedPool, options: tuple[str, ...], expected: list[str]) -> None:
    found = pool.rgpu("ps", *options, "-o", "name").stdout.splitlines()
    assert found == (sorted(expected, key=str.casefold) if options == ("--sort", "session") else expected)


def test_wrong_columns_and_labels_are_refused(pool: CannedPool) -> None:
    done = pool.rgpu("ps", "--sort", "memroy")
    assert done.returncode == UsageError.exit_code and len(done.stderr.splitlines()) == 1
    assert "did you mean 'memory'?" in done.stderr and "awaited" in done.stderr
    for label in ("team", "=x", "a b=c", "k=" + "v" * 64):
        done = pool.rgpu("ps", "--label", label)
        assert done.returncode == UsageError.exit_code and "KEY=VALUE" in done.stderr, label


def test_watching_goes_on_until_it_is_interrupted(pool: CannedPool) -> None:
    process = subprocess.Popen([sys.executable, "-m", "rgpu.cli.main", "nodes", "-o", "json", "--watch", "0.1"],
                               cwd=ROOT, env=pool.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    assert process.stdout is not None
    assert [json.loads(process.stdout.readline()) for _ in range(3)] == [NODES + LOST] * 3
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err


def test_columns_go_in_their_order_and_text_is_cut_first() -> None:
    columns = [Column("NAME", lambda r: r[0]), Column("A", lambda r: r[1], drop=1), Column("B", lambda r: r[2], drop=2),
               Column("TEXT", lambda r: r[3], cut=True)]
    rows: list[Any] = [("n" * 10, "a" * 5, "b" * 5, "t" * 100)]

    def kept(width: int) -> list[str]:
        return lines(columns, rows, width)[0].split()

    assert kept(126) == kept(46) == ["NAME", "A", "B", "TEXT"] and kept(45) == ["NAME", "A", "TEXT"]
    assert kept(38) == ["NAME", "TEXT"] == kept(5)
    assert [len(line) for line in lines(columns, rows, 60)[1:]] == [60] and lines(columns, rows, 60)[1].endswith("t…")
    assert lines(columns, rows, 5)[1].startswith("n" * 10), "a name is never broken"
    assert fitting(columns, {"NAME": 4, "A": 1, "B": 1, "TEXT": 4}, None)[0] == columns
    assert lines(columns, [("a\nb\x1b[31m", 1, None, "x")])[1] == "a b\\x1b[31m  1     x"
