"""The hot calls: those that a device's native engine decodes and applies by itself.

They change only memory contents and order, so
:class:`~rgpu.session.objects.live.LiveObjects` need not handle them; this is checked
here, once, at import. Every other call is passed to the executor as a whole record.
"""

from __future__ import annotations

from rgpu.session.calls.wire import BY_NAME, Call, Effect

HOT: tuple[Call, ...] = tuple(BY_NAME[name] for name in (
    "completed", "context_synchronize", "memset", "memcpy_h2d", "memcpy_d2h", "memcpy_d2d", "memcpy2d_h2d",
    "memcpy2d_d2h", "memcpy2d_d2d", "launch", "stream_synchronize", "stream_wait_event", "event_record",
    "event_synchronize", "graph_launch",
))
assert all(call.effect in (Effect.NONE, Effect.WRITES) and not call.reply for call in HOT)
