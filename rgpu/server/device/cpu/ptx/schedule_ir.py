"""Helpers that decide what runs next: lanes of a warp, warps of a block, blocks of a grid.

A warp runs the group of lanes with the lowest program counter (block id), so
lanes that diverged meet again.  All state that outlives a basic block is in
the warp's frame; a warp can therefore stop at any block boundary, by simply
returning, and be entered again: barriers need neither threads nor coroutines.
"""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.jit import Helper, helper
from rgpu.server.device.cpu.ptx.layout import (
    B_EXPECTED,
    B_RESULT_ALL,
    B_RESULT_TRUE,
    B_TRUE,
    BAR_COUNT,
    BAR_WORDS,
    F_ACTIVE,
    F_BAR,
    F_BLOCKED,
    F_FORCE,
    F_LAST,
    F_LIVE,
    F_NEXT_PC,
    F_REGISTERS,
    F_ROTATE,
    F_TID_X,
    F_WAITING,
    FAILED,
    L_GRID_ARRIVED,
    L_GRID_TURN,
    L_NEXT_BLOCK,
    L_STOP,
    NO_PC,
    PICK_DONE,
    PICK_WAIT,
    T_BARS,
    T_BLOCKS,
    T_CTA_X,
    T_CTA_Y,
    T_CTA_Z,
    T_ENTRY,
    T_FRAME_SIZE,
    T_FRAMES,
    T_GRID_X,
    T_GRID_Y,
    T_KERNEL,
    T_LAUNCH,
    T_LIVE_THREADS,
    T_LOCAL,
    T_LOCAL_STRIDE,
    T_SHARED,
    T_SHARED_END,
    T_THREADS,
    T_WARP,
    T_WARP_LOCAL,
    T_WARPS,
)
from rgpu.server.device.cpu.ptx.ops.memory_ir import IOTA32, REPORT, field, splat


def frame(name: str, index: int, base: str = "%F") -> str:
    """Return IR that loads 32-bit word ``index`` of a frame."""
    return f"  %{name}.p = getelementptr i32, ptr {base}, i64 {index}\n  %{name} = load i32, ptr %{name}.p"


PICK = helper(
    "i32",
    "rt_pick",
    "ptr %T, ptr %F",
    f"""
  %pcs = load <32 x i32>, ptr %F, align 64
{frame("live", F_LIVE)}
{frame("waiting", F_WAITING)}
{frame("blocked", F_BLOCKED)}
{frame("rotate", F_ROTATE)}
{frame("prev", F_LAST)}
  %nw = xor i32 %waiting, -1
  %awake = and i32 %live, %nw
  %nb = xor i32 %blocked, -1
  %run = and i32 %awake, %nb
  %norun = icmp eq i32 %run, 0
  br i1 %norun, label %stuck, label %have
stuck:
  %asleep = icmp eq i32 %awake, 0
  br i1 %asleep, label %leave, label %force
leave:
  %dead = icmp eq i32 %live, 0
  %code = select i1 %dead, i32 {PICK_DONE}, i32 {PICK_WAIT}
  ret i32 %code
force:
  %fp = getelementptr i32, ptr %F, i64 {F_FORCE}
  store i32 1, ptr %fp
  br label %have
have:
  %set = phi i32 [ %run, %0 ], [ %awake, %force ]
  %setv = bitcast i32 %set to <32 x i1>
  %cand = select <32 x i1> %setv, <32 x i32> %pcs, <32 x i32> splat (i32 {NO_PC})
  %least = call i32 @llvm.vector.reduce.umin.v32i32(<32 x i32> %cand)
  %turn = icmp ne i32 %rotate, 0
  br i1 %turn, label %fair, label %chosen
fair:
  store i32 0, ptr %rotate.p
{splat("vprev", "i32", "%prev")}
  %after = icmp ugt <32 x i32> %cand, %vprev
  %cand2 = select <32 x i1> %after, <32 x i32> %cand, <32 x i32> splat (i32 {NO_PC})
  %next = call i32 @llvm.vector.reduce.umin.v32i32(<32 x i32> %cand2)
  %wrap = icmp eq i32 %next, {NO_PC}
  %turned = select i1 %wrap, i32 %least, i32 %next
  br label %chosen
chosen:
  %pc = phi i32 [ %least, %have ], [ %turned, %fair ]
{splat("vpc", "i32", "%pc")}
  %here = icmp eq <32 x i32> %pcs, %vpc
  %hereb = bitcast <32 x i1> %here to i32
  %act = and i32 %hereb, %awake
  %nact = xor i32 %act, -1
  %rest = and i32 %awake, %nact
  %restv = bitcast i32 %rest to <32 x i1>
  %others = select <32 x i1> %restv, <32 x i32> %pcs, <32 x i32> splat (i32 {NO_PC})
  %least2 = call i32 @llvm.vector.reduce.umin.v32i32(<32 x i32> %others)
  %blocked2 = and i32 %blocked, %nact
  store i32 %blocked2, ptr %blocked.p
  store i32 %pc, ptr %prev.p
  %actp = getelementptr i32, ptr %F, i64 {F_ACTIVE}
  store i32 %act, ptr %actp
  %npp = getelementptr i32, ptr %F, i64 {F_NEXT_PC}
  store i32 %least2, ptr %npp
  ret i32 %pc""",
)

