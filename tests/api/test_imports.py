"""`import rgpu` costs nothing, and what the package offers is what it declares to type checkers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rgpu

ROOT = Path(__file__).parents[2]
OUTSIDE = '''
import rgpu

def mean_downtime(pool: rgpu.Pool, name: str, hosts: list[str]) -> float:
    moves: list[rgpu.Move] = [pool.migrate(name, host, mode="copy") for host in hosts]
    return sum(move.downtime_ms for move in moves) / len(moves)

async def both(names: list[str]) -> list[rgpu.Session]:
    async with rgpu.AsyncPool() as pool, await pool.run(["true"], time_limit="1h") as run:
        async for event in pool.events(follow=False):
            print(event.when + 1.0)
        detached: rgpu.AsyncDetachedRun = await pool.run(["true"], detach=True, log_limit="1MiB")
        print(await detached.wait(1.0) + 1, len(await detached.logs()))
        return [await pool.session(name) for name in [*names, run.name]]

def told(notice: rgpu.MoveNotice) -> None:
    print(notice.outcome.upper(), notice.when + 1.0)

def train() -> int:
    with rgpu.Pool(context="lab") as pool, pool.run(["true"], memory="1GiB", gpus=0.5, labels={"a": "b"}) as run:
        for event in pool.events(kind="session"):
            print(event.when + 1.0, event.reason.upper())
        rows: list[rgpu.Session] = pool.sessions(labels={"a": "b"})
        print(rows[0].name, pool.nodes()[0].devices[0].free_memory, run.poll())
        outlives: rgpu.DetachedRun = pool.run(["true"], name="train", detach=True)
        print(outlives.wait(timeout=1.0) + 1, outlives.status().reason.upper(), b"".join(outlives.follow(tail=3)))
    here = rgpu.current()
    if here is not None:
        here.on_move(before=told, after=told).close()
    try:
        return here.checkpoint().pages if here is not None else 0
    except rgpu.StoreFull as error:
        return error.exit_code
'''


def test_importing_it_imports_nothing_of_it() -> None:
    code = "import sys; before = set(sys.modules); import rgpu; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rgpu"]


def test_every_name_is_there_and_declared() -> None:
    stub = (ROOT / "rgpu" / "__init__.pyi").read_text()
    declared = {name: module for module, name in re.findall(r"^from (\S+) import \w+ as (\w+)$", stub, re.MULTILINE)}
    assert set(declared) | {"__version__"} == set(rgpu.__all__) <= set(dir(rgpu))
    assert {name: getattr(rgpu, name).__module__ for name in declared} == declared
    with pytest.raises(AttributeError, match="has no attribute 'Pol'"):
        rgpu.Pol  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("text", "status"), [(OUTSIDE, 0), (OUTSIDE.replace("error.exit_code", "error.code"), 1)])
def test_a_program_outside_is_type_checked(tmp_path: Path, text: str, status: int) -> None:
    (tmp_path / "outside.py").write_text(text)
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--follow-imports", "silent",
                           "--cache-dir", str(tmp_path / "cache"), "outside.py"], cwd=tmp_path, capture_output=True,
                          text=True, env={"MYPYPATH": str(ROOT), "PATH": ""})
    assert done.returncode == status, done.stdout + done.stderr
