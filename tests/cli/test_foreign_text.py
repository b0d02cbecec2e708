"""What strangers wrote (reasons, names, commands, logs, errors) as the command line prints it."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import rgpu
from rgpu.cli.command_line import cli
from rgpu.session.errors import Refused

EVIL = "\x1b]0;owned\x07\x9b31m\u202e[red]x[/red]\x1b[2J"
ROOT = Path(rgpu.__file__).parent


def row() -> dict[str, Any]:
    """What any verb may show, each text a stranger's."""
    texts = ("session", "user", "state", "host", "note", "reason", "command", "owner", "decision", "actor", "kind",
             "image", "error", "name", "address", "version", "device", "check", "found")
    return {**dict.fromkeys(texts, EVIL), "epoch": 1, "when": 1.0, "labels": {EVIL: EVIL}, "leader": False,
            "devices": [{"device": EVIL, "name": EVIL, "reason": EVIL}], "worker": {"error": EVIL, EVIL: EVIL},
            "move": {"reason": EVIL}, "named": None, "position": 1, "memory": 1, "stored": 1, "created": 1.0,
            "pages": 1, "public": EVIL, "role": EVIL, "outcome": EVIL, "age_s": 1.0, "kept": EVIL,
            "use": {}, "limits": {EVIL: 1}, "own": {EVIL: 1}, "over": [EVIL], "notes": [EVIL], "default": {EVIL: 1}}


class Pool:
    """Answers every verb with a stranger's text; ``error``: refuses it with one instead."""

    def __init__(self, error: bool = False) -> None:
        self._error = error

    @contextlib.contextmanager
    def connect(self, *_: Any, **__: Any) -> Iterator[Pool]:
        yield self

    def call(self, verb: str, *_: Any, **__: Any) -> Any:
        if self._error:
            raise Refused(EVIL)
        lists = ("sessions", "queue", "nodes", "events", "images", "keys", "lost", "quotas")
        return {**row(), **{name: [row()] for name in lists}, "lines": [EVIL, "two\ttabs"], "revision": 1,
                "moves": {}, "paused": True, "paused_reason": EVIL, "rebalancing": EVIL, "cluster": EVIL,
                "queue": [], "lost": [], "nodes": [], "sessions": [row()]}


VERBS = {"ps": ["ps"], "ps -o wide": ["ps", "-a", "-o", "wide"], "ps -o name": ["ps", "-o", "name"],
         "describe": ["describe", "s"], "logs": ["logs", "s"], "kill": ["kill", "s"], "history": ["history"],
         "events": ["events"], "image ls": ["image", "ls", "-o", "wide"],
         "quota show": ["quota", "show"], "quota set": ["quota", "set", "a", "--sessions", "1"]}
MODULES = {"ps": "sessions.ps", "describe": "sessions.describe", "logs": "sessions.logs", "kill": "sessions.kill",
           "history": "sessions.history", "events": "sessions.events", "image": "checkpoints.image",
           "quota": "pools.quota"}


@pytest.mark.parametrize("error", [False, True], ids=["answers", "errors"])
@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS.keys())
def test_no_verb_passes_it_to_the_terminal(monkeypatch: pytest.MonkeyPatch, words: list[str], error: bool) -> None:
    module = importlib.import_module(f"rgpu.cli.{MODULES[words[0]]}")
    monkeypatch.setattr(module, "connect", Pool(error).connect)
    done = CliRunner().invoke(cli, words, input="y\n")
    assert done.exit_code == (Refused.exit_code if error else 0), done.output
    assert not (set(done.output) & set("\x1b\x07\x9b\u202e")), repr(done.output)
    if words[0] != "kill" or error:
        assert "\\x1b" in done.output, "what was meant to be there is there, written out"
        assert "-o" in words and words[-1] == "name" or "[red]" in done.output, "nor is it taken for rich's markup"


def test_json_is_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("rgpu.cli.sessions.describe"), "connect", Pool().connect)
    done = CliRunner().invoke(cli, ["describe", "s", "-o", "json"])
    assert json.loads(done.output)["reason"] == EVIL and "\x1b" not in done.output


#: Modules whose own lines hold nothing of strangers.
OWN = {"launcher.py": 3, "tables.py": 2, "handing.py": 2, "serving.py": 1}


def test_nothing_is_printed_past_it() -> None:
    """Every ``print`` of the command line prints a constant, JSON, YAML, or what was made harmless."""
    found: dict[str, list[int]] = {}
    for path in [*(ROOT / "cli").rglob("*.py"), *(ROOT / "client" / "run").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                text = " ".join(map(ast.unparse, node.args))
                if not any(word in text for word in ("printable(", "dumps(", "as_yaml(")) \
                        and not all(isinstance(one, ast.Constant) for one in node.args):
                    found.setdefault(path.name, []).append(node.lineno)
    assert {name: len(lines) for name, lines in found.items()} == OWN | {"journal.py": 1}, found
