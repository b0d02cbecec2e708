"""What is refused before any page sees it, what is drawn, and what is kept: without a pool."""

from __future__ import annotations

import math

import pytest

from rgpu.web import charts, views
from rgpu.web.actions import ACTIONS, TABLE, digest
from rgpu.web.figures import EVERY_SECONDS, KEPT, MOST, Figures, Ring
from rgpu.web.guarding import LONGEST_FORM, Names, Rate, refusal
from rgpu.web.logins import Logins
from rgpu.web.rendering import Pages, link

NAMES = Names.of("https://gpu.example.org")
FORM = {"host": "gpu.example.org", "origin": "https://gpu.example.org", "content-length": "3",
        "content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(("host", "status"), [
    ("gpu.example.org", None), ("GPU.example.org:443", None), ("127.0.0.1:8080", None), ("[::1]:8080", None),
    ("localhost:9", None), ("evil.example", 421), ("gpu.example.org.evil.example", 421), ("", 421), ("[", 421),
    ("127.0.0.1.evil.example", 421)])
def test_only_names_of_this_page_are_answered(host: str, status: int | None) -> None:
    found = refusal("GET", {"host": host}, NAMES)
    assert (found and found[0]) == status


@pytest.mark.parametrize(("change", "status"), [
    ({}, None), ({"origin": "https://evil.example"}, 403), ({"origin": "null"}, 403), ({"origin": "http://["}, 403),
    ({"origin": "https://gpu.example.org.evil.example"}, 403), ({"origin": "javascript://gpu.example.org"}, 403),
    ({"content-type": "text/plain"}, 415), ({"content-type": "multipart/form-data; boundary=x"}, 415),
    ({"content-length": str(LONGEST_FORM + 1)}, 413), ({"content-length": ""}, 413), ({"content-length": "-1"}, 413),
    ({"host": "127.0.0.1:8080"}, None), ({"host": "127.0.0.1:8080", "origin": "http://127.0.0.1:8080"}, None),
    ({"host": "127.0.0.1:8080", "origin": "http://127.0.0.1:8081"}, 403)])
def test_forms_of_other_sites_are_refused(change: dict[str, str], status: int | None) -> None:
    found = refusal("POST", {**FORM, **change}, NAMES)
    assert (found and found[0]) == status
    missing = {name: value for name, value in FORM.items() if name != "origin"}
    assert refusal("POST", missing, NAMES) is not None and refusal("PUT", FORM, NAMES) == (405, "there are pages and "
                                                                                          "forms here")


def test_a_rate_holds_for_each_and_forgets() -> None:
    rate = Rate(2, 1.0, most=2)
    assert [rate.allows("a", 0.0) for _ in range(3)] == [True, True, False]
    assert rate.allows("b", 0.0) and rate.allows("a", 1.0) and not rate.allows("a", 1.0)
    rate.give_back("a")
    rate.give_back("nobody")
    assert rate.allows("a", 1.0)
    rate.allows("c", 1.0)
    assert rate.allows("b", 1.0)


def test_logins_end_and_their_forms_are_theirs() -> None:
    now = [0.0]
    logins = Logins(lambda: now[0])
    answer = {"grant": "g", "role": "user", "user": "u", "name": "n", "seconds": 10.0}
    (cookie, login), (_, other) = logins.add(answer), logins.add(answer)
    assert logins.find(cookie) is login and logins.find("") is logins.find(cookie + "x") is None
    assert login.genuine(login.csrf) and not login.genuine(other.csrf) and not login.genuine("")
    assert not login.genuine("\ud800") and login.csrf not in repr(login)
    now[0] = 10.0
    assert logins.find(cookie) is None and logins.living() == []


def test_what_is_drawn_and_written_cannot_be_taken_for_ours() -> None:
    evil = '"><script>alert(1)</script>'
    assert "<script" not in charts.bar((0.5, "used"), label=evil) and "&lt;script" in charts.bar(label=evil)
    assert "<script" not in charts.line([(0.0, 1.0), (5.0, 2.0)], evil, lambda value: evil, 5.0, 10.0)
    text = Pages("node-a").text("parts/trouble.html", message=evil + "\u202e\x1b")
    assert "<script" not in text and "&lt;script&gt;" in text and "\\u202e\\x1b" in text
    assert link("/session", name="a&b=<c>/2", page="") == "/session?name=a%26b%3D%3Cc%3E%2F2"


def test_a_chart_of_nothing_one_and_much() -> None:
    assert "nothing yet" in charts.line([], "Memory", str, 0.0, 3600.0)
    assert "polyline" not in charts.line([(1.0, 5.0)], "Memory", str, 1.0, 3600.0)
    many = charts.line([(float(n), float(n)) for n in range(5000)], "Memory", str, 5000.0, 5000.0)
    assert "polyline" in many and len(many) < 20_000


def test_rings_are_bounded() -> None:
    ring = Ring()
    for number in range(KEPT + 50):
        ring.add(number * EVERY_SECONDS, {"memory_bytes": number, "calls": number * 20, "gpu_share": None})
    ring.add(number * EVERY_SECONDS + 1, {"memory_bytes": -1})
    assert len(ring.times) == KEPT and ring.series("memory_bytes")[-1][1] == KEPT + 49
    assert ring.series("gpu_share") == [] and {value for _, value in ring.series("calls")} == {2.0}
    assert not any(math.isnan(value) for _, value in ring.series("journal_bytes"))
    figures = Figures()
    figures.add(1.0, [{"session": f"s{n}", "created": 1.0} for n in range(MOST + 5)] + [
        {"session": "q", "state": "queued", "created": 1.0}])
    assert figures.of({"session": "s0", "created": 1.0}) is None
    assert figures.of({"session": f"s{MOST}", "created": 1.0}) is not None
    assert figures.of({"session": f"s{MOST}", "created": 2.0}) is None, "another session of that name"


def test_pages_of_rows() -> None:
    rows = [{"session": f"s{n:04}"} for n in range(101)]
    for number, expected in (("1", 1), ("3", 3), ("99", 3), ("0", 1), ("-1", 1), ("x", 1), ("9" * 400, 1)):
        assert views.piece(rows, number).number == expected
    assert views.piece([], "1").pages == 1


def test_the_phases_of_a_move() -> None:
    assert views.steps(None, {}) == []
    copying = dict(views.steps({"state": "preparing"}, {"phase": "copying", "mode": "copy"}))
    assert copying["preparing"] == "done" and copying["copying"] == "now" and copying["committed"] == "later"
    assert "replaying" not in copying
    replaying = dict(views.steps({"state": "preparing"}, {"phase": "replaying", "mode": "replay"}))
    assert replaying["cut"] == "done" and replaying["replaying"] == "now"
    assert dict(views.steps({"state": "committed"}, {"phase": "stopped"}))["committed"] == "now"
    assert views.steps({"state": "aborted"}, {}) == [("aborted", "now")]


def test_the_table_of_actions() -> None:
    from rgpu.link.control.verbs import VERBS

    for action in TABLE:
        verb = VERBS[action.verb]
        assert verb.web and verb.changes and action.operator == ("user" not in verb.roles), action.name
        values = dict.fromkeys(action.fields, "auto")
        assert action.question(values).endswith(("?", ".")) and action.request(values)
    assert ACTIONS["kill"].harm
    plan = {"moves": [{"session": "a", "from": "x", "to": "y", "device": "cpu:0", "gain": 1}]}
    assert digest(plan) == digest({"moves": [{**plan["moves"][0], "gain": 2}]}) != digest({"moves": []})
