"""`rgpu top`, driven by textual's pilot: keys, tables, a pool that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Static

from rgpu.cli.sessions.top_app import TopApp
from rgpu.cli.sessions.top_tables import Picture, bar, headline, move_rows, node_rows, queue_rows
from rgpu.session.errors import PoolUnavailable
from tests.support.eventually import eventually_async

GIB = 1 << 30


def picture(calls: int = 10, moving: bool = False, paused: bool = False) -> Picture:
    devices = [{"device": "cpu:0", "total_memory": 8 * GIB, "free_memory": 6 * GIB, "sessions": 1}]
    return Picture(
        status={"leader": "a", "paused": paused, "paused_reason": "looking" if paused else "",
                "sessions": {"running": 1, "ended": 4},
                "moves": {"s": {"state": "sending", "phase": "copying", "from": "a", "to": "b", "round": 2,
                                "pages_sent": 50, "pages_total": 200, "bytes_sent": 3 << 20}} if moving else {}},
        nodes=[{"host": "a", "state": "draining", "leader": True, "reason": "new [cable]", "devices": devices},
               {"host": "b", "state": "ready", "leader": False, "reason": "", "devices": []}],
        sessions=[{"session": "s", "state": "moving" if moving else "running", "host": "a", "epoch": 1,
                   "memory_bytes": GIB, "calls": calls, "command": "python [x].py", "note": None}])


class Pool:
    """Answers with ``now``, or raises it."""

    def __init__(self) -> None:
        self.now: Picture | Exception = picture()

    def look(self) -> Picture:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


def drive(test: Callable[[TopApp, Pilot[None], Pool], Awaitable[None]]) -> None:
    async def body() -> None:
        pool = Pool()
        app = TopApp(pool.look, interval=0.02)
        async with app.run_test(size=(160, 50)) as pilot:
            await until(pilot, lambda: app.looks > 0)
            await test(app, pilot, pool)

    asyncio.run(body())


async def until(pilot: Pilot[None], condition: Callable[[], bool], seconds: float = 20) -> None:
    await eventually_async(condition, within=seconds, pause=pilot.pause)


def rows(app: TopApp, name: str) -> list[list[Any]]:
    table = app.table(name)
    return [table.get_row_at(index) for index in range(table.row_count)]


def said(app: TopApp, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


def test_it_follows_the_pool() -> None:
    async def test(app: TopApp, pilot: Pilot[None], pool: Pool) -> None:
        assert [row[:5] for row in rows(app, "nodes")] == [
            ["a", "draining", "*", "cpu:0", "##........  25%"], ["b", "ready", "", "none", "..........   0%"]]
        assert rows(app, "sessions")[0][5] == "10" and not rows(app, "moves")
        pool.now = picture(calls=99, moving=True)
        await until(pilot, lambda: bool(rows(app, "moves")))
        (move,) = rows(app, "moves")
        assert move == ["s", "a", "b", "copying", "2", "50", "3.0 MiB", "##........  25%"]
        assert rows(app, "sessions")[0][5] == "99"
        pool.now = picture(paused=True)
        await until(pilot, lambda: "AUTOMATION PAUSED (looking)" in said(app, "headline"))
        assert not rows(app, "moves")

    drive(test)


def test_a_pool_that_goes_away_leaves_the_last_picture_and_says_so() -> None:
    async def test(app: TopApp, pilot: Pilot[None], pool: Pool) -> None:
        pool.now = PoolUnavailable("no node answers [at all]")
        await until(pilot, lambda: "no node answers [at all]" in said(app, "trouble"))
        assert len(rows(app, "nodes")) == 2
        pool.now = picture(calls=11)
        await until(pilot, lambda: said(app, "trouble") == "" and rows(app, "sessions")[0][5] == "11")

    drive(test)


def test_keys() -> None:
    async def test(app: TopApp, pilot: Pilot[None], pool: Pool) -> None:
        await pilot.press("p")
        assert app.held
        seen = -1
        while seen != app.looks:  # an answer that was under way
            seen = app.looks
            await pilot.pause(0.3)
        pool.now = picture(calls=12)
        await pilot.pause(0.2)
        assert app.looks == seen, "it stands still"
        await pilot.press("p")
        await until(pilot, lambda: rows(app, "sessions")[0][5] == "12")
        await pilot.press("tab")
        focused = app.focused
        await pilot.press("tab")
        assert focused is not None and app.focused is not focused
        app.table("nodes").focus()
        await pilot.press("down")
        line = app.table("nodes").cursor_row
        shown = app.looks
        await until(pilot, lambda: app.looks > shown)
        assert app.table("nodes").cursor_row == line == 1, "the cursor stays when the tables are filled anew"
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)

    drive(test)


def test_an_answer_that_comes_while_the_screen_goes_is_no_error() -> None:
    async def body() -> None:
        pool = Pool()
        app = TopApp(pool.look, interval=0.02)
        async with app.run_test(size=(160, 50)) as pilot:
            await until(pilot, lambda: app.looks > 0)
        app.show(picture(calls=3, moving=True))

    asyncio.run(body())


def test_lines() -> None:
    assert headline(picture()) == "2 nodes, 1 running; coordinator: a"
    assert bar(0, 0) == "..........   0%" and bar(5, 4) == "########## 100%"
    assert move_rows(Picture(status={"moves": {"x": {"state": "checking"}}})) == [
        ("x", "", "", "checking", "", "0", "0 B", "")]
    assert node_rows(Picture(nodes=[{"host": "a", "state": "ready", "answers": False, "leader": False,
                                     "devices": []}]))[0][1] == "silent"


def test_who_waits_is_shown() -> None:
    waiting = [{"position": 1, "name": "s", "kind": "request", "priority": 2, "memory_bytes": GIB, "compute": 25,
                "waited_s": 3.4, "reason": "fits nowhere"},
               {"position": None, "name": "p", "kind": "parked", "priority": 0, "memory_bytes": GIB, "compute": None,
                "waited_s": 0.0, "reason": "parked for s"}]
    shown = Picture(status={"queue": waiting, "rebalancing": "s fits after 2 moves"})
    assert queue_rows(shown) == [("1", "s", "request", "2", "1.0 GiB, 25 %", "3 s", "fits nowhere"),
                                 ("", "p", "parked", "0", "1.0 GiB", "0 s", "parked for s")]
    assert "s fits after 2 moves" in headline(shown) and queue_rows(Picture()) == []
