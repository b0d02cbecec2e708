"""The worker's end of the channel to its daemon: requests, daemons that come and go, an end that none gives."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.local.channel import connect, listen
from rgpu.server.worker import daemon_link
from rgpu.server.worker.daemon_link import DaemonLink
from rgpu.server.worker.entered_box import NO_BOX
from rgpu.server.worker.handed_over import single
from rgpu.session.errors import LinkError, Refused


class Ended(Exception):
    """The process would have ended."""


class Worker:
    """What answers requests; ``orphan``: it ends when no daemon is there."""

    def __init__(self, path: Path) -> None:
        self.orphan, self.path = False, path
        self.daemon = DaemonLink(NO_BOX, self._handler, lambda since: self.orphan)
        self.serving = threading.Thread(target=self.daemon.serve, args=(listen(path),))
        self.serving.start()

    def _handler(self, name: str) -> Callable[..., Any] | None:
        return getattr(self, name, None)

    def do_add(self, a: int, b: int) -> dict[str, int]:
        return {"sum": a + b}

    def do_attach(self, fds: list[int]) -> dict[str, int]:
        for fd in fds:
            os.close(fd)
        return {"fds": len(fds)}

    def do_refuse(self) -> None:
        raise Refused("not here")

    def do_fail(self) -> None:
        raise KeyError("what")


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    def end(code: int) -> None:
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    made = Worker(tmp_path / "w.sock")
    yield made
    made.orphan = True
    made.serving.join(20)
    assert not made.serving.is_alive(), "an orphan ends"


def ask(channel: Any, name: str, fds: tuple[int, ...] = (), **values: Any) -> dict[str, Any]:
    channel.send({"do": name, "id": 7, **values}, fds)
    answer, _ = channel.receive()
    assert answer.pop("id") == 7
    return dict(answer)


def test_requests_of_one_daemon_after_another(worker: Worker) -> None:
    assert not worker.daemon.known
    worker.daemon.report("lost")
    for _ in range(2):
        channel = connect(worker.path, 5.0)
        assert ask(channel, "add", a=2, b=3) == {"ok": {"sum": 5}}
        assert ask(channel, "attach", (0, 1)) == {"ok": {"fds": 2}}
        assert ask(channel, "refuse")["error"]["message"] == "not here"
        assert "'what'" in ask(channel, "fail")["error"]["message"]
        assert "does not know 'sing'" in ask(channel, "sing")["error"]["message"]
        channel.close()
        assert worker.daemon.known


def test_an_end_that_no_daemon_gives(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon is told why; whoever asked for the end does nothing more, whatever the daemon does."""
    monkeypatch.setattr(daemon_link, "END_SECONDS", 0.0)
    with pytest.raises(Ended):
        worker.daemon.be_ended("fault", "XID 79")
    channel = connect(worker.path, 5.0)
    ask(channel, "add", a=1, b=1)
    with pytest.raises(Ended):
        worker.daemon.be_ended("severed", "its peer was lost", peer="t")
    assert channel.receive()[0] == {"event": "severed", "pid": os.getpid(), "reason": "its peer was lost", "peer": "t"}
    channel.close()


@pytest.mark.parametrize("number", [0, 2, 3])
def test_descriptors_that_are_too_few_or_too_many_are_closed(number: int) -> None:
    fds = [os.dup(0) for _ in range(number)]
    with pytest.raises(LinkError, match=f"{number} descriptors came with a tie instead of 1"):
        single(fds, "a tie")
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
