"""The web page of a node: hosts, sessions, queue, history and moves in a browser, rendered on the server.

A process of its own (``python -m rgpu.web``), started and ended by the daemon. It holds no key of a user: each request
to the daemon carries the grant of the user who is logged in, and has the rights of that
user's key (:mod:`rgpu.link.control.grants`).
"""

import rgpu.link.logging  # noqa: F401 - before any module here imports structlog
