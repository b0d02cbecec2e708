"""The control link: both ends under one name. It knows verbs and keys, and no session."""

from rgpu.link.control.control_client import AsyncControlClient, ControlClient
from rgpu.link.control.control_server import CommandLog, ControlServer, Handler, Request, actor_of

__all__ = ["AsyncControlClient", "CommandLog", "ControlClient", "ControlServer", "Handler", "Request",
           "actor_of"]
