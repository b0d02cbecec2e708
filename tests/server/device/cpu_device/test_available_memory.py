"""How much host memory there is to be had: the machine's, or less where a container allows less."""

from __future__ import annotations

from pathlib import Path

import pytest

from rgpu.server.device.cpu import facts


def limited(folder: Path, limit: str, used: str, statistics: str) -> tuple[str, str, str, str]:
    for name, text in (("max", limit), ("current", used), ("stat", statistics)):
        (folder / name).write_text(text)
    return (*(str(folder / name) for name in ("max", "current", "stat")), "inactive_file")  # type: ignore[return-value]


@pytest.mark.parametrize("limit, used, statistics, left", [
    ("1000000\n", "400000\n", "anon 1\ninactive_file 50000\nactive_file 7\n", 650_000),
    ("1000000\n", "2000000\n", "inactive_file 0\n", 0)])
def test_a_container_s_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, statistics: str,
                             left: int) -> None:
    monkeypatch.setattr(facts, "_CONTAINERS", (limited(tmp_path, limit, used, statistics), ("/none",) * 4))
    assert facts.available_memory() == left


@pytest.mark.parametrize("limit", ["max\n", "", "junk"])
def test_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(facts, "_CONTAINERS", (limited(tmp_path, limit, "5\n", ""), ("/none",) * 4))
    assert facts.available_memory() > 1 << 26
