"""Versions of rgpu that work together: the numbers that two sides show each other, and the rule.

Two numbers count, each raised by one when the content of its link changes:
``control`` (verbs and their arguments) and ``data`` (frames, messages and
journal records). A side works with its own number and the one before it, on
either link. The package's version decides nothing; users know it, so a
refusal names both.
"""

from __future__ import annotations

from typing import Any

from rgpu import __version__
from rgpu.link.messages import control, data
from rgpu.session.errors import VersionMismatch

CONTROL = control.VERSION
DATA = data.VERSION
#: Versions of a side that sends none: programs from before the numbers were exchanged.
FIRST = {"package": "0.1.0 or older", "control": 1, "data": 1}


def ours() -> dict[str, Any]:
    """Return the versions that this side sends to the other."""
    return {"package": __version__, "control": CONTROL, "data": DATA}


def fits(theirs: int, mine: int) -> bool:
    """Return whether two numbers work together: N with N and with N-1, whichever side is the older."""
    return abs(theirs - mine) <= 1


def check(theirs: Any, who: str) -> None:
    """Check the other side's versions, ``theirs``; None: it sent none. ``who``: its name in the message.

    Raises :class:`VersionMismatch` naming the versions of both.
    """
    said = theirs if isinstance(theirs, dict) else FIRST
    mine = ours()
    for link in ("control", "data"):
        number = said.get(link)
        if type(number) is not int or not fits(number, mine[link]):
            raise VersionMismatch(
                f"{who} is rgpu {_shown(said)}, this side is rgpu {_shown(mine)}: their {link} protocols do not fit; "
                "install the same version on both", theirs=_plain(said), ours=mine, link=link)


def data_of(theirs: Any) -> int:
    """Return the data protocol of the other side, which was checked."""
    said: dict[str, Any] = theirs if isinstance(theirs, dict) else FIRST
    return int(said["data"])


def _shown(versions: dict[str, Any]) -> str:
    plain = _plain(versions)
    return f"{plain['package']} (control {plain['control']}, data {plain['data']})"


def _plain(versions: dict[str, Any]) -> dict[str, str]:
    """Untrusted versions, shortened for a message."""
    return {key: str(versions.get(key, "?"))[:40] for key in ("package", "control", "data")}
