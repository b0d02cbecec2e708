"""Layout of the structures that compiled code and the launcher share.

Three kinds of memory: one *launch* record for the whole grid, one *thread*
record per operating-system thread running blocks, one *frame* per warp.
"""

from __future__ import annotations

LANES = 32

# Launch record: 64-bit words.
L_ERROR, L_ADDRESS, L_STOP, L_NEXT_BLOCK, L_LINE, L_GRID_ARRIVED, L_GRID_TURN = range(7)
LAUNCH_WORDS = 8

# Thread record: 64-bit words.  The three windows (shared, local, parameters)
# are [base, end) pairs which generic addresses may fall into.
(
    T_LAUNCH, T_RANGES, T_RANGE_COUNT, T_CACHE,
    T_SHARED, T_SHARED_END, T_LOCAL, T_LOCAL_END, T_PARAM, T_PARAM_END,
    T_LOCAL_STRIDE, T_GRID_X, T_GRID_Y, T_GRID_Z, T_BLOCK_X, T_BLOCK_Y, T_BLOCK_Z,
    T_CTA_X, T_CTA_Y, T_CTA_Z, T_THREADS, T_WARPS, T_BLOCKS,
    T_FRAMES, T_FRAME_SIZE, T_KERNEL, T_ENTRY, T_LIVE_THREADS,
    T_WARP, T_WARP_LOCAL, T_GRID_ID, T_SM, T_DYNAMIC_SHARED, T_GLOBALS,
    T_PRINTF, T_TOKEN, T_COOPERATIVE, T_TEXTURES, T_TEXTURE_COUNT, T_CONDITION,
    T_HEAP,
) = range(41)  # fmt: skip
T_BARS = 41  # sixteen barriers of BAR_WORDS words
BAR_COUNT, BAR_WORDS = 16, 8
B_ARRIVED, B_TRUE, B_EXPECTED, B_RESULT_TRUE, B_RESULT_ALL = range(5)
THREAD_WORDS = T_BARS + BAR_COUNT * BAR_WORDS

# Frame: 32-bit words.  The lanes' block ids come first, then masks and
# scheduling state, the masks of lanes waiting at each barrier, and the lanes'
# thread indices.  Registers that live across blocks follow at F_REGISTERS bytes.
F_PC = 0
(F_LIVE, F_WAITING, F_BLOCKED, F_FORCE, F_ROTATE, F_LAST, F_ACTIVE, F_NEXT_PC) = range(32, 40)
F_BAR = 48
F_TID_X, F_TID_Y, F_TID_Z = 64, 96, 128
F_REGISTERS = 160 * 4

NO_PC = 0x7FFFFFFF  # "no other lane is pending"
PICK_DONE, PICK_WAIT = -1, -2

# Results of a launch, numbered as the CUDA driver API numbers them.
OK, ILLEGAL_ADDRESS, ASSERT, STACK_ERROR, MISALIGNED, INVALID_PC, FAILED = 0, 700, 710, 714, 716, 718, 719
