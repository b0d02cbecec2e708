"""Fixtures of tests with a whole agent."""

from __future__ import annotations

from tests.support.agent.running import agent, complaints, pool  # noqa: F401