# Releases every lane that waits at barrier %id.
RELEASE = helper(
    "void",
    "rt_release",
    "ptr %T, i32 %id",
    f"""
{field("nw", "%T", T_WARPS)}
{field("fs", "%T", T_FRAMES, "ptr")}
{field("size", "%T", T_FRAME_SIZE)}
  %slot = add i32 %id, {F_BAR}
  %bo = mul i32 %id, {BAR_WORDS}
  %bi = add i32 %bo, {T_BARS}
  %b = getelementptr i64, ptr %T, i32 %bi
  %tp = getelementptr i64, ptr %b, i64 {B_TRUE}
  %t = load i64, ptr %tp
  %arrived = load i64, ptr %b
  %rtp = getelementptr i64, ptr %b, i64 {B_RESULT_TRUE}
  store i64 %t, ptr %rtp
  %rap = getelementptr i64, ptr %b, i64 {B_RESULT_ALL}
  store i64 %arrived, ptr %rap
  store i64 0, ptr %b
  store i64 0, ptr %tp
  br label %loop
loop:
  %w = phi i64 [ 0, %0 ], [ %w2, %body ]
  %more = icmp ult i64 %w, %nw
  br i1 %more, label %body, label %done
body:
  %w2 = add i64 %w, 1
  %fo = mul i64 %w, %size
  %f = getelementptr i8, ptr %fs, i64 %fo
  %mp = getelementptr i32, ptr %f, i32 %slot
  %m = load i32, ptr %mp
  store i32 0, ptr %mp
{frame("wt", F_WAITING, "%f")}
  %nm = xor i32 %m, -1
  %left = and i32 %wt, %nm
  store i32 %left, ptr %wt.p
  br label %loop
done:
  ret void""",
)

