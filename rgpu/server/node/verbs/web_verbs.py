"""Logins of a node's web page, as the control port answers them (:mod:`rgpu.link.control.grants` keeps them)."""

from __future__ import annotations

import time
from typing import Any

from rgpu.link.control import ControlServer, Request
from rgpu.link.control.grants import CODE_SECONDS, GRANT_SECONDS, Grants
from rgpu.link.keys import AuthorizedKeys
from rgpu.session.errors import AuthenticationFailed, Refused


class WebVerbs:
    """Answers the verbs. ``url``: of the web page of this node, for browsers; empty: it serves none."""

    def __init__(self, host: str, url: str, grants: Grants, authorized: AuthorizedKeys) -> None:
        self._host, self._url, self._grants, self._authorized = host, url, grants, authorized

    def register(self, control: ControlServer) -> None:
        """Enter the verbs at the control server."""
        for verb, handler in {"web.login": self._login, "web.redeem": self._redeem, "web.logout": self._logout}.items():
            control.register(verb, handler)

    async def _login(self, request: Request) -> Any:
        if not self._url:
            raise Refused(f"{self._host} serves no web page: start its daemon with --web HOST:PORT")
        return {"code": self._grants.code(request.public, time.monotonic()), "seconds": CODE_SECONDS, "url": self._url}

    async def _redeem(self, request: Request) -> Any:
        grant, public = self._grants.redeem(str(request.args.get("code") or ""), time.monotonic())
        key = self._authorized.find(public)
        if key is None:
            self._grants.end(grant)
            raise AuthenticationFailed("the key of this login is let in no more", reason="grant")
        return {"grant": grant, "seconds": GRANT_SECONDS, "role": key.role, "user": key.holder, "name": key.name}

    async def _logout(self, request: Request) -> Any:
        self._grants.end(str(request.args.get("grant") or ""))
        return {}
