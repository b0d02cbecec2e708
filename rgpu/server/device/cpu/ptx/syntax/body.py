"""The statements of a function's body: declarations, labels, instructions, operands."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.model import (
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
    Reg,
    Sink,
    Special,
    Sym,
    Variable,
    Vec,
)
from rgpu.server.device.cpu.ptx.syntax.lexer import float_value, int_value
from rgpu.server.device.cpu.ptx.syntax.reader import Reader

_SPACES = {".global", ".const", ".shared", ".local", ".param"}
_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|cluster_n?ctaid|n?clusterid)\.[xyz]|laneid|n?warpid|n?smid|gridid|lanemask_(?:eq|le|lt|ge|gt)"
    r"|clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?|(?:dynamic|total|aggr)_smem_size|pm\d+|envreg\d+|is_explicit_cluster)$"
)


class Scope:
    """Names of one ``{ }`` level: registers, variables and labels."""

    def __init__(self, parent: Scope | None, number: int):
        self.parent = parent
        self.suffix = f"#{number}" if parent else ""
        self.registers: dict[str, Reg] = {}
        self.ranges: list[tuple[str, int, int]] = []
        self.variables: dict[str, Variable] = {}
        self.labels: dict[str, str] = {}

    def chain(self) -> Iterator[Scope]:
        """This scope and those around it, innermost first."""
        scope: Scope | None = self
        while scope:
            yield scope
            scope = scope.parent

    def register(self, name: str) -> Reg | None:
        """Return the register called ``name``, here or further out."""
        for scope in self.chain():
            if found := scope.registers.get(name):
                return found
            for prefix, count, width in scope.ranges:
                number = name[len(prefix) :]
                if name.startswith(prefix) and number.isdigit() and int(number) < count:
                    reg = scope.registers[name] = Reg(name + scope.suffix, width)
                    return reg
        return None


class Body:
    """The statements of one function."""

    def __init__(self, reader: Reader, fn: Function):
        self.p = reader
        self.fn = fn
        self.items: list[Instruction | LabelMark] = []
        self.pending: list[tuple[Instruction, Scope]] = []

    def parse(self) -> None:
        """Read to the closing brace, then resolve the names."""
        root = Scope(None, 0)
        self._block(root)
        for ins, scope in self.pending:
            self._resolve(ins, scope)
        self.fn.body = self.items

    def _block(self, scope: Scope) -> None:
        p = self.p
        while not p.accept("}"):
            token = p.tok
            if token.kind == "end":
                raise PtxError(f"unfinished body of {self.fn.name}", token.line)
            if p.accept("{"):
                p.scopes += 1
                self._block(Scope(scope, p.scopes))
            elif token.text == ".reg":
                self._registers(scope)
            elif token.text in _SPACES:
                for var in p.variable(scope.suffix):
                    scope.variables[var.name] = var
                    self.fn.variables[var.key] = var
            elif token.text in (".loc", ".file"):
                p.skip_debug()
            elif token.text == ".pragma":
                p.skip_to(";")
            elif token.kind == "directive":
                raise PtxError(f"unsupported {token.text}", token.line)
            elif token.kind == "word" and p.tokens[p.at + 1].text == ":":
                self._label(scope)
            elif not p.accept(";"):
                self._instruction(scope)

    def _registers(self, scope: Scope) -> None:
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
            else:
                scope.registers[name] = Reg(name + scope.suffix, WIDTHS[kind])
            if not p.accept(","):
                break
        p.expect(";")

    def _label(self, scope: Scope) -> None:
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
        scope.labels[token.text] = unique
        if p.accept(".calltargets"):
            targets = [p.name().text]
            while p.accept(","):
                targets.append(p.name().text)
            p.expect(";")
            self.fn.call_targets[unique] = tuple(targets)
            return
        if p.accept(".callprototype"):
            self.fn.prototypes[unique] = self._prototype()
            return
        self.items.append(LabelMark(unique, token.line))

    def _prototype(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Read the sizes of results and parameters: ``(.param .b32 _) _ (.param .b64 _, …);``."""
        p = self.p
        results = p.parameters() if p.tok.text == "(" else []
        p.name()
        params = p.parameters() if p.tok.text == "(" else []
        if p.tok.text != ";":
            raise PtxError(f"unsupported {p.tok.text} of a .callprototype", p.tok.line)
        p.next()
        return tuple(var.size for var in results), tuple(var.size for var in params)

    def _instruction(self, scope: Scope) -> None:
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

    def _operand(self, scope: Scope) -> Operand:
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

    def _list(self, scope: Scope, end: str) -> tuple[Operand, ...]:
        items: list = []
        while not self.p.accept(end):
            items.append(self._operand(scope))
            self.p.accept(",")
        return tuple(items)

    def _address(self, scope: Scope) -> Operand:
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
            # A place in a texture or surface: other instructions refuse such an operand.
            return Vec((where, *self._list(scope, "]")))
        p.expect("]")
        return where

    def _atom(self, scope: Scope) -> Operand:
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

    def _resolve(self, ins: Instruction, scope: Scope) -> None:
        """Replace names by their meaning in ``scope``; unknown ones stay for the module."""
        ins.operands = tuple(self._resolved(op, ins, scope) for op in ins.operands)

    def _resolved(self, op: Operand, ins: Instruction, scope: Scope) -> Operand:
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
