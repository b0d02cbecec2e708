"""What a program may observe, on a real pool: order, limits, forks, the journal's limit, the agent's death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool, VerbError
from tests.support.processes import state

PROGRAMS = Path(__file__).parents[1] / "programs"


def line(name: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-W", "ignore", str(PROGRAMS / f"{name}.py"), *map(str, arguments))


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.slow), "moved"])
def test_threads_ordered_only_on_the_host(pool: LocalPool, tmp_path: Path, how: str) -> None:
    """The program checks its own sum: a replay in another order would fail it."""
    program = pool.run(*line("two_threads", 1500, tmp_path / "released"), name=f"threads-{how}")
    program.wait_lines(3)
    row = pool.wait_state(program.name, "running")
    if how == "killed":
        os.kill(row["worker_pid"], signal.SIGKILL)
    else:
        pool.rgpu("migrate", program.name, "node-c" if row["host"] != "node-c" else "node-a")
    (tmp_path / "released").touch()
    program.finish()


def test_limits_and_codes(pool: LocalPool) -> None:
    """A fault is that session's: another one on the same pool goes on."""
    other = pool.heat("bystander")
    program = pool.run(*line("limits"), name="limits", options=("--memory", "64MiB"))
    program.process.wait(60)
    assert program.process.returncode == 0, program.errors[-10:]
    assert program.lines[-1] == "ok"
    logs = "\n".join(pool.rgpu("logs", "limits")["lines"]) if pool.session("limits")["host"] else ""
    assert "Traceback" not in logs
    other.finish()


def test_forks(pool: LocalPool) -> None:
    program = pool.run(*line("forks"), name="forks")
    assert program.process.wait(60) == 0, program.errors[-10:]
    assert {row["session"] for row in pool.rgpu("ps", "--all")} >= {"forks", "forks/2"}


def test_the_journal_reaches_its_limit(pool: LocalPool, tmp_path: Path) -> None:
    """A checkpoint is taken by itself, the journal is cut to it, and a killed worker comes back from there."""
    expected = pool.run(*line("uploads", 120), name="uploads-still").finish()
    program = pool.run(*line("uploads", 120, tmp_path / "released"), name="uploads",
                       options=("--journal-limit", "8MiB"))
    program.wait_lines(1)
    binary = eventually(lambda: pool.rgpu("describe", "uploads")["image"] or program.process.poll() is not None,
                        "no checkpoint was taken", 60, every=0.2)
    assert program.process.poll() is None, "no checkpoint was taken"
    row = pool.wait_state("uploads", "running")
    os.kill(row["worker_pid"], signal.SIGKILL)
    (tmp_path / "released").touch()
    assert program.finish() == expected
    assert binary["position"] > 0
    assert pool.session("uploads")["epoch"] > row["epoch"], "nothing was recovered"


def test_recover_off_is_lost_with_its_worker(pool: LocalPool) -> None:
    program = pool.heat("unkept", steps=50000, options=("--recover", "off"))
    program.wait_lines(3)
    os.kill(pool.wait_state("unkept", "running")["worker_pid"], signal.SIGKILL)
    assert program.process.wait(30) != 0
    assert pool.session("unkept")["state"] == "failed"
    assert any("recover" in text for text in program.errors), program.errors[-5:]


def test_the_agent_dies(pool: LocalPool) -> None:
    """The program's next call returns an error at once; nothing hangs."""
    program = pool.heat("orphan", steps=50000)
    program.wait_lines(3)
    child = pool.session("orphan")["pid"]
    program.process.kill()
    eventually(lambda: state(child) in ("", "Z"), "the program hangs without its agent", 10, every=0.05)
    pool.rgpu("kill", "orphan")


def test_journal_files(pool: LocalPool, tmp_path: Path) -> None:
    """verify and show on a good file; one changed byte is refused with its offset, exit 8."""
    from rgpu.session.calls import decoders
    from rgpu.session.calls.wire import BY_NAME
    from rgpu.session.journal.journal_file import JournalFileWriter
    from rgpu.session.journal.record import Record

    path = tmp_path / "s.journal"
    with JournalFileWriter(path, "s") as writer:
        for seq in range(1, 50):
            writer.append(Record(seq, BY_NAME["memset"].id, decoders.encode_args(
                "memset", destination=0x200000000000, pitch=4, width=4, height=1, element=1, value=seq, stream=0)))
    report = pool.rgpu("journal", "verify", str(path))
    assert report["records"] == 49 and report["calls"] == {"memset": 49}
    assert len(pool.rgpu("journal", "show", str(path))) == 49
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(VerbError) as error:
        pool.rgpu("journal", "verify", str(path))
    assert error.value.code == 8 and "offset" in error.value.text


def test_restore_and_a_damaged_binary(pool: LocalPool) -> None:
    program = pool.heat("restored", steps=20000)
    program.wait_lines(3)
    binary = pool.rgpu("checkpoint", "restored")["image"]
    before = pool.session("restored")["epoch"]
    back = pool.rgpu("restore", binary)
    assert back["session"] == "restored" and back["epoch"] > before and back["position"] > 0
    lines = len(program.lines)
    program.wait_lines(lines + 2)
    with pytest.raises(VerbError) as error:
        pool.rgpu("restore", "no-such-image")
    assert error.value.code == 3, error.value.text
    pool.rgpu("kill", "restored")


def test_a_forged_key_is_refused(pool: LocalPool, tmp_path: Path) -> None:
    """A client whose key the pool does not know: one line, exit 7."""
    from rgpu.link.keys import KeyPair

    copy = tmp_path / "pool"
    copy.mkdir(mode=0o700)
    (copy / "keys").mkdir(mode=0o700)
    (copy / "pool.json").write_bytes((pool.folder / "pool" / "pool.json").read_bytes())
    os.chmod(copy / "pool.json", 0o600)
    KeyPair.create("user", "stranger").save(copy / "keys" / "user.key")
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "ps", "-o", "json"], cwd=ROOT, capture_output=True,
                          text=True, env={**pool.environment, "RGPU_POOL": str(copy)}, timeout=60)
    assert done.returncode == 7 and json.loads(done.stdout)["error"] == "authentication_failed", done.stderr
