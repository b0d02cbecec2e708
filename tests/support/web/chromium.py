"""Debian's Chromium, driven by Playwright, where both are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

#: RGPU_CHROMIUM names another one.
CHROMIUM = os.environ.get("RGPU_CHROMIUM") or shutil.which("chromium") or ""
MISSING = " and ".join(filter(None, [
    "" if CHROMIUM else "no chromium is installed (Debian: apt-get install chromium; RGPU_CHROMIUM names one)",
    "" if importlib.util.find_spec("playwright") else "playwright is missing (in the extra test)"]))
needs_chromium = pytest.mark.skipif(bool(MISSING), reason=MISSING or "all there")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright's synchronous API."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--disable-gpu", "--disable-dev-shm-usage",
                                            *(["--no-sandbox"] if os.getuid() == 0 else [])])
        try:
            yield browser
        finally:
            browser.close()
