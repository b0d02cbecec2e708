"""Pages from templates: every value is escaped, and characters that could mislead a reader are made visible."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlencode

from jinja2 import ChainableUndefined, Environment, PackageLoader
from starlette.requests import Request
from starlette.responses import HTMLResponse

from rgpu import __version__
from rgpu.session.printable import printable
from rgpu.web import charts
from rgpu.web.logins import Login

#: (path, text in the menu, only for operators)
MENU = (("/", "Hosts", False), ("/sessions", "Sessions", False), ("/gangs", "Gangs", False), ("/queue", "Queue", False),
        ("/history", "History", False), ("/plan", "Rebalancing", True))


def size(count: Any) -> str:
    """Format bytes for display: ``1.5 GiB``; empty for none."""
    if not isinstance(count, int | float):
        return ""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age(seconds: Any) -> str:
    """Format seconds for display: ``4 s``, ``12 min``, ``3 h``, ``2 d``; empty for none."""
    if not isinstance(seconds, int | float):
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(when: Any) -> str:
    """Format a Unix time in s, in this host's time zone; empty for none."""
    if not isinstance(when, int | float) or not when:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    except (OverflowError, ValueError, OSError):
        return ""


def percent(share: Any) -> str:
    """Format a share, 0 to 1, as ``40%``; empty for none."""
    return f"{share:.0%}" if isinstance(share, int | float) else ""


def count(number: Any) -> str:
    """Format a count as ``12,345``; empty for none."""
    return f"{number:,.0f}" if isinstance(number, int | float) else ""


def link(path: str, **values: Any) -> str:
    """Return a path of these pages with values; empty ones are left out."""
    kept = {name: value for name, value in values.items() if value not in (None, "", False)}
    return f"{path}?{urlencode(kept)}" if kept else path


def _said(value: Any) -> Any:
    """A value as printed: in untrusted text, characters that hide or reverse it are made visible. Markup is ours."""
    return printable(value, keep="\n\t") if type(value) is str else "" if value is None else value


class Pages:
    """The templates of the package."""

    def __init__(self, host: str) -> None:
        # A node of another version may lack a field: its place is empty then, and the page still works.
        self._environment = Environment(loader=PackageLoader("rgpu.web"), autoescape=True, trim_blocks=True,
                                        undefined=ChainableUndefined, finalize=_said, lstrip_blocks=True)
        self._environment.filters.update(size=size, age=age, moment=moment, percent=percent, count=count)
        self._environment.globals.update(link=link, bar=charts.bar, version=__version__, host=host)

    def text(self, name: str, **values: Any) -> str:
        """Return a template, rendered with the values."""
        return self._environment.get_template(name).render(**values)

    def answer(self, request: Request, name: str, login: Login | None, http: int = 200,
               **values: Any) -> HTMLResponse:
        """Return a page; for a request of its changing part only, that part (``parts/NAME``)."""
        part = request.headers.get("hx-request") == "true"
        text = self.text(f"parts/{name}" if part else name, login=login, path=request.url.path, menu=MENU,
                         here=str(request.url.path) + (f"?{request.url.query}" if request.url.query else ""), **values)
        return HTMLResponse(text, http, {"vary": "HX-Request"})
