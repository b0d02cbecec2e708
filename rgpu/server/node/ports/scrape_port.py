"""The port that Prometheus scrapes: HTTP or HTTPS, with bounds on the number and duration of scrapes."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from rgpu.link.accepting import BACK_OFF, Next, after
from rgpu.server.node.ports.scrape_guard import Renewed, ScrapeOptions, behind_token, certificate, token
from rgpu.session.errors import LinkError

SCRAPES = 8  #: connections served at once; further ones are turned away
SCRAPE_TIMEOUT = 5.0  #: s for a peer to send its request, and to take each part of the answer


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Keep scrapes out of the log."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], tls: Renewed[ssl.SSLContext] | None) -> None:
        self._tls = tls
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._free = threading.BoundedSemaphore(SCRAPES)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without a name service look-up of this host."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """The next connection; after an OSError the caller continues at once."""
        try:
            return super().get_request()
        except OSError as error:
            if after(error.errno) is Next.WAIT:
                time.sleep(BACK_OFF)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether one more scrape may be served."""
        return self._free.acquire(blocking=False)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer one connection, in its own thread, so that a slow TLS handshake does not delay other peers."""
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(SCRAPE_TIMEOUT)
        with self._tls.value().wrap_socket(request, server_side=True) as sealed:
            super().finish_request(sealed, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing for a peer that disconnected."""


class ScrapePort:
    """Serves a registry of metrics from a thread of its own, from the beginning until :meth:`close`."""

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry,
                 guard: ScrapeOptions | None = None) -> None:
        """``guard``: TLS and token. Raises :class:`LinkError` where the port is taken, and what reading the files
        raises (:mod:`.scrape_guard`)."""
        guard = guard or ScrapeOptions()
        app = make_wsgi_app(registry)
        if guard.token_file is not None:
            app = behind_token(app, token(guard.token_file))
        tls = certificate(guard.cert, guard.key) if guard.cert is not None and guard.key is not None else None
        try:
            self._server = _Server(address, tls)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise LinkError(f"--metrics cannot listen on {where}: {error}", address=where) from error
        self._server.set_app(app)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port; scrapes under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
