"""Loggers that import structlog with the first line: where it goes, and what becomes of one that cannot be made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rgpu.link import loggers

CODE = """
import resource, sys
from pathlib import Path
from rgpu.link.loggers import configure_at_first_line, get_logger

log = get_logger("one")
configure_at_first_line("info", Path(sys.argv[1]))
assert "structlog" not in sys.modules and Path(sys.argv[1]).stat().st_mode & 0o777 == 0o600
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
log.warning("without descriptors", ticket="never shown")
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
log.debug("below the level")
log.info("with them", ticket="never shown", left=3)
get_logger("two").error("another logger")
"""


def test_lines_go_to_the_file_from_the_first_one_on(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path / "log")], capture_output=True, text=True,
                          timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    bare, first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (bare["event"], bare["level"]) == ("without descriptors", "warning") and "Too many open" in bare["bare"]
    assert (first["event"], first["level"], first["left"], first["ticket"]) == ("with them", "info", 3, "(hidden)")
    assert (second["event"], second["level"]) == ("another logger", "error")
    assert "never shown" not in (tmp_path / "log").read_text()


def test_an_unknown_level_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loud.*debug, info, warning, error"):
        loggers.configure_at_first_line("loud", tmp_path / "log")
    assert not (tmp_path / "log").exists()
