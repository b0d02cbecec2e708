"""Control flow: blocks, branches, calls, barriers, and the entry and exit of a kernel.

Control moves straight from block to block while the active lanes agree and no
pending lane has a lower block id than the target; otherwise the lanes' block
ids are stored in the frame and ``rt_pick`` chooses the next group.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left

from rgpu.server.device.cpu.ptx import flow, schedule_ir
from rgpu.server.device.cpu.ptx.calls.pointers import call_through
from rgpu.server.device.cpu.ptx.calls.reached import pointer_of
from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.errors import CompileLimit, PtxError
from rgpu.server.device.cpu.ptx.flow import Block, call_target
from rgpu.server.device.cpu.ptx.instructions import run
from rgpu.server.device.cpu.ptx.layout import (
    ASSERT,
    BAR_COUNT,
    F_ACTIVE,
    F_BLOCKED,
    F_FORCE,
    F_LIVE,
    F_NEXT_PC,
    F_ROTATE,
    FAILED,
    INVALID_PC,
    L_STOP,
    STACK_ERROR,
    T_COOPERATIVE,
    T_LAUNCH,
)
from rgpu.server.device.cpu.ptx.model import Function, Imm, Instruction, Not, Reg, Sym
from rgpu.server.device.cpu.ptx.ops.memory_ir import REPORT
from rgpu.server.device.cpu.ptx.ops.system import DEVICE_CALLS, GRID_CALLS, give_result

MOST_LINES = 1_000_000  #: of a kernel's IR: some 100 MB of text
# Back-edges that a warp may take before other warps (and cancellation) get a turn; in loops that look like spinning,
# pending lanes get theirs sooner.
_FUEL, _SPIN_COST = 4096, 64
_BACKWARDS = re.compile(r"label %([KS]\d+)\b")


def write_kernel(g: Gen, functions: list[Function]) -> tuple[str, str]:
    """Emit the kernel's function; returns its text and its symbol."""
    plan: list[tuple[Function, list[Block]]] = []
    first = 0
    for fn in functions:
        blocks = flow.blocks_of(fn, first)
        g.entries[fn.name] = first
        g.return_slots[fn.name] = g.frame_space(128) if not fn.entry else 0
        first += len(blocks)
        plan.append((fn, blocks))
        _make_slots(g, fn, blocks)
    spins = {fn.name: _spinning(blocks) for fn, blocks in plan}
    ids = [block.id for _, blocks in plan for block in blocks]
    _prologue(g, ids)
    for fn, blocks in plan:
        g.fn = fn
        for block in blocks:
            _Writer(g, fn, block, spins[fn.name]).write()
    _edges(g, ids)
    body = "\n".join(g.lines)
    symbol = "ptx_" + hashlib.sha256(body.encode()).hexdigest()[:24]
    return f"define void @{symbol}(ptr %T, ptr %F) #0 {{\n{body}\n}}\n", symbol


def _make_slots(g: Gen, fn: Function, blocks: list[Block]) -> None:
    crossing = sorted({r for b in blocks for r in b.live_in}, key=lambda r: r.name)
    for reg in crossing:
        g.slots[fn.name, reg] = g.frame_space(4 if reg.width == 1 else 4 * reg.width)


def _spinning(blocks: list[Block]) -> list[int]:
    """Return the ids of blocks with an instruction by which lanes wait for each other."""
    found = []
    for block in blocks:
        for ins in block.body:
            waits = ins.op in ("atom", "nanosleep") or (
                ins.op == "ld" and {"volatile", "relaxed", "acquire"} & set(ins.mods)
            )
            if waits:
                found.append(block.id)
                break
    return found


def _prologue(g: Gen, ids: list[int]) -> None:
    cases = " ".join(f"i32 {i}, label %B{i}" for i in ids)
    g.lines.append(f"""entry:
  %actv = alloca i32
  %nextv = alloca i32
  %targetv = alloca i32
  %fuelv = alloca i32
  store i32 {_FUEL}, ptr %fuelv
  br label %dispatch
dispatch:
  %pc = call i32 @rt_pick(ptr %T, ptr %F)
  %act.p = getelementptr i32, ptr %F, i64 {F_ACTIVE}
  %act.0 = load i32, ptr %act.p
  store i32 %act.0, ptr %actv
  %next.p = getelementptr i32, ptr %F, i64 {F_NEXT_PC}
  %next.0 = load i32, ptr %next.p
  store i32 %next.0, ptr %nextv
  switch i32 %pc, label %leave [ {cases} ]
leave:
  ret void
save:
  %s.act = load i32, ptr %actv
  %s.target = load i32, ptr %targetv
  call void @store_pc(ptr %F, i32 %s.act, i32 %s.target)
  br label %dispatch
yield:
  %y.act = load i32, ptr %actv
  %y.target = load i32, ptr %targetv
  call void @store_pc(ptr %F, i32 %y.act, i32 %y.target)
  %y.rot = getelementptr i32, ptr %F, i64 {F_ROTATE}
  store i32 1, ptr %y.rot
  ret void""".replace("@store_pc", "@rt_store_pc"))
    g.helpers[_STORE_PC.name] = _STORE_PC


