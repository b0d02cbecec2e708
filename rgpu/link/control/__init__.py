"""The control link: client and server. It handles verbs and keys, not sessions.

Both ends are imported when they are first used: a client needs neither the server's modules nor asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rgpu.link.control.async_client import AsyncControlClient
    from rgpu.link.control.control_client import ControlClient
    from rgpu.link.control.control_server import CommandLog, ControlServer, Handler, Request, actor_of

__all__ = ["AsyncControlClient", "CommandLog", "ControlClient", "ControlServer", "Handler", "Request",
           "actor_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = {"AsyncControlClient": "async_client", "ControlClient": "control_client"}.get(name, "control_server")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value
