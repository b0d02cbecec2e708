"""Tokens to a ``Program``: module directives, variables, functions, instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .errors import PtxError
from .lexer import Token, float_value, int_value, tokenize
from .model import (
    WIDTHS,
    Addr,
    FloatImm,
    Function,
    Imm,
    Instruction,
    LabelMark,
    Not,
    Operand,
    Pair,
    Program,
    Reg,
    Sink,
    Special,
    Sym,
    Variable,
    Vec,
)

_LINKAGE = {".visible", ".weak", ".extern", ".common"}
_SPACES = {".global", ".const", ".shared", ".local", ".param"}
_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|cluster_n?ctaid|n?clusterid)\.[xyz]|laneid|n?warpid|n?smid|gridid|lanemask_(?:eq|le|lt|ge|gt)"
    r"|clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?|(?:dynamic|total|aggr)_smem_size|pm\d+|envreg\d+|is_explicit_cluster)$"
)


class _Scope:
    """Names of one ``{ }`` level: registers, variables and labels."""

    def __init__(self, parent: _Scope | None, number: int):
        self.parent = parent
        self.suffix = f"#{number}" if parent else ""
        self.registers: dict[str, Reg] = {}
        self.ranges: list[tuple[str, int, int]] = []
        self.variables: dict[str, Variable] = {}
        self.labels: dict[str, str] = {}

    def chain(self) -> Iterator[_Scope]:
        """This scope and those around it, innermost first."""
        scope: _Scope | None = self
        while scope:
            yield scope
            scope = scope.parent

    def register(self, name: str) -> Reg | None:
        """The register called ``name``, here or further out."""
        for scope in self.chain():
            if found := scope.registers.get(name):
                return found
            for prefix, count, width in scope.ranges:
                number = name[len(prefix) :]
                if name.startswith(prefix) and number.isdigit() and int(number) < count:
                    reg = scope.registers[name] = Reg(name + scope.suffix, width)
                    return reg
        return None


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

    def _variable(self, scope: _Scope | None, extern: bool = False) -> list[Variable]:
        """``.space .align n .type name[dims] = init, …;`` (the ``;`` is read here)."""
        first = self.next()
        made = [self._variable_tail(first.text[1:], scope, extern)]
        if self.tok.text == ",":
            raise PtxError("unsupported list of variables in one declaration", first.line)
        self.expect(";")
        return made

    def _variable_tail(self, space: str, scope: _Scope | None, extern: bool) -> Variable:
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
            _Body(self, fn).parse()
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


class _Body:
    """The statements of one function."""

    def __init__(self, parser: Parser, fn: Function):
        self.p = parser
        self.fn = fn
        self.items: list[Instruction | LabelMark] = []
        self.pending: list[tuple[Instruction, _Scope]] = []

    def parse(self) -> None:
        """Read to the closing brace, then resolve the names."""
        root = _Scope(None, 0)
        self._block(root)
        for ins, scope in self.pending:
            self._resolve(ins, scope)
        self.fn.body = self.items

    def _block(self, scope: _Scope) -> None:
        p = self.p
        while not p.accept("}"):
            token = p.tok
            if token.kind == "end":
                raise PtxError(f"unfinished body of {self.fn.name}", token.line)
            if p.accept("{"):
                p.scopes += 1
                self._block(_Scope(scope, p.scopes))
            elif token.text == ".reg":
                self._registers(scope)
            elif token.text in _SPACES:
                for var in p._variable(scope):
                    scope.variables[var.name] = var
                    self.fn.variables[var.key] = var
            elif token.text in (".loc", ".file"):
                p._skip_debug()
            elif token.text == ".pragma":
                p._skip_to(";")
            elif token.kind == "directive":
                raise PtxError(f"unsupported {token.text}", token.line)
            elif token.kind == "word" and p.tokens[p.at + 1].text == ":":
                self._label(scope)
            elif not p.accept(";"):
                self._instruction(scope)

    def _registers(self, scope: _Scope) -> None:
        p = self.p
        p.next()
        token = p.next()
        kind = token.text[1:]
        if kind not in WIDTHS:
            raise PtxError(f"unsupported .reg {token.text}", token.line)
        while True:
            name = p.name().text
            if p.accept("<"):
                count = p.integer()
                p.expect(">")
                scope.ranges.append((name, count, WIDTHS[kind]))
                self.fn.register_count += count * max(1, WIDTHS[kind] // 32) if kind != "pred" else 0
            else:
                scope.registers[name] = Reg(name + scope.suffix, WIDTHS[kind])
                self.fn.register_count += 1
            if not p.accept(","):
                break
        p.expect(";")

    def _label(self, scope: _Scope) -> None:
        p = self.p
        token = p.next()
        p.expect(":")
        unique = token.text + scope.suffix
        if p.accept(".branchtargets"):
            targets = [p.name().text]
            while p.accept(","):
                targets.append(p.name().text)
            p.expect(";")
            self.fn.branch_targets[token.text] = tuple(targets)
            return
        if p.tok.text in (".callprototype", ".calltargets"):
            raise PtxError(f"unsupported {p.tok.text}: calls through pointers", p.tok.line)
        scope.labels[token.text] = unique
        self.items.append(LabelMark(unique, token.line))

    def _instruction(self, scope: _Scope) -> None:
        p = self.p
        guard: Reg | Not | None = None
        if p.accept("@"):
            negated = p.accept("!")
            name = p.name()
            reg = scope.register(name.text)
            if reg is None or reg.width != 1:
                raise PtxError(f"unknown predicate {name.text}", name.line)
            guard = Not(reg) if negated else reg
        token = p.name()
        op, *mods = token.text.split(".")
        operands: list = []
        while not p.accept(";"):
            operands.append(self._operand(scope))
            if p.tok.text != ";":
                # call's own list syntax allows "(ret), f, (args)": commas throughout
                p.expect(",")
        ins = Instruction(token.line, op, tuple(mods), tuple(operands), guard)
        self.items.append(ins)
        self.pending.append((ins, scope))

    # -- operands --------------------------------------------------------

    def _operand(self, scope: _Scope) -> Operand:
        p = self.p
        if p.accept("["):
            return self._address(scope)
        if p.accept("{"):
            return Vec(self._list(scope, "}"))
        if p.accept("("):
            return Vec(self._list(scope, ")"))
        if p.accept("!"):
            name = p.name()
            reg = scope.register(name.text)
            if reg is None:
                raise PtxError(f"unknown register {name.text}", name.line)
            return Not(reg)
        first = self._atom(scope)
        if p.accept("|"):
            return Pair(first, self._atom(scope))
        return first

    def _list(self, scope: _Scope, end: str) -> tuple[Operand, ...]:
        items: list = []
        while not self.p.accept(end):
            items.append(self._operand(scope))
            self.p.accept(",")
        return tuple(items)

    def _address(self, scope: _Scope) -> Operand:
        p = self.p
        base = self._atom(scope)
        offset = 0
        if isinstance(base, Sym):
            base, offset = Sym(base.name), base.offset
        while p.tok.text in ("+", "-"):
            sign = -1 if p.next().text == "-" else 1
            offset += sign * p.integer()
        where = Addr(base, offset)
        if p.accept(","):
            # Texture coordinates: no handler takes these, so the instruction gets refused by its name.
            return Vec((where, *self._list(scope, "]")))
        p.expect("]")
        return where

    def _atom(self, scope: _Scope) -> Operand:
        p = self.p
        sign = -1 if p.accept("-") else 1
        token = p.next()
        if token.kind == "int":
            return Imm(sign * int_value(token.text))
        if token.kind == "float":
            return FloatImm(sign * float_value(token.text))
        if token.kind != "word":
            raise PtxError(f"unexpected {token.text!r}", token.line)
        if token.text == "_":
            return Sink()
        if reg := scope.register(token.text):
            return reg
        if token.text.startswith("%"):
            if token.text == "WARP_SZ" or _SPECIAL.match(token.text):
                return Special(token.text[1:])
            raise PtxError(f"unsupported register {token.text}", token.line)
        if token.text == "WARP_SZ":
            return Imm(32)
        offset = 0
        while p.tok.text in ("+", "-"):
            offset_sign = -1 if p.next().text == "-" else 1
            offset += offset_sign * p.integer()
        return Sym(token.text, offset)

    # -- names -----------------------------------------------------------

    def _resolve(self, ins: Instruction, scope: _Scope) -> None:
        """Replace names by what they mean in ``scope``; unknown ones stay for the module."""
        ins.operands = tuple(self._resolved(op, ins, scope) for op in ins.operands)

    def _resolved(self, op: Operand, ins: Instruction, scope: _Scope) -> Operand:
        if isinstance(op, Addr):
            return Addr(self._resolved(op.base, ins, scope), op.offset)
        if isinstance(op, Vec):
            return Vec(tuple(self._resolved(x, ins, scope) for x in op.items))
        if not isinstance(op, Sym):
            return op
        for level in scope.chain():
            if var := level.variables.get(op.name):
                return Sym(var.key, op.offset)
            if op.name in level.labels:
                return Sym(level.labels[op.name])
        return op


def parse(text: str, max_target: int) -> Program:
    """The ``Program`` in ``text``; raises ``PtxError``."""
    return Parser(text, max_target).program()
