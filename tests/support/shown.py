"""What several verbs print one after the other in one process: each stands behind a line with its name.

``python -m tests.support.shown JSON``: a list of {name, verb, environment} and of {name, show: MODULE:FUNCTION, value}:
what a verb prints of a value, where the value itself differs from run to run (ports, processes, times).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from typing import Any


def main() -> int:
    """Print them; the exit status is 1 if one of them failed."""
    from rgpu.cli.main import main as rgpu

    failed = False
    for one in json.loads(sys.argv[1]):
        print(f"== {one['name']}", flush=True)
        if "show" in one:
            module, _, function = one["show"].partition(":")
            getattr(importlib.import_module(module), function)(one["value"])
            continue
        environment = one.get("environment")
        if environment is not None:
            for name in [name for name in os.environ if name.startswith(("RGPU_", "XDG_"))]:
                del os.environ[name]
            os.environ.update(environment)
        sys.argv = ["rgpu", *one["verb"]]
        try:
            rgpu()
        except SystemExit as end:
            failed |= bool(end.code)
    return failed


def pieces(text: str) -> dict[str, str]:
    """Return what each printed, without colours, by name; ``bold`` headings are not told apart."""
    found: dict[str, Any] = {}
    for part in re.sub(r"\033\[[0-9;]*m", "", text).split("== ")[1:]:
        name, _, printed = part.partition("\n")
        found[name] = printed
    return found


if __name__ == "__main__":
    sys.exit(main())
