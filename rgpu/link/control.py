"""The control link: both ends under one name."""

from rgpu.link.control_client import AsyncControlClient, ControlClient
from rgpu.link.control_server import CommandLog, ControlServer, Handler, Request

__all__ = ["AsyncControlClient", "CommandLog", "ControlClient", "ControlServer", "Handler", "Request"]
