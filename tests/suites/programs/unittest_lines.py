"""Run modules of tests and write what became of each test to a file, one JSON object a line.

    python unittest_lines.py OUT MODULE...

``{"planned": [id, …]}`` comes first, then ``{"id", "outcome", "reason", "trace"}`` as each test ends, so that what was
begun is known even where the process dies. Outcomes: passed, failed, error, skipped. Tests are unittest's, and plain
functions named ``test_…`` that need no fixture, as pytest finds them.
"""

from __future__ import annotations

import inspect
import json
import sys
import traceback
import types
import unittest
from collections.abc import Iterator
from typing import Any, TextIO


def is_skip(error: type[BaseException]) -> bool:
    """Whether a test or a module said with it, by pytest's importorskip, that it needs what is not there."""
    return error.__name__ == "Skipped" and error.__module__ in ("builtins", "_pytest.outcomes")  # pytest says builtins


class Lines(unittest.TestResult):
    """Write each outcome as a line when the test has ended."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self.out = out
        self.buffer = False
        self.found: tuple[str, str, str] | None = None

    def line(self, **fields: object) -> None:
        self.out.write(json.dumps(fields) + "\n")
        self.out.flush()

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().startTest(test)
        self.found = None
        print(f"--- {test.id()}", file=sys.stderr, flush=True)

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        outcome, reason, trace = self.found or ("passed", "", "")
        self.line(id=test.id(), outcome=outcome, reason=reason, trace=trace)
        super().stopTest(test)

    def keep(self, outcome: str, error: Any) -> None:
        if is_skip(error[0]):
            outcome = "skipped"
        if self.found is None or self.found[0] == "skipped":  # the first of several subtests that failed
            trace = "".join(traceback.format_exception(*error))
            self.found = outcome, "".join(traceback.format_exception_only(*error[:2])).strip(), trace

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self.keep("error", err)
        if not isinstance(test, unittest.TestCase) or not hasattr(test, "_testMethodName"):  # setUpClass, setUpModule
            self.line(id=test.id(), outcome="error", reason=self.found[1] if self.found else "", trace="")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self.keep("failed", err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.keep("failed" if issubclass(err[0], test.failureException) else "error", err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        if self.found is None:
            self.found = "skipped", reason, ""

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().addUnexpectedSuccess(test)
        self.found = "failed", "unexpected success", ""


def tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Give the tests of a suite of suites, in their order."""
    for part in suite:
        if isinstance(part, unittest.TestSuite):
            yield from tests(part)
        else:
            yield part


class Function(unittest.FunctionTestCase):
    """A plain function as a test, named as pytest names it."""

    def __init__(self, function: types.FunctionType) -> None:
        super().__init__(function)
        self._id = f"{function.__module__}.{function.__name__}"
        self._skips = [mark.kwargs.get("reason", "") for mark in getattr(function, "pytestmark", ())
                       if mark.name == "skip" or (mark.name == "skipif" and mark.args[0])]

    def setUp(self) -> None:  # noqa: N802 - unittest's name
        for reason in self._skips:
            self.skipTest(reason)

    def id(self) -> str:
        return self._id


def functions(module: types.ModuleType) -> Iterator[Function]:
    """Give the module's plain functions that are tests."""
    for name, value in vars(module).items():
        if name.startswith("test") and isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            wanted = [one for one in inspect.signature(value).parameters.values()
                      if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
            if not wanted:
                yield Function(value)


def main() -> None:
    path, *modules = sys.argv[1:]
    with open(path, "w") as out:
        result = Lines(out)
        try:
            suite = unittest.defaultTestLoader.loadTestsFromNames(modules)
            suite.addTests(test for name in modules if name in sys.modules for test in functions(sys.modules[name]))
        except BaseException as error:
            if not is_skip(type(error)):
                raise
            result.line(planned=[])
            result.line(id=" ".join(modules), outcome="skipped", reason=str(error), trace="")
            return
        result.line(planned=[test.id() for test in tests(suite)])
        suite.run(result)


if __name__ == "__main__":
    main()
