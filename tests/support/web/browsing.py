"""The web page of a pool's first node, as a browser that runs no scripts sees it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.support.pools.pool import LocalPool

CSRF = re.compile(r'name="csrf" value="([^"]+)"')


def folder_of(pool: LocalPool, user: str) -> Path:
    """A client's folder with the key of a user who was made by `rgpu keys create`."""
    root, folder = pool.folder / "pool", pool.folder / f"client-{user}"
    if not folder.exists():
        (folder / "keys").mkdir(parents=True, mode=0o700)
        shutil.copy(root / "pool.json", folder / "pool.json")
        shutil.copy(root / "keys" / f"{user}.key", folder / "keys" / "user.key")
        folder.chmod(0o700)
    return folder


class Browser:
    """One browser: keeps cookies, sends ``Origin`` with forms, follows no redirect by itself."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.client = httpx.Client(base_url=base, timeout=60)
        self.processes: dict[str, int] = {}  #: of the page's host, where a test has looked for them

    def login(self, pool: LocalPool, *options: str) -> Browser:
        """Log in by `rgpu web login`."""
        link = pool.rgpu("web", "login", *options)["url"]
        done = self.send("/login", code=code_of(link))
        assert done.status_code == 303 and done.headers["location"] == "/", done.text
        return self

    def page(self, path: str, status: int = 200) -> str:
        """The text of a page."""
        found = self.client.get(path)
        assert found.status_code == status, f"{path}: {found.status_code} {found.headers} {found.text}"
        return found.text

    def part(self, path: str) -> httpx.Response:
        """The changing part of a page, as htmx asks for it."""
        return self.client.get(path, headers={"hx-request": "true"})

    def csrf(self) -> str:
        found = CSRF.search(self.page("/jobs"))
        assert found
        return found[1]

    def send(self, path: str, origin: str | None = "", **fields: str) -> httpx.Response:
        """Send a form; ``origin``: of another site, None: without."""
        headers = {} if origin is None else {"origin": origin or self.base}
        return self.client.post(path, data=fields, headers=headers)

    def do(self, act: str, **fields: str) -> httpx.Response:
        """Do something, with this login's token."""
        return self.send("/do", act=act, csrf=self.csrf(), **fields)


def code_of(link: str) -> str:
    """The code of a login link."""
    return urlsplit(link).query.partition("code=")[2]
