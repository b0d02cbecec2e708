"""`.ci/unused` finds what only tests call, in a tree of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("source", "allowed", "said"), [
    ("def main():\n    used()\n\n\ndef used():\n    pass\n\n\nmain()\n", "", "nothing unused"),
    ("def lonely():\n    pass\n", "", "nothing but tests calls function lonely"),
    ("class A:\n    def lonely(self):\n        pass\n\n\nA()\n", "", "nothing but tests calls method lonely"),
    ("def do_it():\n    pass\n", "a.do_*  # by name", "nothing unused"),
    ("x = 1\nprint(x)\n", "a.gone  # it went", "nothing unused is called a.gone")])
def test_it_finds_them(tmp_path: Path, source: str, allowed: str, said: str) -> None:
    for folder in (".ci", "rgpu", "bench", "examples"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci" / "unused", tmp_path / ".ci" / "unused")
    (tmp_path / ".ci" / "unused.txt").write_text(allowed)
    (tmp_path / "rgpu" / "a.py").write_text(source)
    done = subprocess.run([sys.executable, str(tmp_path / ".ci" / "unused")], capture_output=True, text=True)
    assert said in done.stdout and done.returncode == (said != "nothing unused"), done
