"""The web page of a real pool: logins, rights, forms, strangers' texts, actions, and what ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rgpu.session.errors import Refused, UsageError
from tests.support.eventually import eventually
from tests.support.pools.pool import EXAMPLES, HELD, LocalPool, Program, VerbError

pytest.importorskip("starlette", reason="in the extra web")
from tests.support.web.browsing import Browser, code_of, folder_of  # noqa: E402

EVIL = "<img src=x onerror=alert(1)>"
PAGES = ("/", "/sessions", "/session?name=heat", "/gangs", "/queue", "/history", "/plan",
         "/confirm?act=kill&session=heat", "/jobs")


class Site:
    """A pool of two nodes, the first of which serves the page; a program of the user ``user`` with a hostile name."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        evil = pool.folder / EVIL
        evil.write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
        evil.chmod(0o700)
        never = str(pool.folder / "never released")
        self.program: Program = pool.run(
            str(evil), "-W", "ignore", str(HELD), never, "0", "0.1", str(EXAMPLES / "heat.py"), "--n", "96", "--steps",
            "1000000", "--report", "50", name="heat", options=("--label", "team=a"))
        self.program.wait_lines(2)
        pool.rgpu("keys", "create", "--role", "user", "mallory")
        self.base = next(node["web"] for node in pool.rgpu("nodes") if node["web"])

    def browser(self) -> Browser:
        return Browser(self.base)

    def user(self) -> Browser:
        return self.browser().login(self.pool)

    def operator(self) -> Browser:
        return self.browser().login(self.pool, "--operator")

    def mallory(self) -> Browser:
        return self.browser().login(self.pool, "--pool", str(folder_of(self.pool, "mallory")))

    def runs(self) -> bool:
        return self.program.process.poll() is None and self.pool.session("heat")["state"] == "running"

    def server(self, pid: int) -> list[int]:
        """Processes of the page that a daemon has started."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
                parent = int(path.with_name("stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if b"rgpu.web" in words and (not pid or parent == pid):
                found.append(int(path.parent.name))
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with LocalPool(tmp_path_factory.mktemp("web"), nodes=2, lease=8.0, up=("--web", "127.0.0.1:0")) as pool:
        yield Site(pool)


def test_nothing_is_shown_without_a_login(site: Site) -> None:
    browser = site.browser()
    for path in PAGES:
        found = browser.client.get(path)
        assert (found.status_code, found.headers["location"]) == (303, "/login") and "heat" not in found.text
        part = browser.part(path)
        assert (part.status_code, part.headers["hx-redirect"], part.text) == (204, "/login", "")
    for path in ("/do", "/logout"):
        assert browser.send(path, act="kill", session="heat").headers["location"] == "/login"
    assert "rgpu web login" in browser.page("/login") and site.runs()


def test_every_answer_is_guarded(site: Site) -> None:
    browser = site.user()
    for path in (*PAGES, "/login", "/static/htmx.min.js", "/static/style.css", "/static/none", "/none"):
        headers = browser.client.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"] and \
            "unsafe" not in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY", path
        assert ("no-store" in headers["cache-control"]) != path.endswith((".js", ".css")), path
    for path in PAGES:
        text = browser.client.get(path).text
        assert "style=" not in text and " onclick" not in text and text.count("<script") == 1, path
    assert browser.client.get("/", headers={"host": "evil.example"}).status_code == 421
    assert browser.client.request("TRACE", "/").status_code in (403, 405)
    for name in ("..%2f..%2fapp.py", "%2e%2e/app.py", "htmx.min.js/../../app.py"):
        assert browser.client.get(f"/static/{name}").status_code in (303, 404)


def test_a_link_logs_in_once(site: Site) -> None:
    link = site.pool.rgpu("web", "login")
    assert link["user"] == link["role"] == "user" and link["url"].startswith(f"{site.base}/login?code=")
    code = code_of(link["url"])
    first, second = site.browser(), site.browser()
    for _ in range(2):  # looking at it does not use it up
        assert code in first.page(f"/login?code={code}")
    assert first.send("/login", origin=None, code=code).status_code == 403
    assert first.send("/login", origin="https://evil.example", code=code).status_code == 403
    done = first.send("/login", code=code)
    assert (done.status_code, done.headers["location"]) == (303, "/")
    cookie = done.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "path=/" in cookie and "domain" not in cookie
    again = second.send("/login", code=code)
    assert again.status_code == 401 and "used before" in again.text and "set-cookie" not in again.headers
    for wrong in ("", "x" * 43, code + "x"):
        assert second.send("/login", code=wrong).status_code == 401
    assert "heat" in first.page("/sessions")
    evil = second.page('/login?code="><script>alert(1)</script>&next=https://evil.example')
    assert "<script>alert" not in evil and "evil.example" not in evil


def test_tries_to_log_in_are_limited(site: Site) -> None:
    """Last of those that log in by this address: afterwards it has to wait. The address is another one of loopback."""
    transport = httpx.HTTPTransport(local_address="127.0.0.77")
    with httpx.Client(base_url=site.base, transport=transport, timeout=60) as client:
        found = [client.post("/login", data={"code": "x"}, headers={"origin": site.base}).status_code
                 for _ in range(15)]
    assert found[:8] == [401] * 8 and found[-1] == 429


def test_texts_of_strangers_are_shown_and_not_obeyed(site: Site) -> None:
    site.pool.rgpu("cordon", "node-b", "--reason", "</p><script>alert(2)</script>\u202e")
    try:
        browser = site.operator()
        session, hosts = browser.page("/session?name=heat"), browser.page("/")
        history = browser.page("/history?host=node-b")
        assert "&lt;img src=x onerror=alert(1)&gt;" in session and "<img" not in session
        for text in (hosts, history):
            assert "&lt;/p&gt;&lt;script&gt;alert(2)" in text and "<script>alert" not in text and "\u202e" not in text
        for path in (f"/sessions?q={EVIL}&state={EVIL}&host={EVIL}&page={EVIL}", f"/history?decision={EVIL}"):
            assert "<img" not in browser.page(path)
        for path in (f"/session?name={EVIL}", f"/history?host={EVIL}", f"/history?session={EVIL}"):
            found = browser.client.get(path)
            assert 400 <= found.status_code < 500 and "<img" not in found.text
    finally:
        site.pool.rgpu("uncordon", "node-b")


def test_everybody_has_the_rights_of_the_own_key(site: Site) -> None:
    user, operator, mallory = site.user(), site.operator(), site.mallory()
    assert "heat" in user.page("/sessions") and "heat" in operator.page("/sessions")
    for path in ("/sessions", "/sessions?all=1&user=user", "/queue", "/history", "/"):
        assert "heat" not in mallory.page(path), path
    for path in ("/session?name=heat", "/history?session=heat"):
        assert "belongs to user" in mallory.page(path, 403)
    for act, fields in (("kill", {}), ("checkpoint", {}), ("migrate", {"host": "node-b", "mode": "auto"})):
        assert mallory.do(act, session="heat", **fields).status_code == 303
        assert "belongs to user" in eventually(lambda: next(
            (text for text in [mallory.page("/jobs")] if "running" not in text), ""))
    for browser in (user, mallory):
        assert "for operators" in browser.page("/plan", 403)
        for act in ("cordon", "drain", "uncordon"):
            assert browser.do(act, host="node-b").status_code == 403
            browser.page(f"/confirm?act={act}&host=node-b", 403)
        assert browser.do("apply", plan="x").status_code == 403
    assert site.runs() and site.pool.node("node-b")["state"] == "ready"
    audit = [json.loads(line) for line in
             (site.pool.folder / "pool" / "nodes" / "node-a" / "audit.jsonl").read_text().splitlines()]
    refused = [line for line in audit if line["name"] == "mallory" and line["outcome"] == "not_permitted"]
    assert {"session.kill", "session.checkpoint", "session.migrate"} <= {line["verb"] for line in refused}
    assert {line["via"] for line in refused} == {"web-node-a"}


def test_a_gang_is_seen_and_ended_by_its_user_only(site: Site) -> None:
    program = site.pool.run("sleep", "600", name="pair", options=("--ranks", "2", "--memory", "64MiB"))
    try:
        eventually(lambda: "pair.1" in site.user().page("/gangs"), "it is not shown")
        eventually(lambda: "no process yet" in site.operator().page("/gangs?all=1"), "its workers say nothing")
        mallory, folder = site.mallory(), str(folder_of(site.pool, "mallory"))
        assert "pair" not in mallory.page("/gangs") + mallory.page("/history")
        assert site.pool.rgpu("ps", "--gangs", "--pool", folder) == []
        for verb in ("describe", "kill"):
            with pytest.raises(VerbError, match="pair belongs to user"):
                site.pool.rgpu(verb, "pair", "--pool", folder)
        assert "gang_form" in site.user().page("/history?session=pair")
    finally:
        site.pool.rgpu("kill", "pair")
    assert not [row for row in site.pool.rgpu("ps") if row["gang"] == "pair"]
    program.stop()


def test_forms_need_their_logins_token(site: Site) -> None:
    user, other = site.user(), site.user()
    token = user.csrf()
    for sent in ({"csrf": ""}, {"csrf": "x"}, {"csrf": other.csrf()}, {}):
        found = user.send("/do", act="kill", session="heat", **sent)
        assert found.status_code == 403 and "not of this login" in found.text
    for origin in (None, "null", "https://evil.example", user.base + "1"):
        assert user.send("/do", origin=origin, act="kill", session="heat", csrf=token).status_code == 403
    assert user.client.get(f"/do?act=kill&session=heat&csrf={token}").status_code == 405
    assert user.client.post("/do", json={"act": "kill", "session": "heat", "csrf": token},
                            headers={"origin": user.base}).status_code == 415
    assert user.client.post("/do", content=b"a=" + b"b" * 20_000, headers={
        "origin": user.base, "content-type": "application/x-www-form-urlencoded"}).status_code == 413
    assert user.send("/logout", csrf="x").status_code == 403 and "heat" in user.page("/sessions")
    for fields in ({"act": "kill"}, {"act": "migrate", "session": "heat", "host": "node-b", "mode": "by magic"}):
        assert user.send("/do", csrf=token, **fields).status_code == 400
    assert user.send("/do", csrf=token, act="none").status_code == 404
    assert site.runs()


def test_a_session_is_checkpointed_and_moved(site: Site) -> None:
    user = site.user()
    assert "Move session heat to node-b" in user.page("/confirm?act=migrate&session=heat&host=node-b&mode=copy")
    assert user.do("checkpoint", session="heat").headers["location"] == "/session?name=heat"
    eventually(lambda: "Checkpoint</b> heat: done" in user.page("/jobs"), "no checkpoint")
    source = site.pool.session("heat")["host"]
    other = "node-b" if source == "node-a" else "node-a"
    user.do("migrate", session="heat", host=other, mode="copy")
    eventually(lambda: "Move</b> heat: done" in user.page("/jobs"), "no move")
    assert site.pool.session("heat")["host"] == other and site.runs()
    page = user.page("/session?name=heat")
    assert "<b>commit</b>" in page and "by user" in page and "<dd>heat-e1-p" in page, page
    user.do("migrate", session="heat", host=other, mode="auto")
    eventually(lambda: "Move</b> heat: failed" in user.page("/jobs"), "a move to where it is")
    assert "polyline" in eventually(lambda: next((text for text in [user.page("/session?name=heat")]
                                                  if "The last hour" in text and "polyline" in text), ""))


def test_an_operator_empties_a_host(site: Site) -> None:
    operator = site.operator()
    operator.do("drain", host="node-b")
    eventually(lambda: site.pool.node("node-b")["state"] == "cordoned", "node-b was not drained")
    assert site.pool.session("heat")["host"] == "node-a" and site.runs()
    assert "Uncordon" in operator.page("/") and "drained" in operator.page("/history?host=node-b")
    operator.do("uncordon", host="node-b")
    eventually(lambda: site.pool.node("node-b")["state"] == "ready")
    assert "Plan anew" in operator.page("/plan")
    operator.do("apply", plan="of another day")
    assert "the plan has changed" in eventually(lambda: next(
        (text for text in [operator.page("/jobs")] if "Approve</b> the pool: failed" in text), ""))


def test_a_login_ends(site: Site) -> None:
    """By its button, and with its key."""
    user, mallory = site.user(), site.mallory()
    kept = dict(user.client.cookies)
    assert user.send("/logout", csrf=user.csrf()).headers["location"] == "/login"
    user.client.cookies.update(kept)
    assert user.client.get("/").status_code == 303
    mallory.page("/sessions")
    site.pool.rgpu("keys", "revoke", "mallory")
    eventually(lambda: mallory.client.get("/sessions").headers.get("location") == "/login",
               "a revoked key's login lasts", within=5)  # an answer serves a login for 0.7 s


def test_the_page_comes_back_and_ends_with_its_daemon(site: Site) -> None:
    """Last: it ends node-a's daemon."""
    user, pid = site.user(), site.pool.node("node-a")["pid"]
    (server,) = site.server(pid)
    os.kill(server, signal.SIGKILL)
    eventually(lambda: site.server(pid) not in ([], [server]), "it is not started again")
    assert eventually(lambda: _status(user, "/")) == 303, "logins of the process that died are over"
    assert "heat" in site.user().page("/sessions")
    (server,) = site.server(pid)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{server}").exists() or server not in site.server(0), "it outlives its daemon")


def _status(browser: Browser, path: str) -> int:
    try:
        return browser.client.get(path).status_code
    except httpx.TransportError:
        return 0


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path) -> None:
    with LocalPool(tmp_path, nodes=1) as pool:
        with pytest.raises(VerbError) as caught:
            pool.rgpu("web", "login")
        assert caught.value.code == Refused.exit_code and "--web HOST:PORT" in caught.value.text
        with pytest.raises(VerbError) as caught:
            pool.rgpu("web", "login", "--host", "node-a")
        assert caught.value.code == Refused.exit_code and "node-a serves no web page" in caught.value.text
        for options, said in ((("--web", "nowhere"), "no HOST:PORT"), (("--web-url", "https://x"), "--web HOST:PORT"),
                              (("--web", "127.0.0.1:0", "--web-url", "ftp://x"), "https://HOST")):
            done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "server", "--host", "node-x", *options],
                                  env=pool.environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == UsageError.exit_code and said in done.stderr, done.stderr
        taken = pool.living()[0]["address"].rpartition(":")[2]
        done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "server", "--host", "node-x", "--web",
                               f"127.0.0.1:{taken}"], env=pool.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode and "--web cannot listen" in done.stderr, done.stderr
