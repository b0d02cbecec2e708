"""Text of strangers on its way to a terminal: reasons, names, command lines, logs, errors of others."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    r"""Return the text with what a terminal would obey, or hide behind, written out: ``\x1b`` for an escape.

    That is every character which is not printable: control characters, C1 among them, marks that change the direction
    of writing, zero-width ones, line and paragraph separators, lone surrogates. ``keep``: control characters that stay,
    a line feed for text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
