"""Generated files, and the numbers that the driver library gives its functions."""

from __future__ import annotations

import re
from pathlib import Path

from rgpu.client.cupti import generate

SOURCES = Path(generate.__file__).parent
SHIM = SOURCES.parent / "shim"
PROFILED = re.compile(r'^CUresult (\w+)\([^{]*\{\s*RGPU_PROFILED\((\d+), "(\w+)"', re.MULTILINE)


def test_generated_files_are_current() -> None:
    assert generate.stale() == [], "run python -m rgpu.client.cupti.generate"


def test_names_are_in_order_and_what_is_written_is_exported() -> None:
    names = generate.symbols()
    assert names == sorted(set(names), key=names.index) and len(names) > 200
    assert generate.written() <= set(names)


def test_driver_functions_have_their_own_numbers() -> None:
    """Each names itself, by the number that cupti_driver_cbid.h gives it."""
    rows = (line.split() for line in (SOURCES / "callbacks.txt").read_text().splitlines())
    numbers = {name: int(number) for domain, number, name in rows if domain == "driver"}
    found = [match.groups() for path in sorted(SHIM.glob("*/*.cpp")) for match in PROFILED.finditer(path.read_text())]
    assert len(found) > 60
    assert [(function, name, number) for function, number, name in found
            if function != name or numbers.get(name) != int(number)] == []


def test_every_way_out_of_a_driver_function_tells_its_result() -> None:
    bare = []
    for path in sorted(SHIM.glob("*/*.cpp")):
        inside = in_lambda = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            inside = not line.startswith("}") and (inside or "RGPU_PROFILED(" in line)
            in_lambda = inside and not line.strip().startswith("})") and (
                in_lambda or re.search(r"\]\([^()]*\) {$", line) is not None)
            if inside and not in_lambda and re.search(r"\breturn\b(?! api_\.leave\()", line):
                bare.append(f"{path.name}:{number}: {line.strip()}")
    assert bare == []
