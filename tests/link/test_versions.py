"""N works with N and with N-1, and a refusal names both sides."""

from __future__ import annotations

from typing import Any

import pytest

from rgpu.link import versions
from rgpu.session.errors import VersionMismatch


def told(control: Any, data: Any, package: Any = "9.9.9") -> dict[str, Any]:
    return {"package": package, "control": control, "data": data}


@pytest.mark.parametrize(("mine", "theirs", "fit"), [(1, 1, True), (2, 1, True), (1, 2, True), (3, 1, False),
                                                     (1, 3, False), (5, 5, True)])
def test_the_rule(monkeypatch: pytest.MonkeyPatch, mine: int, theirs: int, fit: bool) -> None:
    monkeypatch.setattr(versions, "CONTROL", mine)
    monkeypatch.setattr(versions, "DATA", mine)
    assert versions.fits(theirs, mine) is fit
    for other in (told(theirs, mine), told(mine, theirs)):
        if fit:
            versions.check(other, "the node")
            continue
        with pytest.raises(VersionMismatch) as caught:
            versions.check(other, "the node")
        assert "the node" in caught.value.message and "9.9.9" in caught.value.message
        assert versions.ours()["package"] in caught.value.message


def test_who_says_nothing_is_of_the_first_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check(None, "the node")
    monkeypatch.setattr(versions, "DATA", 3)
    with pytest.raises(VersionMismatch, match="0.1.0 or older"):
        versions.check(None, "the node")


@pytest.mark.parametrize("odd", [told("1", 1), told(True, 1), told(1, None), {}, told(1, 2**80),
                                 told(1, -5, package="x" * 10_000)])
def test_what_is_no_version_is_refused(odd: Any) -> None:
    with pytest.raises(VersionMismatch) as caught:
        versions.check(odd, "the node")
    assert len(caught.value.message) < 500
