"""Text of strangers: nothing of it reaches a terminal as something to obey."""

from __future__ import annotations

import unicodedata

from rgpu.session.printable import printable


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert printable("\x1b]0;owned\x07") == "\\x1b]0;owned\\x07"
    assert printable("\x9b31m") == "\\x9b31m" and printable("a\u202eb") == "a\\u202eb"
    assert printable("a\nb\tc\r\x08") == "a\\nb\\tc\\r\\x08" and printable("a\nb\tc", keep="\n\t") == "a\nb\tc"
    assert printable("\udc80") == "\\udc80"


def test_plain_text_of_any_language_stays() -> None:
    for text in ("", "training run 3", "обучение", "訓練", "naïve café", "[red]not markup[/red]", "100 % – “ok”"):
        assert printable(text) == text


def test_no_character_that_controls_anything_passes() -> None:
    for number in range(0x110000):
        shown = printable(chr(number))
        assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown), hex(number)
