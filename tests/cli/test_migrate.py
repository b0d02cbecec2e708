"""How `rgpu migrate` reads its words. What the verbs do: tests/scenarios."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rgpu.cli.command_line import cli
from rgpu.cli.moves import migrate
from rgpu.session.errors import NotFound

STATUS = {"session": "s", "state": "running", "owner": "a", "move": None, "progress": {}}


class Pool:
    """Answers as a pool with these sessions and hosts."""

    def __init__(self, sessions: set[str], hosts: set[str]) -> None:
        self.sessions, self.hosts = sessions, hosts
        self.did: list[tuple[str, str, str]] = []

    def call(self, verb: str, arguments: dict[str, Any], **_: Any) -> Any:
        if verb == "node.list":
            return {"nodes": [{"host": host} for host in sorted(self.hosts)]}
        if arguments["session"] not in self.sessions:
            raise NotFound(f"no session is called {arguments['session']}")
        self.did.append((verb, arguments["session"], arguments.get("host", "")))
        return STATUS if verb != "session.migrate" else {
            "session": "s", "from": "a", "to": "b", "device": "cpu:0", "reason": "it fits", "forecast": {}}

    def run(self, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
        @contextlib.contextmanager
        def connect(_: Any, role: str) -> Iterator[Pool]:
            yield self

        monkeypatch.setattr(migrate, "connect", connect)
        self.did.clear()
        return CliRunner().invoke(cli, ["migrate", *words])


MOVED, ASKED, ABORTED = "session.migrate", "session.move_status", "session.move_abort"


@pytest.mark.parametrize(("sessions", "words", "did"), [
    ("s", "s b", (MOVED, "s", "b")),
    ("s", "s --to b", (MOVED, "s", "b")),
    ("s", "status s", (ASKED, "s", "")),
    ("s", "abort s", (ABORTED, "s", "")),
    ("s", "s --status", (ASKED, "s", "")),
    ("s", "s --abort", (ABORTED, "s", "")),
    ("status abort", "status b", (MOVED, "status", "b")),
    ("status abort", "abort b", (MOVED, "abort", "b")),
    ("status abort", "status --to b", (MOVED, "status", "b")),
    ("status abort", "status status", (ASKED, "status", "")),
    ("status abort", "abort status", (ABORTED, "status", "")),
    ("status abort s", "status s", (ASKED, "s", "")),
    ("b", "status b", (ASKED, "b", "")),
    ("status b", "b --status", (ASKED, "b", "")),
])
def test_words_of_migrate(monkeypatch: pytest.MonkeyPatch, sessions: str, words: str,
                          did: tuple[str, str, str]) -> None:
    pool = Pool(set(sessions.split()), {"a", "b"})
    done = pool.run(monkeypatch, *words.split(), "--dry-run")
    assert done.exit_code == 0, done.output
    assert pool.did[-1] == did
    assert all(verb == ASKED for verb, *_ in pool.did[:-1]), "looked for with anything but a question"


def test_what_could_be_either_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool({"abort", "b"}, {"a", "b"})
    done = pool.run(monkeypatch, "abort", "b")
    assert done.exit_code == 2 and "migrate abort --to b" in done.output and "migrate b --abort" in done.output
    assert all(verb == ASKED for verb, *_ in pool.did)


@pytest.mark.parametrize("words", ["s", "s b --to b", "s --status --to b", "s b --abort"])
def test_too_few_words_and_too_many(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    pool = Pool({"s"}, {"a", "b"})
    assert pool.run(monkeypatch, *words.split()).exit_code == 2 and not pool.did
