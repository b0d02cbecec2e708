"""The web page in a real browser: a login by a link, a move watched live, nothing that the policy stops, both widths.

``RGPU_PICTURES=docs/operators/pictures`` writes the pictures of the documentation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import EXAMPLES, HELD, ROOT, LocalPool, Program
from tests.support.web.chromium import chromium, needs_chromium

pytest.importorskip("starlette", reason="in the extra web")
pytestmark = [needs_chromium, pytest.mark.timeout(400)]

WIDTHS = {"wide": (1280, 800), "phone": (390, 844)}
PAGES = {"hosts": "/", "sessions": "/sessions", "session": "/session?name=heat", "history": "/history"}
#: Of these the documentation has pictures.
SHOWN = (("hosts", "wide", "light"), ("hosts", "phone", "dark"), ("session", "wide", "dark"),
         ("session", "phone", "light"))
PATIENCE = 60_000  #: ms: the machine may be busy


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("browser"), nodes=3, lease=8.0, up=("--web", "127.0.0.1:0")) as pool:
        heat = program(pool, "heat", "train-vision", 512, "--memory", "2GiB", "--label", "team=vision", "--label",
                       "gang=sweep-7")
        program(pool, "ising", "anneal", 96, "--memory", "1GiB", "--label", "team=physics")
        heat.wait_lines(2)
        yield pool


def program(pool: LocalPool, name: str, command: str, n: int, *options: str) -> Program:
    """The heat example as a command of that name, found by PATH: it stands in the pictures."""
    folder = pool.folder / "bin"
    folder.mkdir(exist_ok=True)
    (folder / command).write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    (folder / command).chmod(0o755)
    pool.environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return pool.run(command, "-W", "ignore", str(HELD), str(pool.folder / "never released"), "0", "0.2",
                    str(EXAMPLES / "heat.py"), "--n", str(n), "--steps", "1000000", "--report", "50", name=name,
                    options=options)


@pytest.fixture(scope="module")
def browser(pool: LocalPool) -> Iterator[Any]:
    with chromium() as found:
        yield found


def visit(browser: Any, pool: LocalPool, *options: str, **context: Any) -> tuple[Any, list[str]]:
    """A page that is logged in by the link and its button, and what the browser complains about."""
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(PATIENCE)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(pool.rgpu("web", "login", *options)["url"])
    page.get_by_role("button", name="Log in").click()
    page.wait_for_selector("nav")
    return page, wrong


def test_a_move_is_watched_live(browser: Any, pool: LocalPool) -> None:
    """The page is not loaded again: what is asked for here arrives by itself."""
    page, wrong = visit(browser, pool)
    page.click("text=Sessions")
    page.click("a:text-is('heat')")
    source = pool.session("heat")["host"]
    other = next(node["host"] for node in pool.living() if node["host"] != source)
    page.select_option("select[name=host]", other)
    page.select_option("select[name=mode]", "copy")
    page.get_by_role("button", name="Move").click()
    assert f"Move session heat to {other}" in page.inner_text("main")
    page.get_by_role("button", name="Move").click()
    page.wait_for_selector("#live")
    page.evaluate("() => { window.here = 'the same page'; }")
    page.wait_for_selector(f"dd:has-text('{other}')")
    page.wait_for_selector("text=Move heat: done")
    assert page.evaluate("() => window.here") == "the same page"
    assert pool.session("heat")["host"] == other
    page.wait_for_selector(".stories b:text-is('commit')")
    assert wrong == []


def test_the_phases_of_a_move_are_seen(browser: Any, pool: LocalPool) -> None:
    """Moves begun elsewhere, by the command line, until one was caught in the act."""
    page, wrong = visit(browser, pool)
    page.goto(page.url.rstrip("/") + "/session?name=heat")
    page.evaluate("""() => {
        window.phases = new Set();
        new MutationObserver(() => document.querySelectorAll('#move [aria-current=step]').forEach(
            one => window.phases.add(one.textContent))).observe(document.body, {childList: true, subtree: true});
    }""")
    for _ in range(8):
        source = pool.session("heat")["host"]
        other = next(node["host"] for node in pool.living() if node["host"] != source)
        pool.rgpu("migrate", "heat", other, "--mode", "replay")
        page.wait_for_selector(f"dd:has-text('{other}')")
        if page.evaluate("() => window.phases.size"):
            break
    seen = set(page.evaluate("() => [...window.phases]"))
    assert seen and seen <= {"preparing", "copying", "chosen", "cut", "replaying", "stopped", "ready", "committed"}
    assert wrong == []


def test_an_operator_cordons_and_a_session_is_killed(browser: Any, pool: LocalPool) -> None:
    page, wrong = visit(browser, pool, "--operator")
    card = page.locator("section.host", has_text="node-c")
    card.get_by_text("Cordon", exact=True).click()
    page.get_by_role("button", name="Cordon").click()
    page.wait_for_selector("section.host.cordoned")
    assert pool.node("node-c")["state"] == "cordoned"
    page.locator("section.host", has_text="node-c").get_by_text("Uncordon").click()
    page.get_by_role("button", name="Uncordon").click()
    eventually(lambda: pool.node("node-c")["state"] == "ready")
    page.goto(f"{page.url.split('/', 3)[0]}//{page.url.split('/', 3)[2]}/session?name=ising")
    page.get_by_text("Kill", exact=True).click()
    page.get_by_text("Cancel").click()
    assert pool.session("ising")["state"] == "running"
    page.get_by_text("Kill", exact=True).click()
    page.get_by_role("button", name="Kill").click()
    page.wait_for_selector("#live .state.ended")
    assert pool.ends("ising") and wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_both_widths_and_schemes(browser: Any, pool: LocalPool, width: str, scheme: str) -> None:
    size = WIDTHS[width]
    page, wrong = visit(browser, pool, "--operator", viewport={"width": size[0], "height": size[1]},
                        color_scheme=scheme)
    base = page.url.rstrip("/")
    for name, path in PAGES.items():
        page.goto(base + path)
        page.wait_for_selector("#live")
        if name == "session":
            page.wait_for_selector(".chart polyline", state="attached")  # a flat line has no height
        wide = page.evaluate("() => [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1], f"{name} at {size[0]} is {wide[0]} wide"
        ink, paper = (page.evaluate(f"() => getComputedStyle(document.body).{what}") for what in (
            "color", "backgroundColor"))
        assert (_light(ink) > _light(paper)) == (scheme == "dark"), (name, ink, paper)
        if os.environ.get("RGPU_PICTURES") and (name, width, scheme) in SHOWN:
            folder = Path(ROOT, os.environ["RGPU_PICTURES"])
            folder.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=folder / f"web-{name}-{size[0]}-{scheme}.png", full_page=width == "wide")
    assert wrong == []


def _light(colour: str) -> float:
    """How light a colour of CSS is: ``rgb(1, 2, 3)``."""
    return sum(map(float, colour[colour.index("(") + 1:colour.index(")")].split(",")[:3]))
