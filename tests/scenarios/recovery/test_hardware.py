"""A device that fails: its errors are not the program's to see, and its sessions go elsewhere (OWNERSHIP 9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.breakable_pool import BreakablePool
from tests.support.pools.pool import VerbError
from tests.support.pools.staged import line

SICK = "its memory does not hold what was written"


def test_an_error_of_the_hardware_is_recovered_and_the_program_is_not_told(tmp_path: Path) -> None:
    """The device works again when it is looked at: the session goes on where it was."""
    with BreakablePool(tmp_path) as pool:
        program = pool.restless("s")
        pool.ecc()
        row = pool.on("s", 2)
        assert row["host"] == "node-a" and "died of an uncorrectable ECC error of cpu:0" in pool.reasons("s")
        assert pool.of_hosts()["node-a"]["healthy"]
        program.wait_lines(len(program.lines) + 2, seconds=30)
        pool.release(program)


def test_a_device_that_does_not_work_gives_its_sessions_away(tmp_path: Path) -> None:
    """All of them, not only the one whose kernel met it; and it takes no new ones."""
    with BreakablePool(tmp_path) as pool:
        programs = [pool.restless(name) for name in ("s", "t")]
        Path(f"{pool.fault}.broken.cpu:0").write_text(SICK)
        pool.ecc()
        for name in ("s", "t"):
            assert pool.on(name, 2)["host"] == "node-b", pool.reasons(name)
        sick = pool.of_hosts()["node-a"]
        assert not sick["healthy"] and sick["reason"].startswith(SICK) and pool.of_hosts()["node-b"]["healthy"]
        assert "unhealthy" in pool.reasons("s") + pool.reasons("t")
        refused = pool.run(*line("restless", tmp_path / "released"), name="u", options=("--host", "node-a"))
        assert refused.process.wait(60) != 0
        pool.until(lambda: SICK in " ".join(refused.errors), 10)
        with pytest.raises(VerbError, match="unhealthy"):
            pool.rgpu("migrate", "s", "node-a")
        pool.release(*programs)
