"""A session of `make chaos` whose run no node answers is started again; any other end is its end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from bench.chaos import table
from bench.chaos.session import HUNG, SAME, STARTS, Case, SessionRun
from rgpu.session.errors import PoolUnavailable


def ended(code: int, marks: int = 0) -> Any:
    return SimpleNamespace(alive=False, marks=["step"] * marks, wait=lambda seconds: code)


def begun(*programs: Any) -> int:
    """Return how many of the programs were started."""
    run, left = object.__new__(SessionRun), list(programs)
    run.case, run.over = SimpleNamespace(verdict=""), threading.Event()  # type: ignore[assignment]
    run._start = lambda: setattr(run, "program", left.pop(0))  # type: ignore[method-assign]
    run._start()
    run._begin()
    return len(programs) - len(left)


UNANSWERED = PoolUnavailable.exit_code


@pytest.mark.parametrize("programs, started", [
    ([ended(UNANSWERED), ended(UNANSWERED), ended(0, 3), ended(0)], 3),
    ([ended(1), ended(0)], 1),
    ([ended(UNANSWERED, 5), ended(0)], 1),  # it had begun: that is its end
    ([ended(UNANSWERED)] * (STARTS + 3), STARTS)])
def test_only_a_run_that_no_node_answers_is_started_again(programs: list[Any], started: int) -> None:
    assert begun(*programs) == started


def test_a_session_whose_worker_applies_calls_is_not_hung() -> None:
    """A replay: the program's own count stands still, what the worker has applied does not."""
    run, rows = object.__new__(SessionRun), [{"state": "running", "epoch": 4, "calls": 900, "applied": applied}
                                             for applied in (10, 20, 20)]
    run.name, run._applied, run._standing, run._got_on = "s", None, (4, "running"), 0.0
    run.limits = SimpleNamespace(patience=60.0)  # type: ignore[assignment]
    run.program = SimpleNamespace(last=0.0)  # type: ignore[assignment]
    run.pool = SimpleNamespace(row=lambda name: rows.pop(0))  # type: ignore[assignment]
    assert [run._gets_on(1000.0), run._gets_on(1060.0), run._gets_on(1120.0)] == [True, True, False]


def test_why_a_chaos_is_no_success() -> None:
    same, hung = Case(SimpleNamespace(), SAME), Case(SimpleNamespace(), HUNG)  # type: ignore[arg-type]
    assert not table.why_not([same, same], {})
    assert table.why_not([], {}) == "no session ran"
    assert table.why_not([same, hung], {"jax": "no JAX"}) == "1 of 2 sessions HUNG; not run: jax: no JAX"
