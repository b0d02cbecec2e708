"""rgpu: live migration and checkpointing of remote GPU sessions.

The names of the Python API are imported when they are first used (``__init__.pyi`` declares them).
"""

__version__ = "0.1.0"

#: public name → the module that it comes from
_API = {
    "Pool": "rgpu.api.pool", "Run": "rgpu.api.running", "current": "rgpu.api.current", "Current": "rgpu.api.current",
    "AsyncPool": "rgpu.api.aio", "AsyncRun": "rgpu.api.aio",
    "DetachedRun": "rgpu.api.detached", "AsyncDetachedRun": "rgpu.api.detached",
    **dict.fromkeys(("Session", "Node", "Device", "Move", "MoveNotice", "Checkpoint", "Restored", "Event",
                     "DetachedStatus"),
                    "rgpu.api.rows"),
    **dict.fromkeys((
        "RgpuError", "UsageError", "NotFound", "AlreadyExists", "Refused", "PoolUnavailable", "AuthenticationFailed",
        "NotPermitted", "Corrupt", "VersionMismatch", "TimedOut", "MoveFailed", "RecoveryFailed", "LinkError",
        "Conflict", "Fenced", "StoreError", "StoreFull", "StoreDenied", "StoreUnreachable", "StoreMissing",
        "DeviceError", "UnknownOutcome", "LimitReached"), "rgpu.session.errors"),
}
__all__ = ["__version__", *_API]


def __getattr__(name: str):  # type: ignore[no-untyped-def]
    if name not in _API:
        raise AttributeError(f"module 'rgpu' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_API[name]), name)
    return value


def __dir__():  # type: ignore[no-untyped-def]
    return sorted({*globals(), *_API})