_STORE_PC = schedule_ir.helper(
    "void",
    "rt_store_pc",
    "ptr %F, i32 %act, i32 %pc",
    f"""
  %pcs = load <32 x i32>, ptr %F, align 64
  %m = bitcast i32 %act to <32 x i1>
{schedule_ir.splat("v", "i32", "%pc")}
  %new = select <32 x i1> %m, <32 x i32> %v, <32 x i32> %pcs
  store <32 x i32> %new, ptr %F, align 64
  ret void""",
)


def _edges(g: Gen, ids: list[int]) -> None:
    """Emit the ways into each block: E (forward), K (backward) and S (backward in a spin loop)."""
    backwards = {found for line in g.lines for found in _BACKWARDS.findall(line)}
    for i in ids:
        for prefix, cost in (("K", 1), ("S", _SPIN_COST)):
            if f"{prefix}{i}" not in backwards:
                continue
            g.lines.append(f"""{prefix}{i}:
  store i32 {i}, ptr %targetv
  %{prefix}n{i} = load i32, ptr %nextv
  %{prefix}alone{i} = icmp eq i32 %{prefix}n{i}, 2147483647
  %{prefix}cost{i} = select i1 %{prefix}alone{i}, i32 1, i32 {cost}
  %{prefix}f{i} = load i32, ptr %fuelv
  %{prefix}g{i} = sub i32 %{prefix}f{i}, %{prefix}cost{i}
  store i32 %{prefix}g{i}, ptr %fuelv
  %{prefix}go{i} = icmp sgt i32 %{prefix}g{i}, 0
  br i1 %{prefix}go{i}, label %E{i}, label %yield""")
        g.lines.append(f"""E{i}:
  store i32 {i}, ptr %targetv
  %En{i} = load i32, ptr %nextv
  %Eo{i} = icmp ult i32 {i}, %En{i}
  br i1 %Eo{i}, label %B{i}, label %save""")


