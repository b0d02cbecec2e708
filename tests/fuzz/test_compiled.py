"""The compiled readers with random input for a few seconds each, and that their fuzzers see what they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fuzz import compiled

#: Reader → a check of it that is left out.
WITHOUT = {"agent_exchange": "whole > size - at ||", "worker_exchange": "place.offset > found->size ||"}


@pytest.mark.timeout(600)  # compiling under sanitizers takes minutes where the processors have much to do
@pytest.mark.parametrize("name", compiled.TARGETS)
def test_random_input(name: str, tmp_path: Path) -> None:
    finding = tmp_path / "finding"
    done = compiled.fuzz(compiled.build(name, tmp_path), "--seconds", "4", "--seed", "1", "--finding", str(finding))
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"#(\d+) DONE cov: (\d+)", done.stdout)
    assert found and int(found[1]) > 100 and int(found[2]) > 100, done.stdout

    source = (compiled.TARGETS[name][0] / "exchange.cpp").read_text()
    assert WITHOUT[name] in source
    changed = tmp_path / "exchange.cpp"
    changed.write_text(source.replace(WITHOUT[name], ""))
    program = compiled.build(name, tmp_path, changed)
    done = compiled.fuzz(program, "--seconds", "120", "--seed", "1", "--finding", str(finding))
    seen = ("AddressSanitizer", "runtime error:", "not so:")
    assert done.returncode and any(words in done.stderr for words in seen), done.stdout + done.stderr
    again = compiled.fuzz(program, str(finding))
    assert again.returncode and again.stderr, "the input that was kept shows it again"
