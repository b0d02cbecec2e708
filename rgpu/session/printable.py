"""Escaping of untrusted text for a terminal: reasons, names, command lines, logs, errors of other processes."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    r"""Return the text with every character that is not printable escaped: ``\x1b`` for an escape.

    These are control characters, C1 among them, marks that change the direction of writing, zero-width ones, line and
    paragraph separators, lone surrogates. ``keep``: control characters that stay, as a line feed in text of several
    lines.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
