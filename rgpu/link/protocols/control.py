"""The control link: requests to nodes over ZeroMQ, and their answers. The verbs are in
:mod:`rgpu.link.control.verbs`."""

from __future__ import annotations

from rgpu.link.protocols.table import Form, Protocol, Way, message

TO, BACK, MAP = Way.TO, Way.BACK, Form.MAP

_INTRO = """Command lines, agents and nodes call nodes over ZeroMQ with CURVE. A message is one frame of msgpack, a map
of 16 MiB at most (requests: less, see the limits);
its kind follows from its keys. The version is the `control` number that both sides show
each other.
"""

CONTROL = Protocol(
    name="control", title="The control link", ends=("caller", "node"), version=1, intro=_INTRO,
    messages=(
        message(0, "REQUEST", TO, "Calls a verb of the table below.",
                "str id: drawn by the caller, repeated in each "
                "answer", "str verb", "dict[str, Any] args = {}",
                "int leader = 0: leader revision, 0 when none is claimed",
                "int epoch = 0: of the session, 0 when none is claimed",
                "str command = \"\": id of a command; a repeated one is answered, not done again",
                "str grant = \"\": of a login on the node's web page; only that page sends it", form=MAP,
                struct="Request"),
        message(0, "PROGRESS", BACK, "Progress; restarts the caller's timeout, any number of times.", "str id",
                "dict progress", form=MAP),
        message(0, "REPLY", BACK, "The result.", "str id", "bool ok: true", "Any result", form=MAP),
        message(0, "REFUSAL", BACK, "An error.", "str id", "bool ok: false", "str error: code (docs/users/errors.md)",
                "str message", "dict detail?", form=MAP),
    ))
