"""How `rgpu quota` reads its words, and what it says of a pool that knows no quotas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from rgpu.cli.command_line import cli
from rgpu.cli.pools import quota
from rgpu.session.errors import NotFound, UsageError, VersionMismatch

GIB = 1 << 30


def test_numbers_no_limit_and_everybody_s() -> None:
    asked = quota.wanted(False, sessions="4", memory="1.5GiB", gpus="0.25", queued=None, checkpoints="2GiB")
    assert asked == {"limits": {"sessions": 4, "memory": 3 * GIB // 2, "gpus": 0.25, "checkpoints": 2 * GIB},
                     "inherit": []}
    asked = quota.wanted(False, sessions="unlimited", memory="Default", gpus=None, queued="0")
    assert asked == {"limits": {"sessions": None, "queued": 0}, "inherit": ["memory"]}
    asked = quota.wanted(True, sessions="default", memory=None, gpus=None, queued=None)
    assert asked == {"limits": {"sessions": None}, "inherit": []}, "everybody's own default is no limit"


@pytest.mark.parametrize(("name", "text"), [
    ("sessions", "-1"), ("sessions", "1.0"), ("sessions", ""), ("queued", "1e3"), ("sessions", "9" * 10),
    ("memory", "-1"), ("memory", "8EiB"), ("memory", "9" * 30), ("gpus", "nan"), ("gpus", "inf"), ("gpus", "-0.5"),
    ("gpus", "1e300"), ("gpus", "two"), ("checkpoints", "much")])
def test_what_is_no_limit_is_refused_before_the_pool_is_asked(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"--{name}"):
        quota.wanted(False, **{name: text})


class Earlier:
    """A pool of the previous version."""

    @contextlib.contextmanager
    def connect(self, *_: Any, **__: Any) -> Iterator[Earlier]:
        yield self

    def call(self, verb: str, *_: Any, **__: Any) -> Any:
        raise NotFound(f"no control verb is called {verb!r}", verb=verb)


@pytest.mark.parametrize("words", [("show",), ("set", "alice", "--sessions", "1"), ("unset", "alice")])
def test_a_pool_of_an_earlier_version(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.setattr(quota, "connect", Earlier().connect)
    done = CliRunner().invoke(cli, ["quota", *words])
    assert done.exit_code == VersionMismatch.exit_code and "knows no quotas: upgrade them" in done.output
