"""Parsing a control message without building larger objects than its sender may cause. Pure.

The fields around ``args`` are few and short; ``args`` stays packed until the sender and the size are known.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from rgpu.link.messages.control import Request as Message
from rgpu.session.errors import Corrupt, LimitReached

#: Bytes of one message of a user or an operator …
SHORT = 64 * 1024
#: … and of one that carries a piece of an archive (4 MiB of it), or that nodes send each other.
LONG = 4 * 1024 * 1024 + SHORT
#: Verbs of users whose messages may be long.
CARRIES = frozenset({"image.import"})
#: A long message contains its id and verb within so many bytes.
HEAD = 256

_ID = re.compile(rb"\xa2id(?:[\xa1-\xbf]|\xd9.)([0-9A-Za-z_.-]{1,64})", re.DOTALL)
_VERB = re.compile(rb"\xa4verb[\xa1-\xbf]([a-z_.]{1,31})")


class _Envelope(msgspec.Struct):
    """A request whose arguments are still packed."""

    id: str
    verb: str
    args: msgspec.Raw = msgspec.Raw(b"\x80")
    leader: int = 0
    epoch: int = 0
    command: str = ""
    grant: str = ""


class _Piece(msgspec.Struct):
    """The arguments of a user's long message: no list and no map, of which a few bytes make large objects."""

    id: str = ""
    offset: int = 0
    data: bytes = b""
    end: bool = False
    name: str | None = None


_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_args = msgspec.msgpack.Decoder(dict[str, Any]).decode
_piece = msgspec.msgpack.Decoder(_Piece).decode


class Unreadable(Exception):
    """A message that is not accepted. ``id``: of the request, for the refusal; empty where it cannot be read."""

    def __init__(self, number: str, verb: str, error: Corrupt | LimitReached) -> None:
        super().__init__(error.message)
        self.id, self.verb, self.error = number, verb, error


def read(body: bytes | memoryview, role: str) -> Message:
    """Return the request in ``body``, from a key of that role. Raises :class:`Unreadable`."""
    number, verb = _said(body)
    if len(body) > LONG or len(body) > SHORT and role != "node" and verb not in CARRIES:
        raise Unreadable(number, verb, LimitReached(
            f"a message of {len(body)} bytes for {verb or 'no verb that can be read'}: {SHORT} are taken, {LONG} of "
            f"{', '.join(sorted(CARRIES))}", bytes=len(body), limit=SHORT))
    try:
        found = _envelope(body)
        long = len(body) > SHORT and role != "node"
        args = msgspec.structs.asdict(_piece(found.args)) if long else _args(found.args)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(number, verb, Corrupt(f"the message cannot be read: {error}", reason="msgpack")) from None
    if found.verb != verb and long:
        raise Unreadable(number, verb, Corrupt("a long message names its verb at its beginning", reason="verb"))
    return Message(found.id, found.verb, args, found.leader, found.epoch, found.command, found.grant)


def _said(body: bytes | memoryview) -> tuple[str, str]:
    """The id and the verb at the beginning of a message, as this package's clients write them; empty for none."""
    head = bytes(body[:HEAD])
    number, verb = _ID.search(head), _VERB.search(head)
    return number[1].decode() if number else "", verb[1].decode() if verb else ""
