"""A thousand sessions: what a page of them costs, and that no page grows with their number."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.migrate.records.keys import session_key
from rgpu.migrate.records.schema import Program, SessionRecord, Wants, encode
from rgpu.migrate.registry.base import Put
from rgpu.migrate.registry.open import open_registry
from tests.support.pools.pool import LocalPool

pytest.importorskip("starlette", reason="in the extra web")
from tests.support.web.browsing import Browser  # noqa: E402

MANY = 1000
#: Figures are written there, where it is named: how long is a matter of the machine, and of what else it does.
OUT = os.environ.get("RGPU_WEB_FIGURES", "")


async def fill(registry_file: Path) -> None:
    """Records of sessions that failed: they are listed as all are, and nobody acts on them."""
    registry = await open_registry(f"embedded:{registry_file}")
    try:
        for start in range(0, MANY, 100):
            await registry.txn([], [Put(session_key(f"s-{number:04}"), encode(SessionRecord(
                name=f"s-{number:04}", state="failed", owner=None, incarnation=1, epoch=1, quota=1 << 30, agent="",
                device="cpu:0", user="user", created=time.time(), changed=time.time(), reason="for a list",
                program=Program(pid=1, command="train --long " * 8), wants=Wants(labels={"team": f"t{number % 7}"}))))
                for number in range(start, start + 100)])
    finally:
        await registry.close()


def worked(process: int) -> float:
    """Milliseconds of processor that a process has used, whatever else its machine did."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page_process(daemon: int) -> int:
    """The page's process: the child of its daemon that runs ``rgpu.web``."""
    return next(int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline")
                if b"rgpu.web" in path.read_bytes().split(b"\0")
                and int(path.with_name("stat").read_text().rpartition(")")[2].split()[1]) == daemon)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with LocalPool(tmp_path_factory.mktemp("many"), nodes=2, lease=8.0, up=("--web", "127.0.0.1:0")) as pool:
        if pool.registry:
            pytest.skip("the records are put into the embedded registry")
        asyncio.run(fill(pool.folder / "pool" / "registry.db"))
        node = next(node for node in pool.rgpu("nodes") if node["web"])
        browser = Browser(node["web"]).login(pool)
        browser.processes = {"daemon": node["pid"], "page": page_process(node["pid"])}
        yield browser


def test_a_thousand_sessions_are_listed_by_pages(many: Browser) -> None:
    seen: list[str] = []
    for number in range(1, 21):
        text = many.page(f"/sessions?all=1&page={number}")
        assert f"{MANY} in all, page {number} of 20" in text and len(text) < 100_000
        seen += [f"s-{one:04}" for one in range(MANY) if f">s-{one:04}<" in text]
    assert seen == [f"s-{number:04}" for number in range(MANY)], "each once, in order"
    assert "1 in all" in many.page("/sessions?all=1&q=s-0777")
    assert "143 in all" in many.page("/sessions?all=1&q=team=t5")


def test_what_a_page_costs_is_measured(many: Browser) -> None:
    took, before = [], {name: worked(process) for name, process in many.processes.items()}
    for _ in range(60 if OUT else 3):
        time.sleep(1.0)  # an answer serves a login for 0.7 s: each of these is asked for anew
        began = time.perf_counter()
        many.page("/sessions?all=1&page=7")
        took.append(time.perf_counter() - began)
    figures = {"sessions": MANY, "page_ms": {"median": round(1000 * statistics.median(took), 1),
                                             "p95": round(1000 * statistics.quantiles(took, n=20)[-1], 1),
                                             "worst": round(1000 * max(took), 1)},
               "processor_ms_a_page": {name: round((worked(process) - before[name]) / len(took), 1)
                                       for name, process in many.processes.items()}}
    if OUT:
        Path(OUT).write_text(json.dumps(figures) + "\n")
    print(figures)
