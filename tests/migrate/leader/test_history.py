"""Reading and following the decisions: in order, none missed, none twice, also over a compaction."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rgpu.migrate.leader import history
from rgpu.migrate.records.keys import history_key
from rgpu.migrate.registry.base import Put
from tests.support.leader.pool import World, run


def test_what_is_shown(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.session("s")
        await world.coordinator.migrate("s", "b")
        await world.coordinator.cordon("a", "cordoned", "new cable")
        await world.coordinator.pause(True, "looking")
        await world.registry.txn([], [Put(history_key("s", 999), b"rubbish")])
        told, revision = await history.stories(world.registry)
        assert [e["kind"] for e in told] == ["session", "session", "move", "move", "move", "move", "node", "pool"]
        assert [e["revision"] for e in told] == sorted(e["revision"] for e in told)
        assert (told[0]["session"], told[0]["owner"], told[0]["epoch"], told[0]["host"]) == ("s", "a", 1, None)
        assert (told[6]["host"], told[6]["reason"], told[7]["reason"]) == ("a", "new cable", "looking")
        assert revision == await world.registry.revision()
        of_s, _ = await history.stories(world.registry, history.subject_of("s"), limit=2)
        assert [e["decision"] for e in of_s] == ["commit", "clear_move"]
        of_a, _ = await history.stories(world.registry, history.subject_of(host="a"))
        assert [e["decision"] for e in of_a] == ["cordon"]
        assert (await history.stories(world.registry, limit=0))[0] == []

    run(tmp_path, test)


def test_following(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        _, since = await history.stories(world.registry)
        seen: list[dict[str, object]] = []
        waiting = asyncio.ensure_future(history.follow(world.registry, since, 10.0))
        await asyncio.sleep(0.05)
        await world.session("s")
        events, since = await waiting
        seen += events
        assert events, "as soon as there are any"
        await world.coordinator.cordon("a", "cordoned")
        while len(seen) < 3:
            events, since = await history.follow(world.registry, since, 10.0)
            assert events, seen
            seen += events
        assert [event["decision"] for event in seen] == ["create", "started", "cordon"]
        assert (await history.follow(world.registry, since, 0.05)) == ([], since), "nothing happened since"

    run(tmp_path, test)


def test_following_over_a_compaction(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        _, since = await history.stories(world.registry)
        await world.session("s")
        await world.registry.compact(await world.registry.revision())
        events, now = await history.follow(world.registry, since, 1.0)
        assert [event["decision"] for event in events] == ["create", "started"]
        assert (await history.follow(world.registry, now, 0.05))[0] == []

    run(tmp_path, test)
