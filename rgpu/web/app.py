"""The application: routes of pages and forms, logins, and pages for errors."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rgpu.link.control.async_client import AsyncControlClient
from rgpu.session.errors import (
    AuthenticationFailed,
    LimitReached,
    NotFound,
    NotPermitted,
    PoolUnavailable,
    Refused,
    RgpuError,
    UsageError,
)
from rgpu.web import charts, views
from rgpu.web.actions import ACTIONS, MODES, Doing, digest
from rgpu.web.asking import Asking
from rgpu.web.figures import EVERY_SECONDS, KEPT, Figures
from rgpu.web.guarding import Guarded, Names, Rate
from rgpu.web.logins import Login, Logins
from rgpu.web.rendering import Pages, count, link, percent, size

log = structlog.get_logger(__name__)

Page = Callable[[Request, Login], Awaitable[Response]]
STATUS: tuple[tuple[type[RgpuError], int], ...] = (
    (NotPermitted, 403), (AuthenticationFailed, 401), (NotFound, 404), (UsageError, 400), (LimitReached, 429),
    (Refused, 409), (PoolUnavailable, 503))
#: Attempts to log in, at once and per second: of one address, and of all together.
LOGINS, ALL_LOGINS = (10.0, 0.2), (100.0, 10.0)
FORMS = (30.0, 2.0)  #: forms of one login
GANGS = 10  #: on one page, each with its ranks
STORIES = 100  #: decisions on one page, of the 2000 that are kept
LATEST = 6  #: of one session
LEAST_SPAN = 120.0  #: s that a chart shows at least
TYPES = {"style.css": "text/css; charset=utf-8", "htmx.min.js": "text/javascript; charset=utf-8",
         "htmx.LICENSE.txt": "text/plain; charset=utf-8", "icon.svg": "image/svg+xml"}


class Web:
    """The pages of one node. ``url``: where browsers reach them; ``client``: to the daemon, with the pages' key."""

    def __init__(self, host: str, url: str, client: AsyncControlClient) -> None:
        self._asking, self._pages, self._names = Asking(client), Pages(host), Names.of(url)
        self._logins, self._figures = Logins(time.monotonic), Figures()
        self._doing = Doing(self._asking)
        self._from_one, self._from_all, self._forms = Rate(*LOGINS), Rate(*ALL_LOGINS), Rate(*FORMS)
        # Cookies belong to a host name, whatever the port: two pools on one machine must not end each other's logins.
        self._cookie = "__Host-rgpu" if self._names.secure else f"rgpu-{url.rpartition(':')[2]}"
        self._files = {name: resources.files("rgpu.web").joinpath("static", name).read_bytes() for name in TYPES}

    def app(self) -> ASGIApp:
        """Return the application, behind its guard."""
        seen = {"/": self._hosts, "/sessions": self._sessions, "/session": self._session, "/gangs": self._gangs,
                "/queue": self._queue,
                "/history": self._history, "/plan": self._plan, "/confirm": self._confirm, "/jobs": self._jobs}
        routes = [Route(path, self._of_who_is_logged_in(page)) for path, page in seen.items()]
        routes += [Route("/do", self._of_who_is_logged_in(self._do), methods=["POST"]),
                   Route("/logout", self._of_who_is_logged_in(self._logout), methods=["POST"]),
                   Route("/login", self._login_page), Route("/login", self._login, methods=["POST"]),
                   Route("/static/{name}", self._file)]
        return Guarded(Starlette(routes=routes, lifespan=self._life), self._names)

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        sampling = asyncio.ensure_future(self._sample())
        try:
            yield
        finally:
            sampling.cancel()

    async def _sample(self) -> None:
        """Take samples for as long as any user is logged in, each with a login's own rights."""
        while True:
            asked: set[tuple[str, str]] = set()
            for login in self._logins.living():
                if (login.user, login.role) in asked:
                    continue
                with contextlib.suppress(RgpuError):
                    found = await self._asking.look(login, "session.list", all=False, all_users=login.operator)
                    self._figures.add(time.time(), found["sessions"])
                    asked.add((login.user, login.role))
            await asyncio.sleep(EVERY_SECONDS)

    # -- logins, and errors of pages --------------------------------------------------------
    def _of_who_is_logged_in(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            login = self._logins.find(request.cookies.get(self._cookie, ""))
            if login is None:
                return self._to_login(request)
            try:
                return await page(request, login)
            except RgpuError as error:
                if error.detail.get("reason") == "grant":
                    self._logins.end(request.cookies.get(self._cookie, ""))
                    return self._to_login(request)
                return self._failed(request, login, error)
            except Exception as error:  # noqa: BLE001 - a page that fails must not end the others
                log.exception("a page failed", path=request.url.path)
                return self._failed(request, login, RgpuError(f"this page failed: {type(error).__name__}: {error}"))

        return answer

    def _to_login(self, request: Request) -> Response:
        if request.headers.get("hx-request") == "true":
            return Response(status_code=204, headers={"hx-redirect": "/login"})
        return RedirectResponse("/login", 303)

    def _failed(self, request: Request, login: Login | None, error: RgpuError) -> Response:
        status = next((number for kind, number in STATUS if isinstance(error, kind)), 502)
        if request.headers.get("hx-request") == "true":  # the shown content stays; the error is put above it
            return HTMLResponse(self._pages.text("parts/trouble.html", message=error.message), 200,
                                {"hx-retarget": "#trouble", "hx-reswap": "innerHTML"})
        return self._pages.answer(request, "error.html", login, status, message=error.message, code=error.code)

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            return Response("there is no such file\n", 404, media_type="text/plain")
        return Response(self._files[name], headers={"content-type": TYPES[name],
                                                    "cache-control": "public, max-age=3600"})

    # -- logging in and out -----------------------------------------------------------------
    async def _login_page(self, request: Request) -> Response:
        """Show the link's code in a form, so that opening the link (by a mail program, too) does not use it up."""
        return self._pages.answer(request, "login.html", None, code=request.query_params.get("code", "")[:200],
                                  message="")

    async def _login(self, request: Request) -> Response:
        now, peer = time.monotonic(), request.client.host if request.client else ""
        form = await read_form(request)
        try:
            if not self._from_one.allows(peer, now) or not self._from_all.allows("", now):
                raise LimitReached("too many tries to log in: wait a minute")
            answer = await self._asking.redeem(form.get("code", ""))
        except RgpuError as error:
            log.warning("a login was refused", peer=peer, reason=error.message)
            status = next((number for kind, number in STATUS if isinstance(error, kind)), 502)
            return self._pages.answer(request, "login.html", None, status, code="", message=error.message)
        await self._end(request)
        self._from_one.give_back(peer)
        cookie, login = self._logins.add(answer)
        log.info("logged in", user=login.user, role=login.role, peer=peer)
        found = RedirectResponse("/", 303)
        found.set_cookie(self._cookie, cookie, max_age=int(answer["seconds"]), path="/", secure=self._names.secure,
                         httponly=True, samesite="strict")
        return found

    async def _logout(self, request: Request, login: Login) -> Response:
        await self._read(request, login)
        await self._end(request)
        found = RedirectResponse("/login", 303)
        found.delete_cookie(self._cookie, path="/", secure=self._names.secure, httponly=True, samesite="strict")
        return found

    async def _end(self, request: Request) -> None:
        login = self._logins.end(request.cookies.get(self._cookie, ""))
        if login is not None:
            with contextlib.suppress(RgpuError):
                await self._asking.logout(login)

    # -- pages ----------------------------------------------------------------------------
    async def _hosts(self, request: Request, login: Login) -> Response:
        nodes, status = await asyncio.gather(self._asking.look(login, "node.list"),
                                             self._asking.look(login, "pool.status"))
        hosts = [{**node, "devices": [{**one, "shares": views.shares(one)} for one in node["devices"]]}
                 for node in [*nodes["nodes"], *nodes.get("lost", [])]]
        return self._pages.answer(request, "hosts.html", login, hosts=hosts, status=status,
                                  moves=views.moves(status, {}))

    async def _sessions(self, request: Request, login: Login) -> Response:
        query = dict(request.query_params)
        ended = query.get("all") == "1" or query.get("state") in ("ended", "failed")
        asked = {name: query[name][:200] for name in ("state", "host", "user", "q", "page") if query.get(name)}
        found = await self._asking.look(login, "session.page", all=ended, all_users=login.operator, **asked)
        page = views.Piece(found["rows"], found["page"], found["pages"], found["total"])
        return self._pages.answer(request, "sessions.html", login, page=page, query=query,
                                  states=sorted({*found["states"], "running", "ended"}))

    async def _session(self, request: Request, login: Login) -> Response:
        name = request.query_params.get("name", "")
        row = await self._asking.look(login, "session.describe", session=name)
        stories, nodes = await asyncio.gather(
            self._asking.look(login, "pool.history", session=name, limit=LATEST), self._asking.look(login, "node.list"))
        move, progress = row.get("move"), dict((row.get("worker") or {}).get("move") or {})
        hosts = [node["host"] for node in nodes["nodes"] if node["host"] != row.get("host")]
        return self._pages.answer(
            request, "session.html", login, row=row, move=move, progress=progress, steps=views.steps(move, progress),
            stories=stories["events"][::-1], hosts=hosts, modes=MODES, charts=self._charts(row),
            living=row.get("state") not in ("ended", "failed"))

    def _charts(self, row: dict[str, Any]) -> list[Any]:
        ring = self._figures.of(row)
        if ring is None:
            return []
        now = time.time()
        span = min(EVERY_SECONDS * KEPT, max(LEAST_SPAN, now - ring.times[0]))
        shown: tuple[tuple[str, str, Callable[[float], str], float], ...] = (
            ("memory_bytes", "Memory", size, float(row.get("quota") or 0)),
            ("gpu_share", "Share of the GPU", percent, 1), ("calls", "Calls a second", count, 0),
            ("journal_bytes", "Journal", size, 0))
        return [charts.line(ring.series(field), name, text, now, span, top) for field, name, text, top in shown]

    async def _gangs(self, request: Request, login: Login) -> Response:
        query = dict(request.query_params)
        found = await self._asking.look(login, "gang.list", all=query.get("all") == "1", all_users=login.operator)
        return self._pages.answer(request, "gangs.html", login, query=query,
                                  page=views.piece(found["gangs"], query.get("page", "1"), GANGS))

    async def _queue(self, request: Request, login: Login) -> Response:
        status = await self._asking.look(login, "pool.status")
        return self._pages.answer(request, "queue.html", login, status=status,
                                  page=views.piece(status.get("queue") or [], request.query_params.get("page", "1")))

    async def _history(self, request: Request, login: Login) -> Response:
        query = dict(request.query_params)
        given = {name: query[name] for name in ("session", "host") if query.get(name)}
        found = await self._asking.look(login, "pool.history", limit=2000, **given)
        stories = found["events"][::-1]
        if query.get("decision"):
            stories = [one for one in stories if one["decision"] == query["decision"]]
        return self._pages.answer(request, "history.html", login, query=query,
                                  page=views.piece(stories, query.get("page", "1"), STORIES))

    async def _plan(self, request: Request, login: Login) -> Response:
        self._doing.permit(ACTIONS["apply"], login)
        plan = await self._asking.look(login, "pool.rebalance", apply=False)
        return self._pages.answer(request, "plan.html", login, plan=plan, digest=digest(plan))

    async def _jobs(self, request: Request, login: Login) -> Response:
        return self._pages.answer(request, "jobs.html", login)

    # -- doing ------------------------------------------------------------------------------
    async def _confirm(self, request: Request, login: Login) -> Response:
        action = ACTIONS.get(request.query_params.get("act", ""))
        if action is None:
            raise NotFound("there is nothing of that name to do")
        self._doing.permit(action, login)
        values = action.read(request.query_params)
        return self._pages.answer(request, "confirm.html", login, action=action, values=values,
                                  question=action.question(values), back=_page_of(values))

    async def _do(self, request: Request, login: Login) -> Response:
        form = await self._read(request, login)
        action = ACTIONS.get(form.get("act", ""))
        if action is None:
            raise NotFound("there is nothing of that name to do")
        values = action.read(form)
        await self._doing.do(action, values, login)
        return RedirectResponse(_page_of(values), 303)

    async def _read(self, request: Request, login: Login) -> dict[str, str]:
        """Read a form of a page. Raises :class:`NotPermitted` without this login's token, :class:`LimitReached`."""
        if not self._forms.allows(login.grant, time.monotonic()):
            raise LimitReached("too many forms of this login at once: wait a moment")
        form = await read_form(request)
        if not login.genuine(form.get("csrf", "")):
            raise NotPermitted("this form is not of this login: go back, load the page anew and try again")
        return form


def _page_of(values: dict[str, str]) -> str:
    """The page that shows the progress of an action; a form cannot choose another."""
    if "session" in values:
        return link("/session", name=values["session"])
    return "/plan" if "plan" in values else "/"


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form; the guard has limited its length. Raises :class:`UsageError`."""
    try:
        return dict(parse_qsl((await request.body()).decode("utf-8"), keep_blank_values=True, max_num_fields=32))
    except ValueError as error:
        raise UsageError(f"the form cannot be read: {error}") from None
