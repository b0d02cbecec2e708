"""Run unittest modules and write what became of each test to a file, one JSON object a line.

    python unittest_lines.py OUT MODULE...

``{"planned": [id, …]}`` comes first, then ``{"id", "outcome", "reason", "trace"}`` as each test ends, so that what was
begun is known even where the process dies. Outcomes: passed, failed, error, skipped.
"""

from __future__ import annotations

import json
import sys
import traceback
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


def main() -> None:
    path, *modules = sys.argv[1:]
    with open(path, "w") as out:
        result = Lines(out)
        try:
            suite = unittest.defaultTestLoader.loadTestsFromNames(modules)
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