# Lanes %act arrive at barrier %id; true when that completes it.  %count is 0
# for "every thread of the block", %stay is false for bar.arrive.
BARRIER = helper(
    "i1",
    "rt_bar",
    "ptr %T, ptr %F, i32 %act, i32 %rawid, i32 %count, i32 %true, i1 %stay",
    f"""
  %id = and i32 %rawid, {BAR_COUNT - 1}
  %bo = mul i32 %id, {BAR_WORDS}
  %bi = add i32 %bo, {T_BARS}
  %b = getelementptr i64, ptr %T, i32 %bi
  %n32 = call i32 @llvm.ctpop.i32(i32 %act)
  %n = zext i32 %n32 to i64
  %old = load i64, ptr %b
  %arrived = add i64 %old, %n
  store i64 %arrived, ptr %b
  %t = and i32 %true, %act
  %t32 = call i32 @llvm.ctpop.i32(i32 %t)
  %t64 = zext i32 %t32 to i64
  %tp = getelementptr i64, ptr %b, i64 {B_TRUE}
  %told = load i64, ptr %tp
  %tnew = add i64 %told, %t64
  store i64 %tnew, ptr %tp
{field("alive", "%T", T_LIVE_THREADS)}
  %c64 = zext i32 %count to i64
  %ep = getelementptr i64, ptr %b, i64 {B_EXPECTED}
  store i64 %c64, ptr %ep
  %all = icmp eq i32 %count, 0
  %expected = select i1 %all, i64 %alive, i64 %c64
  %full = icmp uge i64 %arrived, %expected
  br i1 %full, label %complete, label %wait
complete:
  call void @rt_release(ptr %T, i32 %id)
  ret i1 true
wait:
  br i1 %stay, label %sleep, label %pass
sleep:
  %slot = add i32 %id, {F_BAR}
  %mp = getelementptr i32, ptr %F, i32 %slot
  %m = load i32, ptr %mp
  %m2 = or i32 %m, %act
  store i32 %m2, ptr %mp
{frame("wt", F_WAITING)}
  %wt2 = or i32 %wt, %act
  store i32 %wt2, ptr %wt.p
  ret i1 false
pass:
  ret i1 true""",
    (RELEASE,),
)

# A block, all of whose threads have arrived, waits for the other blocks of a cooperative grid: each of them has an
# operating-system thread of its own.
GRID_SYNC = helper(
    "void",
    "rt_grid_sync",
    "ptr %T",
    f"""
{field("L", "%T", T_LAUNCH, "ptr")}
{field("blocks", "%T", T_BLOCKS)}
  %turnp = getelementptr i64, ptr %L, i64 {L_GRID_TURN}
  %countp = getelementptr i64, ptr %L, i64 {L_GRID_ARRIVED}
  %sp = getelementptr i64, ptr %L, i64 {L_STOP}
  %turn = load atomic i64, ptr %turnp acquire, align 8
  %before = atomicrmw add ptr %countp, i64 1 acq_rel
  %count = add i64 %before, 1
  %last = icmp eq i64 %count, %blocks
  br i1 %last, label %open, label %wait
open:
  store atomic i64 0, ptr %countp monotonic, align 8
  %next = add i64 %turn, 1
  store atomic i64 %next, ptr %turnp release, align 8
  ret void
wait:
  %y = call i32 @sched_yield()
  %now = load atomic i64, ptr %turnp acquire, align 8
  %opened = icmp ne i64 %now, %turn
  %stop = load atomic i64, ptr %sp monotonic, align 8
  %halt = icmp ne i64 %stop, 0
  %go = or i1 %opened, %halt
  br i1 %go, label %done, label %wait
done:
  ret void""",
    (),
    "declare i32 @sched_yield()",
)

# Lanes %act end.  Threads that have ended no longer count at full-block barriers.
EXIT = helper(
    "void",
    "rt_exit",
    "ptr %T, ptr %F, i32 %act",
    f"""
{frame("live", F_LIVE)}
  %nact = xor i32 %act, -1
  %left = and i32 %live, %nact
  store i32 %left, ptr %live.p
  %n32 = call i32 @llvm.ctpop.i32(i32 %act)
  %n = zext i32 %n32 to i64
{field("alive", "%T", T_LIVE_THREADS)}
  %alive2 = sub i64 %alive, %n
  store i64 %alive2, ptr %alive.p
  br label %loop
loop:
  %id = phi i32 [ 0, %0 ], [ %id2, %next ]
  %more = icmp ult i32 %id, {BAR_COUNT}
  br i1 %more, label %body, label %done
body:
  %bo = mul i32 %id, {BAR_WORDS}
  %bi = add i32 %bo, {T_BARS}
  %b = getelementptr i64, ptr %T, i32 %bi
  %arrived = load i64, ptr %b
  %some = icmp ne i64 %arrived, 0
  %ep = getelementptr i64, ptr %b, i64 {B_EXPECTED}
  %e = load i64, ptr %ep
  %whole = icmp eq i64 %e, 0
  %full = icmp uge i64 %arrived, %alive2
  %c1 = and i1 %some, %whole
  %c2 = and i1 %c1, %full
  br i1 %c2, label %free, label %next
free:
  call void @rt_release(ptr %T, i32 %id)
  br label %next
next:
  %id2 = add i32 %id, 1
  br label %loop
done:
  ret void""",
    (RELEASE,),
)

