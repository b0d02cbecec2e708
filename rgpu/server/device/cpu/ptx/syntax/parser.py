"""Parses tokens into a ``Program``: module directives, variables, functions, instructions."""

from __future__ import annotations

import re
import zlib

from rgpu.server.device.cpu.ptx.calls import heap
from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.model import Function, Program, Variable
from rgpu.server.device.cpu.ptx.syntax.body import Body
from rgpu.server.device.cpu.ptx.syntax.reader import Reader

_LINKAGE = {".visible", ".weak", ".extern", ".common"}
#: Tokens with which the next part of a module may begin.
_BEGINS = _LINKAGE | {".entry", ".func", ".global", ".const", ".shared"}


class Parser(Reader):
    """Parses one module; ``program()`` is the entry point."""

    def __init__(self, text: str, max_target: int):
        super().__init__(text)
        self.max_target = max_target
        self.tag = zlib.crc32(text.encode())
        self.functions: dict[str, Function] = {}
        self.variables: dict[str, Variable] = {}
        self.version = self.target = self.max_registers = 0

    # -- module level ----------------------------------------------------

    def program(self) -> Program:
        """Read the whole module."""
        while self.tok.kind != "end":
            self._module_item()
        if not self.target:
            raise PtxError("no .target directive")
        if (memory := heap.variable(self.functions)) is not None:
            self.variables[heap.NAME] = memory
        return Program(self.version, self.target, self.variables, self.functions, self.max_registers, self.tag)

    def _module_item(self) -> None:
        token = self.tok
        if token.text == ".version":
            self.next()
            number = re.fullmatch(r"(\d{1,4})(?:\.(\d{1,4}))?", self.next().text, re.ASCII)
            if number is None:
                raise PtxError("unsupported .version: not a number", token.line)
            self.version = int(number[1]) * 10 + int(number[2] or 0)
        elif token.text == ".target":
            self._target()
        elif token.text == ".address_size":
            self.next()
            if self.integer() != 64:
                raise PtxError("unsupported .address_size: only 64", token.line)
        elif token.text in (".file", ".loc", ".section", "@"):
            self.skip_debug()
        elif token.text == ".pragma":
            self._pragma()
        elif token.text == ";":
            self.next()
        else:
            self._declaration()

    def _target(self) -> None:
        token = self.next()
        while True:
            word = self.next()
            match = re.fullmatch(r"sm_(\d{1,6})([a-z]?)", word.text, re.ASCII)
            if match:
                self.target = int(match[1])
                if self.target > self.max_target:
                    raise PtxError(
                        f"unsupported .target {word.text}: this device runs PTX for sm_{self.max_target} and below",
                        token.line,
                    )
            elif word.text not in ("debug", "texmode_independent", "texmode_unified"):
                raise PtxError(f"unsupported .target {word.text}", word.line)
            if not self.accept(","):
                return

    def _pragma(self) -> None:
        """Read a pragma: those of linked modules carry the linker's options; others are for another compiler."""
        self.next()
        if match := re.fullmatch(r'"rgpu maxrregcount (\d{1,9})"', self.tok.text, re.ASCII):
            self.max_registers = int(match[1])
        self.skip_to(";")

    def _declaration(self) -> None:
        linkage = set()
        while self.tok.text in _LINKAGE:
            linkage.add(self.next().text)
        token = self.tok
        if token.text in (".entry", ".func"):
            self._function(self.next().text == ".entry")
        elif token.text in (".global", ".const", ".shared"):
            for var in self.variable(extern=".extern" in linkage):
                # A .extern or tentative declaration gives way to a definition.
                known = self.variables.get(var.name)
                if known is None or known.extern or not var.extern:
                    self.variables[var.name] = var
        else:
            raise PtxError(f"unsupported {token.text}", token.line)

    # -- functions -------------------------------------------------------

    def _function(self, entry: bool) -> None:
        results = self.parameters() if not entry and self.tok.text == "(" else []
        name = self.name()
        fn = Function(name.text, entry, name.line, results=results)
        if self.tok.text == "(":
            fn.params = self.parameters()
        self._function_directives(fn)
        if self.tok.text == "{":
            self.next()
            Body(self, fn).parse()
        elif self.tok.text not in _BEGINS:  # compilers accept a declaration without its semicolon; XLA emits some
            self.expect(";")
        known = self.functions.get(fn.name)
        if known is None or known.body is None:
            self.functions[fn.name] = fn

    def _function_directives(self, fn: Function) -> None:
        while self.tok.kind == "directive" and self.tok.text not in _BEGINS:
            token = self.next()
            if token.text in (".maxntid", ".reqntid"):
                threads = self.integer()
                while self.accept(","):
                    threads *= self.integer()
                fn.max_threads, fn.bounded = min(fn.max_threads, threads), True
            elif token.text == ".minnctapersm":
                fn.min_blocks = self.integer()
            elif token.text == ".maxnreg":
                fn.max_registers = self.integer()
            elif token.text == ".maxnctapersm":
                self.integer()
            elif token.text == ".pragma":
                self.skip_to(";")
            elif token.text != ".noreturn":
                raise PtxError(f"unsupported {token.text}", token.line)


def parse(text: str, max_target: int) -> Program:
    """Return the ``Program`` in ``text``. Raises ``PtxError``."""
    return Parser(text, max_target).program()
