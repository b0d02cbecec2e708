"""Fixtures of the cases; what needs the fake driver is imported only where it is the driver."""

from __future__ import annotations

import os

if os.environ.get("RGPU_ENGINE_DIR"):
    from tests.support.fake_driver.support import device, journal  # noqa: F401
