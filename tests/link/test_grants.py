"""Logins of a web page: codes work once and in time, grants end, and a page asks only what pages may."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.control import AsyncControlClient, ControlServer
from rgpu.link.control.grants import CODE_SECONDS, CODES_A_KEY, GRANT_SECONDS, GRANTS_A_KEY, Grants
from rgpu.link.control.verbs import TABLE
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles
from rgpu.session.errors import AuthenticationFailed, Corrupt, LimitReached

ALICE, BOB = "A" * 40, "B" * 40


def test_a_code_works_once() -> None:
    grants = Grants()
    code = grants.code(ALICE, 0.0)
    grant, public = grants.redeem(code, 1.0)
    assert public == ALICE and grants.holder(grant, 1.0) == ALICE and len(grant) > 40
    for wrong in (code, "", code + "x", grant, "\ud800"):
        with pytest.raises(AuthenticationFailed, match="used before"):
            grants.redeem(wrong, 2.0)


def test_codes_and_grants_end() -> None:
    grants = Grants()
    late = grants.code(ALICE, 0.0)
    with pytest.raises(AuthenticationFailed):
        grants.redeem(late, CODE_SECONDS)
    grant, _ = grants.redeem(grants.code(ALICE, 0.0), CODE_SECONDS - 1)
    assert grants.holder(grant, CODE_SECONDS - 2 + GRANT_SECONDS) == ALICE
    for when in (CODE_SECONDS - 1 + GRANT_SECONDS, 0.0):  # over is over, whatever a clock says later
        with pytest.raises(AuthenticationFailed, match="over"):
            grants.holder(grant, when)
    other, _ = grants.redeem(grants.code(BOB, 0.0), 0.0)
    grants.end(other)
    grants.end("none of them")
    with pytest.raises(AuthenticationFailed):
        grants.holder(other, 0.0)


def test_nobody_fills_the_memory() -> None:
    grants = Grants()
    for _ in range(CODES_A_KEY):
        grants.code(ALICE, 0.0)
    with pytest.raises(LimitReached, match="wait to be used"):
        grants.code(ALICE, 0.0)
    grants.code(BOB, 0.0)
    grants.code(ALICE, CODE_SECONDS)
    made = [grants.redeem(grants.code(ALICE, CODE_SECONDS), CODE_SECONDS)[0] for _ in range(GRANTS_A_KEY + 1)]
    with pytest.raises(AuthenticationFailed):
        grants.holder(made[0], CODE_SECONDS)
    assert {grants.holder(grant, CODE_SECONDS) for grant in made[1:]} == {ALICE}


class Served:
    """A control port that says who it takes a request for; with the key of a web page."""

    def __init__(self, folder: Path) -> None:
        self.files = PoolFiles(folder / "pool")
        self.files.create()
        self.keys = self.files.add_node("node-a")
        self.page = KeyPair.create("web", "web-node-a")
        self.user = KeyPair.load(self.files.key_path("user"))
        self.audited: list[tuple[str, str, str, str]] = []

    async def run(self, scenario: Any) -> None:
        server = ControlServer(self.keys, self.files.authorized, "tcp://127.0.0.1:*")
        server.own_processes[self.page.public] = self.page.public_key()
        server.audit = lambda request, outcome, reason: self.audited.append(
            (request.verb, request.name, request.via, outcome))

        async def who(request: Any) -> Any:
            return [request.role, request.name, request.user, request.public, request.via]

        for verb in TABLE:
            server.register(verb.name, who)
        await server.start()
        endpoint = Endpoint(server.address, self.keys.public)
        page, user = AsyncControlClient(self.page, endpoint), AsyncControlClient(self.user, endpoint)
        try:
            await scenario(server, page, user)
        finally:
            await page.close()
            await user.close()
            await server.stop()


def test_a_page_acts_as_who_is_logged_in_and_asks_what_pages_may(tmp_path: Path) -> None:
    served = Served(tmp_path)

    async def scenario(server: ControlServer, page: AsyncControlClient, user: AsyncControlClient) -> None:
        grant, _ = server.grants.redeem(server.grants.code(served.user.public, time.monotonic()), time.monotonic())
        expected = ["user", "user", "user", served.user.public, "web-node-a"]
        for verb in TABLE:
            asked = page.call(verb.name, {}, 5, grant=grant)
            if verb.web and "user" in verb.roles:
                assert await asked == expected, verb.name
            else:
                with pytest.raises(AuthenticationFailed):
                    await asked
        for verb in TABLE:  # by itself it may exchange codes, and nothing else
            if verb.name in ("web.redeem", "web.logout"):
                assert (await page.call(verb.name, {}, 5))[0] == "web"
            else:
                with pytest.raises(AuthenticationFailed):
                    await page.call(verb.name, {}, 5)
        for other, sent in ((user, grant), (page, "made up"), (page, served.user.public)):
            with pytest.raises(AuthenticationFailed):
                await other.call("session.list", {}, 5, grant=sent)
        server.grants.end(grant)
        with pytest.raises(AuthenticationFailed, match="over"):
            await page.call("session.list", {}, 5, grant=grant)

    asyncio.run(served.run(scenario))
    assert ("session.kill", "user", "web-node-a", "ok") in served.audited
    assert ("keys.invite", "web-node-a", "", AuthenticationFailed.code) in served.audited


def test_a_key_that_was_taken_away_ends_its_logins(tmp_path: Path) -> None:
    served = Served(tmp_path)

    async def scenario(server: ControlServer, page: AsyncControlClient, user: AsyncControlClient) -> None:
        grant, _ = server.grants.redeem(server.grants.code(served.user.public, time.monotonic()), time.monotonic())
        assert (await page.call("session.list", {}, 5, grant=grant))[1] == "user"
        served.files.authorized.remove("user")
        with pytest.raises(AuthenticationFailed, match="let in no more") as caught:
            await page.call("session.list", {}, 5, grant=grant)
        assert caught.value.detail["reason"] == "grant"

    asyncio.run(served.run(scenario))


def test_no_file_makes_a_page(tmp_path: Path) -> None:
    """A key of role ``web`` in a folder is none: only the daemon's own process has it."""
    KeyPair.create("web", "mallory").save(tmp_path / "keys" / "mallory.key")
    with pytest.raises(Corrupt):
        KeyPair.load(tmp_path / "keys" / "mallory.key")
