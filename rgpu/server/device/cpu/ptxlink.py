"""Linking (cuLink*) of PTX: several modules become one PTX text.

A PTX module is a header and top-level items (variables, functions, entries).
Linking keeps one header (the newest version and target of the inputs), drops
``.extern`` declarations that another input defines and second copies of
``.weak`` items, and puts variables and functions before the entries that use
them. Symbols defined twice are an error, as for a real linker; symbols local
to a module are renamed where two modules have them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rgpu.session.errors import DeviceError

INVALID_PTX = 218

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)  # strings first: they may hold comment marks
_HEADER = re.compile(r"\s*\.(version|target|address_size)\b([^\n;{}]*)")
_PRAGMA_LINE = re.compile(r"\s*\.(file|loc)\b[^\n]*\n?")
_SECTION = re.compile(r"\s*\.section\b[^{]*\{[^}]*\}")
_MARKS = re.compile(r'"[^"]*"|[={};]')  # a string is one mark, so that its contents do not count
_CALLABLE = re.compile(r"\.(entry|func)\b\s*(?:\(.*?\)\s*)?([\w$%.]+)", re.S)
_VARIABLE = re.compile(r"\.(global|const|shared)\b.*?([A-Za-z_$%][\w$]*)\s*(?:\[[^\]]*\]\s*)*(?:=|;|$)", re.S)


@dataclass(frozen=True, slots=True)
class Item:
    """A top-level item of a module."""

    text: str
    kind: str  #: "entry", "func", "variable" or "other"
    name: str
    defined: bool  #: False: a declaration or a prototype
    linkage: str  #: "extern", "visible", "weak" or "" (local to its module)


@dataclass(frozen=True, slots=True)
class Parsed:
    """One PTX text, cut into its items."""

    name: str
    version: tuple[int, int]
    target: str
    items: tuple[Item, ...]


def _mask_comments(text: str) -> str:
    """Replace comments by spaces of the same length, so that line numbers stay."""
    return _COMMENT.sub(lambda m: m.group() if m.group()[0] == '"' else re.sub(r"[^\n]", " ", m.group()), text)


def _split(text: str) -> list[str]:
    """Return the top-level pieces: each ends at ``;`` outside braces or at the ``}`` that closes its body."""
    pieces, start, depth = [], 0, 0
    initialiser = False
    for mark in _MARKS.finditer(text):
        i, char = mark.start(), mark.group()[0]
        if char == "=" and depth == 0:
            initialiser = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0 and not initialiser:
                pieces.append(text[start:i + 1])
                start = i + 1
        elif char == ";" and depth == 0:
            pieces.append(text[start:i + 1])
            start, initialiser = i + 1, False
    if text[start:].strip():
        pieces.append(text[start:])
    return [piece for piece in pieces if piece.strip(" \t\r\n;")]


def _classify(piece: str) -> Item:
    head = piece.split("{", 1)[0]
    linkage = next((word for word in ("extern", "visible", "weak", "common") if re.search(rf"\.{word}\b", head)), "")
    if match := _CALLABLE.search(head):
        return Item(piece, match[1], match[2], "{" in piece, linkage)
    if match := _VARIABLE.search(head):
        return Item(piece, "variable", match[2], linkage != "extern", linkage)
    return Item(piece, "other", "", True, linkage)


def parse(name: str, text: str) -> Parsed:
    """Take a module's header off and split the rest. Raises DeviceError(218)."""
    rest = _mask_comments(text)
    version, target = (0, 0), ""
    while True:
        if match := _HEADER.match(rest):
            if match[1] == "version":
                number = re.match(r"\s*(\d+)\.(\d+)", match[2])
                if number is None:
                    raise DeviceError(f"{name}: cannot read .version{match[2]}", INVALID_PTX)
                version = (int(number[1]), int(number[2]))
            elif match[1] == "target":
                target = match[2].strip()
        elif not (match := _PRAGMA_LINE.match(rest) or _SECTION.match(rest)):
            break
        rest = rest[match.end():]
    if not version[0] or not target:
        raise DeviceError(f"{name}: no .version and .target", INVALID_PTX)
    rest = re.sub(r"^[ \t]*\.file\b[^\n]*\n?", "", rest, flags=re.M)
    return Parsed(name, version, target, tuple(_classify(piece.strip()) for piece in _split(rest)))


def _locals_apart(modules: list[Parsed]) -> list[Parsed]:
    """Rename local symbols that several modules define (every printf makes a ``$str``)."""
    seen: set[str] = set()
    shared = {item.name for module in modules for item in module.items if item.name and item.linkage}
    result = []
    for number, module in enumerate(modules):
        local = {item.name for item in module.items if item.name and not item.linkage}
        clashing = local & (seen | shared)
        seen |= local
        for name in sorted(clashing):
            token = re.compile(rf"(?<![\w$%.]){re.escape(name)}(?![\w$])")
            new = f"{name}$m{number}"
            module = replace(module, items=tuple(
                replace(item, text=token.sub(new, item.text),
                        name=new if item.name == name else item.name)
                for item in module.items))
        result.append(module)
    return result


def _target_number(target: str) -> int:
    match = re.search(r"sm_(\d+)", target)
    return int(match[1]) if match else 0


def with_max_registers(text: str, count: int) -> str:
    """Return the text with the linker's register limit in it, for the engine that loads it."""
    masked = _mask_comments(text)
    match = re.search(r"^\s*\.address_size\s+\d+", masked, re.M) or re.search(r"^\s*\.target\b[^\n]*$", masked, re.M)
    if count <= 0 or match is None:
        return text
    return f'{text[:match.end()]}\n.pragma "rgpu maxrregcount {count}";{text[match.end():]}'


def merge(inputs: list[tuple[str, str]]) -> str:
    """Return one PTX text made from (name, PTX text) …; a single input is returned as it is.

    Raises DeviceError(218) with both names when a symbol is defined twice.
    """
    if not inputs:
        raise DeviceError("nothing to link", 1)
    if len(inputs) == 1:
        return inputs[0][1]
    modules = _locals_apart([parse(name, text) for name, text in inputs])
    defined: dict[str, tuple[Item, str]] = {}
    kept: list[Item] = []
    for module in modules:
        for item in module.items:
            if not item.name or not item.defined:
                kept.append(item)
                continue
            first = defined.get(item.name)
            if first is None:
                defined[item.name] = (item, module.name)
                kept.append(item)
            elif item.linkage not in ("weak", "common"):
                if first[0].linkage not in ("weak", "common"):
                    raise DeviceError(f"{item.name} is defined in {first[1]} and in {module.name}", INVALID_PTX)
                kept[kept.index(first[0])] = item  # a strong definition replaces a weak one
                defined[item.name] = (item, module.name)
    kept = [item for item in kept if item.defined or not item.name or item.name not in defined]
    return _emit(modules, list({(item.name or item.text): item for item in kept}.values()))


def _emit(modules: list[Parsed], items: list[Item]) -> str:
    version = max(module.version for module in modules)
    target = max((module.target for module in modules), key=_target_number)
    order = {"variable": 0, "other": 0, "func": 1, "entry": 2}
    body = sorted(items, key=lambda item: (order[item.kind], item.defined))
    header = f".version {version[0]}.{version[1]}\n.target {target}\n.address_size 64\n\n"
    return header + "\n\n".join(item.text for item in body) + "\n"
