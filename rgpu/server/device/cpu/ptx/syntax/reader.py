"""Reads tokens one by one, and the declarations of variables, for a module and for the bodies of its functions."""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.model import WIDTHS, Variable
from rgpu.server.device.cpu.ptx.syntax.lexer import Token, float_value, int_value, tokenize

LARGEST = 4 << 30  #: bytes of one variable; checked before anything of that size is made
MOST_ALIGNED = 1024  #: bytes


class Reader:
    """One pass over the tokens."""

    def __init__(self, text: str):
        self.tokens = tokenize(text)
        self.at = 0
        self.scopes = 0  #: ``{ }`` levels begun so far, of all functions: each has its own number

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
        """Read an integer literal with an optional sign."""
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind != "int":
            raise PtxError(f"expected an integer, found {token.text!r}", token.line)
        return sign * int_value(token.text)

    def name(self) -> Token:
        """Read a word."""
        token = self.next()
        if token.kind != "word":
            raise PtxError(f"expected a name, found {token.text!r}", token.line)
        return token

    def skip_debug(self) -> None:
        """Skip a debug directive: to the end of its line, and its braces if it has any."""
        first = self.next()
        if first.text == ".section":
            self.skip_to("{")
            while not self.accept("}"):
                if self.next().kind == "end":
                    raise PtxError("unfinished .section", first.line)
            return
        while self.tok.line == first.line and self.tok.kind != "end":
            self.next()

    def skip_to(self, text: str) -> None:
        """Read up to and including the first ``text``."""
        while not self.accept(text):
            if self.next().kind == "end":
                raise PtxError(f"expected {text!r} before the end")

    # -- variables -------------------------------------------------------

    def variable(self, suffix: str = "", extern: bool = False) -> list[Variable]:
        """Read ``.space .align n .type name[dims] = init, …;`` (up to the ``;``).

        ``suffix`` keeps its key apart from those of equal names in other scopes.
        """
        first = self.next()
        made = [self.variable_tail(first.text[1:], suffix, extern)]
        if self.tok.text == ",":
            raise PtxError("unsupported list of variables in one declaration", first.line)
        self.expect(";")
        return made

    def parameters(self) -> list[Variable]:
        """Read the parenthesised list of parameters or results of a function or prototype."""
        self.expect("(")
        params: list[Variable] = []
        while not self.accept(")"):
            token = self.next()
            if token.text != ".param":
                raise PtxError(f"unsupported {token.text} parameter: only .param", token.line)
            params.append(self.variable_tail("param"))
            self.accept(",")
        return params

    def variable_tail(self, space: str, suffix: str = "", extern: bool = False) -> Variable:
        """Read the part of a declaration after ``.space``."""
        align, kind, lanes, managed = 0, "", 1, False
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
            elif word == "attribute":
                managed |= self._variable_attributes()
            elif word in WIDTHS and word != "pred":
                kind = word
            else:
                raise PtxError(f"unsupported {token.text} in a variable declaration", token.line)
        if not kind:
            raise PtxError("variable without a type", self.tok.line)
        name = self.name()
        element = WIDTHS[kind] // 8 * lanes
        count, unsized = self._dimensions()
        if align & (align - 1) or align > MOST_ALIGNED:
            raise PtxError(f"unsupported .align {align}", name.line)
        init = self._initialiser() if self.accept("=") else ()
        if unsized:
            count = len(init) // lanes
        if element * count > LARGEST:
            raise PtxError(f"unsupported {name.text}: {element * count} bytes, {LARGEST} at most", name.line)
        return Variable(
            name.text,
            name.text + suffix,
            space,
            align or element,
            element * count,
            name.line,
            tuple(init),
            WIDTHS[kind] // 8,
            extern,
            managed,
        )

    def _variable_attributes(self) -> bool:
        """Read ``(.managed, .unified(n, n))``; returns whether it is managed. A unified one has one place only."""
        managed = False
        self.expect("(")
        while not self.accept(")"):
            token = self.next()
            if token.text == ".managed":
                managed = True
            elif token.text == ".unified":
                self.skip_to(")")
            elif token.text != ",":
                raise PtxError(f"unsupported {token.text} in .attribute of a variable", token.line)
        return managed

    def _dimensions(self) -> tuple[int, bool]:
        count, unsized = 1, False
        while self.accept("["):
            if self.accept("]"):
                unsized = True
                continue
            size = self.integer()
            if size < 0:
                raise PtxError(f"a dimension of {size} elements", self.tok.line)
            count *= size
            self.expect("]")
        return count, unsized

    def _initialiser(self) -> list:
        """Read a flat list of ints, floats and ``(symbol, offset)`` pairs."""
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
