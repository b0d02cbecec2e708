"""Splits PTX text into tokens."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from rgpu.server.device.cpu.ptx.errors import PtxError


class Token(NamedTuple):
    """``kind`` is one of word, directive, int, float, string, punct, end."""

    kind: str
    text: str
    line: int


# An unclosed comment extends to the end: otherwise each `/*` would be searched for its end anew, up to there.
_COMMENT = re.compile(r"//[^\n]*|/\*(?:.*?\*/|.*)", re.S)
_MOST_DIGITS = 200
_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<float>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
      | (?P<int>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
      | (?P<word>[%$_A-Za-z][\w$]*(?:(?:\.|::)\w+)*)
      | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<punct>[][{}(),;:|!@+\-<>=])
    """,
    re.X,
)


def tokenize(text: str) -> list[Token]:
    """Return all tokens of ``text``, comments dropped, ended by an ``end`` token."""
    # The newlines of a comment stay, so that lines keep their numbers.
    text = _COMMENT.sub(lambda m: " " + "\n" * m.group().count("\n"), text)
    tokens, line, at = [], 1, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise PtxError(f"unexpected character {text[at]!r}", line)
        kind = match.lastgroup or ""
        if kind != "space":
            tokens.append(Token(kind, match.group(), line))
        line += match.group().count("\n")
        at = match.end()
    tokens.append(Token("end", "end of file", line))
    return tokens


def int_value(text: str) -> int:
    """Return the value of an integer literal. Raises ``PtxError`` for digits of another base, and too many."""
    text = text.rstrip("U")
    if len(text) > _MOST_DIGITS:
        raise PtxError(f"an integer of {len(text)} digits")
    try:
        if text[:2].lower() in ("0x", "0b"):
            return int(text, 0)
        return int(text, 8) if len(text) > 1 and text[0] == "0" else int(text)
    except ValueError:
        raise PtxError(f"{text} is no integer") from None


def float_value(text: str) -> float:
    """Return the value of a float literal (``0f`` and ``0d`` carry the bits). Raises ``PtxError``."""
    prefix = text[:2].lower()
    try:
        if prefix == "0f":
            return struct.unpack("<f", struct.pack("<I", int(text[2:], 16)))[0]
        if prefix == "0d":
            return struct.unpack("<d", struct.pack("<Q", int(text[2:], 16)))[0]
        return float(text)
    except (ValueError, struct.error):
        raise PtxError(f"{text[:80]} is no number") from None