class _Writer:
    """Writes the IR of one PTX block."""

    def __init__(self, g: Gen, fn: Function, block: Block, spins: list[int]):
        self.g = g
        self.fn = fn
        self.block = block
        self.spins = spins

    def write(self) -> None:
        g, block = self.g, self.block
        if len(g.lines) > MOST_LINES:
            raise CompileLimit(f"{g.entry.name} is too large: more than {MOST_LINES} lines of LLVM IR", self.fn.line)
        g.place_label(f"B{block.id}")
        g.env, g.dirty, g.guard = {}, set(), None
        g.act = g.t("load i32, ptr %actv")
        g.line = block.body[0].line if block.body else block.end.line if block.end else self.fn.line
        if block.member_mask is not None:
            self._meet()
        for ins in block.body:
            g.line = ins.line
            g.guard = self._guard(ins)
            try:
                run(g, ins)
            except PtxError as error:
                raise error if error.line is not None else PtxError(error.reason, ins.line) from None
            except (ValueError, IndexError, TypeError) as error:
                raise PtxError(f"unsupported form of {ins.text}", ins.line) from error
        g.guard = None
        self._end()

    def _guard(self, ins: Instruction) -> str | None:
        return self.g.pred(ins.guard) if ins.guard is not None else None

    def edge(self, target: int) -> str:
        """Return the label through which this block jumps to ``target``."""
        if target > self.block.id:
            return f"E{target}"
        at = bisect_left(self.spins, target)
        spin = at < len(self.spins) and self.spins[at] <= self.block.id
        return f"{'S' if spin else 'K'}{target}"

    def _meet(self) -> None:
        """Wait until the live lanes of the member mask are here, as far as they can get here."""
        g, block = self.g, self.block
        live = g.frame_word(F_LIVE)
        whole = g.t(f"icmp eq i32 {g.act}, {live}")
        go, ask, stay, pass_ = (g.label("meet") for _ in range(4))
        g.emit(f"br i1 {whole}, label %{go}, label %{ask}")
        g.place_label(ask)
        saved = dict(g.env)
        value = g.read(block.member_mask, 32)  # type: ignore[arg-type]
        lanes = g.t(f"bitcast i32 {g.act} to <32 x i1>")
        mine = g.t(f"select <32 x i1> {lanes}, <32 x i32> {value}, <32 x i32> zeroinitializer")
        members = g.t(f"call i32 @llvm.vector.reduce.or.v32i32(<32 x i32> {mine})")
        g.env = saved
        wanted = g.t(f"and i32 {members}, {live}")
        absent = g.t(f"and i32 {wanted}, {g.t(f'xor i32 {g.act}, -1')}")
        none = g.t(f"icmp eq i32 {absent}, 0")
        forced = g.t(f"icmp ne i32 {g.frame_word(F_FORCE)}, 0")
        ready = g.t(f"or i1 {none}, {forced}")
        g.emit(f"br i1 {ready}, label %{pass_}, label %{stay}")
        g.place_label(stay)
        pointer = g.t(f"getelementptr i32, ptr %F, i64 {F_BLOCKED}")
        blocked = g.t(f"load i32, ptr {pointer}")
        g.emit(f"store i32 {g.t(f'or i32 {blocked}, {g.act}')}, ptr {pointer}")
        g.emit(f"store i32 {block.id}, ptr %targetv")
        g.emit("br label %save")
        g.place_label(pass_)
        pointer = g.t(f"getelementptr i32, ptr %F, i64 {F_FORCE}")
        g.emit(f"store i32 0, ptr {pointer}")
        g.emit(f"br label %{go}")
        g.place_label(go)

    def _flush(self) -> None:
        """Write registers that later blocks read to the frame, in the active lanes only."""
        g = self.g
        wanted = sorted((r for r in g.dirty if r in self.block.live_out), key=lambda r: r.name)
        if not wanted:
            return
        lanes = g.t(f"bitcast i32 {g.act} to <32 x i1>")
        for reg in wanted:
            value = g.env[reg]
            pointer = g.t(f"getelementptr i8, ptr %F, i64 {g.slots[g.fn.name, reg]}")
            kind = f"<32 x i{reg.width}>"
            if reg.width == 1:
                bits = g.t(f"bitcast {kind} {value} to i32")
                old = g.t(f"load i32, ptr {pointer}")
                kept = g.t(f"and i32 {old}, {g.t(f'xor i32 {g.act}, -1')}")
                new = g.t(f"or i32 {kept}, {g.t(f'and i32 {bits}, {g.act}')}")
                g.emit(f"store i32 {new}, ptr {pointer}")
            else:
                name = f"@llvm.masked.store.v32i{reg.width}.p0"
                g.emit(f"call void {name}({kind} {value}, ptr {pointer}, i32 64, <32 x i1> {lanes})")

    # -- block ends ------------------------------------------------------

    def _end(self) -> None:
        g, end = self.g, self.block.end
        if end is None:
            self._flush()
            g.emit(f"br label %{self.edge(self.block.id + 1)}")
            return
        g.line = end.line
        m = Mods(end)
        ends = {
            "bra": self._branch, "brx": self._table, "ret": self._return, "exit": self._exit, "trap": self._trap,
            "brkpt": self._trap, "call": self._call, "bar": self._barrier, "barrier": self._barrier,
            flow.STACK_END: self._overflow,
        }  # fmt: skip
        try:
            ends[end.op](end, m)
        except PtxError as error:
            raise error if error.line is not None else PtxError(error.reason, end.line) from None

    def _branch(self, end: Instruction, m: Mods) -> None:
        g = self.g
        m.has("uni")
        m.done()
        target = self.block.targets[0]
        if end.guard is None:
            self._flush()
            g.emit(f"br label %{self.edge(target)}")
            return
        value = g.pred(end.guard.reg if isinstance(end.guard, Not) else end.guard)
        bits = g.t(f"bitcast <32 x i1> {value} to i32")
        if isinstance(end.guard, Not):
            bits = g.t(f"xor i32 {bits}, -1")
        taken = g.t(f"and i32 {bits}, {g.act}")
        self._flush()
        fall = self.block.id + 1
        some, split = g.label("some"), g.label("split")
        none = g.t(f"icmp eq i32 {taken}, 0")
        g.emit(f"br i1 {none}, label %{self.edge(fall)}, label %{some}")
        g.place_label(some)
        every = g.t(f"icmp eq i32 {taken}, {g.act}")
        g.emit(f"br i1 {every}, label %{self.edge(target)}, label %{split}")
        g.place_label(split)
        g.emit(f"call void @rt_store_pc(ptr %F, i32 {g.act}, i32 {fall})")
        g.emit(f"call void @rt_store_pc(ptr %F, i32 {taken}, i32 {target})")
        self._dispatch([target])

    def _table(self, end: Instruction, m: Mods) -> None:
        g = self.g
        m.take("idx")
        m.has("uni")
        m.done()
        index = g.read(end.operands[0], 32)
        self._flush()
        lanes = g.t(f"bitcast i32 {g.act} to <32 x i1>")
        new = g.t("load <32 x i32>, ptr %F, align 64")
        for i, target in enumerate(self.block.targets):
            here = g.t(f"icmp eq <32 x i32> {index}, splat (i32 {i})")
            both = g.t(f"and <32 x i1> {here}, {lanes}")
            new = g.t(f"select <32 x i1> {both}, <32 x i32> splat (i32 {target}), <32 x i32> {new}")
        g.emit(f"store <32 x i32> {new}, ptr %F, align 64")
        self._dispatch(self.block.targets)

    def _dispatch(self, targets: list[int]) -> None:
        """Branch to the dispatcher after the lanes' block ids are saved; going backwards burns fuel here too."""
        g = self.g
        edges = {self.edge(t)[0] for t in targets if t <= self.block.id}
        if not edges:
            g.emit("br label %dispatch")
            return
        fuel = g.t("load i32, ptr %fuelv")
        left = g.t(f"sub i32 {fuel}, {_SPIN_COST if 'S' in edges else 1}")
        g.emit(f"store i32 {left}, ptr %fuelv")
        dry = g.t(f"icmp sle i32 {left}, 0")
        rest = g.label("yield")
        g.emit(f"br i1 {dry}, label %{rest}, label %dispatch")
        g.place_label(rest)
        rotate = g.t(f"getelementptr i32, ptr %F, i64 {F_ROTATE}")
        g.emit(f"store i32 1, ptr {rotate}")
        g.emit("ret void")

    def _return(self, end: Instruction, m: Mods) -> None:
        g = self.g
        m.has("uni")
        m.done()
        if self.fn.entry:
            self._leave()
            return
        self._flush()
        pointer = g.t(f"getelementptr i8, ptr %F, i64 {g.return_slots[self.fn.name]}")
        back = g.t(f"load <32 x i32>, ptr {pointer}, align 64")
        self._go_to(back)
        g.emit("br label %dispatch")

    def _go_to(self, targets: str) -> None:
        g = self.g
        lanes = g.t(f"bitcast i32 {g.act} to <32 x i1>")
        pcs = g.t("load <32 x i32>, ptr %F, align 64")
        new = g.t(f"select <32 x i1> {lanes}, <32 x i32> {targets}, <32 x i32> {pcs}")
        g.emit(f"store <32 x i32> {new}, ptr %F, align 64")

    def _exit(self, end: Instruction, m: Mods) -> None:
        m.done()
        self._leave()

    def _leave(self, lanes: str = "") -> None:
        g = self.g
        g.emit(f"call void @rt_exit(ptr %T, ptr %F, i32 {lanes or g.act})")
        g.emit("br label %dispatch")

    def _trap(self, end: Instruction, m: Mods) -> None:
        m.done()
        self._stop(FAILED)

    def _overflow(self, end: Instruction, m: Mods) -> None:
        """Emit a call below the last level of a recursion, which ends the launch."""
        self._stop(STACK_ERROR)

    def _stop(self, code: int, lanes: str = "") -> None:
        """End the launch with an error of the active lanes, or of ``lanes`` among them."""
        g = self.g
        g.call(REPORT, "ptr %T", f"i64 {code}", "i64 0")
        g.note_line()
        launch = g.word(T_LAUNCH, "ptr")
        pointer = g.t(f"getelementptr i64, ptr {launch}, i64 {L_STOP}")
        g.emit(f"store atomic i64 3, ptr {pointer} monotonic, align 8")
        self._leave(lanes)

    def _call(self, end: Instruction, m: Mods) -> None:
        g = self.g
        m.has("uni")
        m.done()
        name = call_target(end)
        after = self.block.id + 1
        if pointer_of(end) is not None:
            self._call_through(end, after)
            return
        callee = g.program.functions.get(name)
        if name in DEVICE_CALLS and callee is not None and callee.body is None:
            DEVICE_CALLS[name](g, end)
            self._flush()
            g.emit(f"br label %{self.edge(after)}")
            return
        if name == "__assertfail":
            self._flush()
            self._stop(ASSERT)
            return
        if name in GRID_CALLS and callee is not None and callee.body is None:
            self._grid(end, name)
            return
        if callee is None or callee.body is None or callee.entry:
            raise end.refuse(f"{name} is not defined in this module")
        self._flush()
        pointer = g.t(f"getelementptr i8, ptr %F, i64 {g.return_slots[name]}")
        old = g.t(f"load <32 x i32>, ptr {pointer}, align 64")
        lanes = g.t(f"bitcast i32 {g.act} to <32 x i1>")
        new = g.t(f"select <32 x i1> {lanes}, <32 x i32> splat (i32 {after}), <32 x i32> {old}")
        g.emit(f"store <32 x i32> {new}, ptr {pointer}, align 64")
        g.emit(f"br label %E{g.entries[name]}")

    def _call_through(self, end: Instruction, after: int) -> None:
        """Emit a call through a pointer: a lane whose pointer names no function ends the launch with INVALID_PC."""
        g = self.g
        missing = call_through(g, end, after)
        self._flush()
        wild = g.label("wild")
        g.emit(f"br i1 {g.t(f'icmp ne i32 {missing}, 0')}, label %{wild}, label %dispatch")
        g.place_label(wild)
        self._stop(INVALID_PC, missing)

    def _grid(self, end: Instruction, name: str) -> None:
        """Emit cudadevrt's functions for cooperative groups of a whole grid, machine code in a driver's linker."""
        g, after = self.g, self.block.id + 1
        cooperative = g.word(T_COOPERATIVE)
        give_result(g, end, name, cooperative)
        self._flush()
        if name != "cudaCGSynchronize":
            g.emit(f"br label %{self.edge(after)}")
            return
        go, alone, sync = g.label("grid"), g.label("alone"), g.label("sync")
        g.emit(f"br i1 {g.t(f'icmp ne i64 {cooperative}, 0')}, label %{go}, label %{alone}")
        g.place_label(alone)
        self._stop(FAILED)
        g.place_label(go)
        passed = g.call(schedule_ir.BARRIER, "ptr %T", "ptr %F", f"i32 {g.act}", f"i32 {BAR_COUNT - 1}", "i32 0",
                        "i32 0", "i1 true")
        g.emit(f"store i32 {after}, ptr %targetv")
        g.emit(f"br i1 {passed}, label %{sync}, label %save")
        g.place_label(sync)
        g.call(schedule_ir.GRID_SYNC, "ptr %T")
        g.emit(f"br label %{self.edge(after)}")

    def _barrier(self, end: Instruction, m: Mods) -> None:
        g = self.g
        m.has("cta")
        if end.op == "barrier":
            m.has("aligned")
        kind = m.take("sync", "arrive", "red")
        operands = list(end.operands)
        true = "i32 0"
        if kind == "red":
            m.take("popc", "and", "or")
            m.type("pred", "u32")
            value = g.pred(operands.pop())
            true = f"i32 {g.t(f'bitcast <32 x i1> {value} to i32')}"
        m.done()
        if not kind or len(operands) not in (1, 2) or (kind == "arrive" and len(operands) != 2):
            raise end.refuse()
        ident = self._uniform(operands[0])
        count = self._uniform(operands[1]) if len(operands) == 2 else "i32 0"
        self._flush()
        stay = "i1 false" if kind == "arrive" else "i1 true"
        passed = g.call(
            schedule_ir.BARRIER, "ptr %T", "ptr %F", f"i32 {g.act}", ident, count, true, stay
        )
        g.emit(f"store i32 {self.block.id + 1}, ptr %targetv")
        g.emit(f"br i1 {passed}, label %{self.edge(self.block.id + 1)}, label %save")

    def _uniform(self, op: object) -> str:
        """Return an operand that is the same in all active lanes, as ``i32 value``."""
        g = self.g
        if isinstance(op, Imm):
            return f"i32 {op.value}"
        if not isinstance(op, (Reg, Sym)):
            raise PtxError("unsupported barrier operand", g.line)
        return f"i32 {g.first_active(g.read(op, 32))}"