# A warp's frame at the start of a block: which lanes exist, and their positions. Registers start at zero so that a run
# never depends on an earlier one; the thread indices are the launcher's, the same for every block.
START_WARP = helper(
    "void",
    "rt_start_warp",
    "ptr %T, ptr %F, i64 %w",
    f"""
{field("size", "%T", T_FRAME_SIZE)}
  call void @llvm.memset.p0.i64(ptr align 64 %F, i8 0, i64 {4 * F_TID_X}, i1 false)
  %regs = getelementptr i8, ptr %F, i64 {F_REGISTERS}
  %regn = sub i64 %size, {F_REGISTERS}
  call void @llvm.memset.p0.i64(ptr align 64 %regs, i8 0, i64 %regn, i1 false)
{field("entry", "%T", T_ENTRY)}
  %e32 = trunc i64 %entry to i32
{splat("ev", "i32", "%e32")}
  store <32 x i32> %ev, ptr %F, align 64
  %w32 = trunc i64 %w to i32
  %first = shl i32 %w32, 5
{splat("fv", "i32", "%first")}
  %lin = add <32 x i32> %fv, {IOTA32}
{field("n", "%T", T_THREADS)}
  %n32 = trunc i64 %n to i32
{splat("nv", "i32", "%n32")}
  %in = icmp ult <32 x i32> %lin, %nv
  %live = bitcast <32 x i1> %in to i32
  %lp = getelementptr i32, ptr %F, i64 {F_LIVE}
  store i32 %live, ptr %lp
  ret void""",
)

