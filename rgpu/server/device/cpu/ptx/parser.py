"""Tokens to a ``Program``: module directives, variables, functions, instructions."""

from __future__ import annotations

import re

from .body import Body, Scope
from .errors import PtxError
from .lexer import Token, float_value, int_value, tokenize
from .model import WIDTHS, Function, Program, Variable

_LINKAGE = {".visible", ".weak", ".extern", ".common"}


class Parser:
    """One pass over the tokens; ``program()`` is the entry."""

    def __init__(self, text: str, max_target: int):
        self.tokens = tokenize(text)
        self.at = 0
        self.max_target = max_target
        self.functions: dict[str, Function] = {}
        self.variables: dict[str, Variable] = {}
        self.version = self.target = 0
        self.scopes = 0

    # -- token helpers ---------------------------------------------------

    @property
    def tok(self) -> Token:
        """The token about to be read."""
        return self.tokens[self.at]

    def next(self) -> Token:
        """Read one token."""
        token = self.tokens[self.at]
        if token.kind != "end":
            self.at += 1
        return token

    def accept(self, text: str) -> bool:
        """Read ``text`` if it is next."""
        if self.tok.text == text and self.tok.kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        """Read ``text`` or fail."""
        if self.tok.text != text:
            raise PtxError(f"expected {text!r}, found {self.tok.text!r}", self.tok.line)
        return self.next()

    def integer(self) -> int:
        """An integer literal with an optional sign."""
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind != "int":
            raise PtxError(f"expected an integer, found {token.text!r}", token.line)
        return sign * int_value(token.text)

    def name(self) -> Token:
        """A word."""
        token = self.next()
        if token.kind != "word":
            raise PtxError(f"expected a name, found {token.text!r}", token.line)
        return token

    # -- module level ----------------------------------------------------

    def program(self) -> Program:
        """The whole module."""
        while self.tok.kind != "end":
            self._module_item()
        if not self.target:
            raise PtxError("no .target directive")
        return Program(self.version, self.target, self.variables, self.functions)

    def _module_item(self) -> None:
        token = self.tok
        if token.text == ".version":
            self.next()
            major, _, minor = self.next().text.partition(".")
            self.version = int(major) * 10 + int(minor or 0)
        elif token.text == ".target":
            self._target()
        elif token.text == ".address_size":
            self.next()
            if self.integer() != 64:
                raise PtxError("unsupported .address_size: only 64", token.line)
        elif token.text in (".file", ".loc", ".section", "@"):
            self._skip_debug()
        elif token.text == ".pragma":
            self._skip_to(";")
        elif token.text == ";":
            self.next()
        else:
            self._declaration()

    def _target(self) -> None:
        token = self.next()
        while True:
            word = self.next()
            match = re.fullmatch(r"sm_(\d+)([a-z]?)", word.text)
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

    def _skip_debug(self) -> None:
        """A debug directive: to the end of its line, and its braces if it has any."""
        first = self.next()
        if first.text == ".section":
            while not self.accept("{"):
                self.next()
            while not self.accept("}"):
                if self.next().kind == "end":
                    raise PtxError("unfinished .section", first.line)
            return
        while self.tok.line == first.line and self.tok.kind != "end":
            self.next()

    def _skip_to(self, text: str) -> None:
        while not self.accept(text):
            if self.next().kind == "end":
                raise PtxError(f"expected {text!r} before the end")

    def _declaration(self) -> None:
        linkage = set()
        while self.tok.text in _LINKAGE:
            linkage.add(self.next().text)
        token = self.tok
        if token.text in (".entry", ".func"):
            self._function(self.next().text == ".entry")
        elif token.text in (".global", ".const", ".shared"):
            for var in self._variable(None, ".extern" in linkage):
                # A .extern or tentative declaration gives way to a definition.
                known = self.variables.get(var.name)
                if known is None or known.extern or not var.extern:
                    self.variables[var.name] = var
        else:
            raise PtxError(f"unsupported {token.text}", token.line)

    # -- variables -------------------------------------------------------

    def _variable(self, scope: Scope | None, extern: bool = False) -> list[Variable]:
        """``.space .align n .type name[dims] = init, …;`` (the ``;`` is read here)."""
        first = self.next()
        made = [self._variable_tail(first.text[1:], scope, extern)]
        if self.tok.text == ",":
            raise PtxError("unsupported list of variables in one declaration", first.line)
        self.expect(";")
        return made

    def _variable_tail(self, space: str, scope: Scope | None, extern: bool) -> Variable:
        align, kind, lanes = 0, "", 1
        while self.tok.kind == "directive":
            token = self.next()
            word = token.text[1:]
            if word == "align":
                align = self.integer()
            elif word in ("v2", "v4"):
                lanes = int(word[1:])
            elif word == "ptr":  # a kernel parameter's pointer attributes: no effect on layout
                while self.tok.text in (".global", ".const", ".shared", ".local"):
                    self.next()
                if self.accept(".align"):
                    self.integer()
            elif word in WIDTHS and word != "pred":
                kind = word
            else:
                raise PtxError(f"unsupported {token.text} in a variable declaration", token.line)
        if not kind:
            raise PtxError("variable without a type", self.tok.line)
        name = self.name()
        element = WIDTHS[kind] // 8 * lanes
        count, unsized = self._dimensions()
        init = self._initialiser() if self.accept("=") else ()
        if unsized:
            count = len(init) // lanes
        return Variable(
            name.text,
            name.text + (scope.suffix if scope else ""),
            space,
            align or element,
            element * count,
            name.line,
            tuple(init),
            WIDTHS[kind] // 8,
            extern,
        )

    def _dimensions(self) -> tuple[int, bool]:
        count, unsized = 1, False
        while self.accept("["):
            if self.accept("]"):
                unsized = True
                continue
            count *= self.integer()
            self.expect("]")
        return count, unsized

    def _initialiser(self) -> list:
        """Flat list of ints, floats and ``(symbol, offset)`` pairs."""
        if self.accept("{"):
            items: list = []
            while not self.accept("}"):
                items += self._initialiser()
                self.accept(",")
            return items
        token = self.tok
        if token.kind == "word":
            name = self.next().text
            if name == "generic":
                self.expect("(")
                name = self.name().text
                self.expect(")")
            offset = 0
            while self.tok.text in ("+", "-"):
                sign = -1 if self.next().text == "-" else 1
                offset += sign * self.integer()
            return [(name, offset)]
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind == "float":
            return [sign * float_value(token.text)]
        if token.kind != "int" or self.tok.text == "(":
            raise PtxError(f"unsupported initialiser {token.text}", token.line)
        return [sign * int_value(token.text)]

    # -- functions -------------------------------------------------------

    def _function(self, entry: bool) -> None:
        results = self._parameters() if not entry and self.tok.text == "(" else []
        name = self.name()
        fn = Function(name.text, entry, name.line, results=results)
        if self.tok.text == "(":
            fn.params = self._parameters()
        self._function_directives(fn)
        if self.tok.text == "{":
            self.next()
            Body(self, fn).parse()
        else:
            self.expect(";")
        known = self.functions.get(fn.name)
        if known is None or known.body is None:
            self.functions[fn.name] = fn

    def _parameters(self) -> list[Variable]:
        self.expect("(")
        params: list[Variable] = []
        while not self.accept(")"):
            token = self.next()
            if token.text != ".param":
                raise PtxError(f"unsupported {token.text} parameter: only .param", token.line)
            params.append(self._variable_tail("param", None, False))
            self.accept(",")
        return params

    def _function_directives(self, fn: Function) -> None:
        while self.tok.kind == "directive":
            token = self.next()
            if token.text in (".maxntid", ".reqntid"):
                threads = self.integer()
                while self.accept(","):
                    threads *= self.integer()
                fn.max_threads = min(fn.max_threads, threads)
            elif token.text in (".minnctapersm", ".maxnctapersm", ".maxnreg"):
                self.integer()
            elif token.text == ".pragma":
                self._skip_to(";")
            elif token.text != ".noreturn":
                raise PtxError(f"unsupported {token.text}", token.line)


def parse(text: str, max_target: int) -> Program:
    """The ``Program`` in ``text``; raises ``PtxError``."""
    return Parser(text, max_target).program()