# One block: its warps take turns until all have ended.  If some wait and none can run, a barrier can never complete.
BLOCK = helper(
    "void",
    "rt_block",
    "ptr %T",
    f"""
{field("L", "%T", T_LAUNCH, "ptr")}
{field("nw", "%T", T_WARPS)}
{field("fs", "%T", T_FRAMES, "ptr")}
{field("size", "%T", T_FRAME_SIZE)}
{field("kernel", "%T", T_KERNEL, "ptr")}
{field("local", "%T", T_LOCAL)}
{field("stride", "%T", T_LOCAL_STRIDE)}
  %wlocal = shl i64 %stride, 5
{field("sh", "%T", T_SHARED, "ptr")}
  %sh0 = ptrtoint ptr %sh to i64
{field("she", "%T", T_SHARED_END)}
  %shn = sub i64 %she, %sh0
  call void @llvm.memset.p0.i64(ptr %sh, i8 0, i64 %shn, i1 false)
  %bars = getelementptr i64, ptr %T, i64 {T_BARS}
  call void @llvm.memset.p0.i64(ptr %bars, i8 0, i64 {BAR_COUNT * BAR_WORDS * 8}, i1 false)
{field("n", "%T", T_THREADS)}
  %alivep = getelementptr i64, ptr %T, i64 {T_LIVE_THREADS}
  store i64 %n, ptr %alivep
  br label %init
init:
  %iw = phi i64 [ 0, %0 ], [ %iw2, %initbody ]
  %imore = icmp ult i64 %iw, %nw
  br i1 %imore, label %initbody, label %round
initbody:
  %iw2 = add i64 %iw, 1
  %io = mul i64 %iw, %size
  %if = getelementptr i8, ptr %fs, i64 %io
  call void @rt_start_warp(ptr %T, ptr %if, i64 %iw)
  br label %init
round:
  br label %warps
warps:
  %w = phi i64 [ 0, %round ], [ %w2, %next ]
  %any = phi i1 [ false, %round ], [ %any2, %next ]
  %rest = phi i1 [ false, %round ], [ %rest2, %next ]
  %more = icmp ult i64 %w, %nw
  br i1 %more, label %body, label %roundend
body:
  %w2 = add i64 %w, 1
  %o = mul i64 %w, %size
  %f = getelementptr i8, ptr %fs, i64 %o
{frame("live", F_LIVE, "%f")}
{frame("wt", F_WAITING, "%f")}
  %alive = icmp ne i32 %live, 0
  %nwt = xor i32 %wt, -1
  %awake = and i32 %live, %nwt
  %can = icmp ne i32 %awake, 0
  br i1 %can, label %enter, label %next
enter:
  %wp = getelementptr i64, ptr %T, i64 {T_WARP}
  store i64 %w, ptr %wp
  %lo = mul i64 %w, %wlocal
  %la = add i64 %local, %lo
  %lap = getelementptr i64, ptr %T, i64 {T_WARP_LOCAL}
  store i64 %la, ptr %lap
  call void %kernel(ptr %T, ptr %f)
  %sp = getelementptr i64, ptr %L, i64 {L_STOP}
  %stop = load atomic i64, ptr %sp monotonic, align 8
  %halt = icmp ne i64 %stop, 0
  br i1 %halt, label %done, label %next
next:
  %ran = phi i1 [ false, %body ], [ true, %enter ]
  %any2 = or i1 %any, %ran
  %rest2 = or i1 %rest, %alive
  br label %warps
roundend:
  br i1 %any, label %round, label %quiet
quiet:
  br i1 %rest, label %deadlock, label %done
deadlock:
  call void @rt_report(ptr %T, i64 {FAILED}, i64 0)
  %dsp = getelementptr i64, ptr %L, i64 {L_STOP}
  store i64 2, ptr %dsp
  br label %done
done:
  ret void""",
    (REPORT, START_WARP),
)

# The loop of each operating-system thread: blocks, until none is left.
WORKER: Helper = helper(
    "void",
    "rt_worker",
    "ptr %T",
    f"""
{field("L", "%T", T_LAUNCH, "ptr")}
{field("total", "%T", T_BLOCKS)}
{field("gx", "%T", T_GRID_X)}
{field("gy", "%T", T_GRID_Y)}
  %next = getelementptr i64, ptr %L, i64 {L_NEXT_BLOCK}
  %sp = getelementptr i64, ptr %L, i64 {L_STOP}
  br label %loop
loop:
  %stop = load atomic i64, ptr %sp monotonic, align 8
  %halt = icmp ne i64 %stop, 0
  br i1 %halt, label %done, label %take
take:
  %b = atomicrmw add ptr %next, i64 1 monotonic
  %more = icmp ult i64 %b, %total
  br i1 %more, label %run, label %done
run:
  %x = urem i64 %b, %gx
  %yz = udiv i64 %b, %gx
  %y = urem i64 %yz, %gy
  %z = udiv i64 %yz, %gy
  %xp = getelementptr i64, ptr %T, i64 {T_CTA_X}
  store i64 %x, ptr %xp
  %yp = getelementptr i64, ptr %T, i64 {T_CTA_Y}
  store i64 %y, ptr %yp
  %zp = getelementptr i64, ptr %T, i64 {T_CTA_Z}
  store i64 %z, ptr %zp
  call void @rt_block(ptr %T)
  br label %loop
done:
  ret void""",
    (BLOCK,),
)
