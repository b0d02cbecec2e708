"""Kernels that change every element of a buffer: what a replay repeats, and what none can repeat.

Tests of a worker run them, and `bench/move/move_load.py` does.
"""

from __future__ import annotations

PTX = rb"""
.version 7.0
.target sm_75
.address_size 64

.visible .entry touch(.param .u64 data, .param .u32 count, .param .u32 add)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<4>;
    ld.param.u64 %d1, [data]; ld.param.u32 %r1, [count]; ld.param.u32 %r5, [add];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p, %r2, %r1;
    @%p bra end;
    mul.wide.u32 %d2, %r2, 4; add.u64 %d1, %d1, %d2;
    ld.global.u32 %r6, [%d1];
    mad.lo.u32 %r6, %r6, 1664525, %r5;
    add.u32 %r6, %r6, %r2;
    st.global.u32 [%d1], %r6;
end: ret;
}

.visible .entry stamp(.param .u64 total)
{
    .reg .b32 %r<4>; .reg .b64 %d<4>;
    ld.param.u64 %d1, [total];
    mov.u64 %d2, %globaltimer;
    cvt.u32.u64 %r1, %d2;
    st.global.u32 [%d1], %r1;
    ret;
}

.visible .entry mix(.param .u64 data, .param .u32 count, .param .u64 total)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<6>;
    ld.param.u64 %d1, [data]; ld.param.u32 %r1, [count]; ld.param.u64 %d3, [total];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p, %r2, %r1;
    @%p bra end;
    ld.global.u32 %r5, [%d3];
    mul.wide.u32 %d2, %r2, 4; add.u64 %d1, %d1, %d2;
    ld.global.u32 %r6, [%d1];
    mad.lo.u32 %r6, %r6, 1664525, %r5;
    add.u32 %r6, %r6, %r2;
    st.global.u32 [%d1], %r6;
end: ret;
}

.visible .entry sum(.param .u64 data, .param .u32 count, .param .u64 total)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<6>; .reg .f32 %f<4>;
    ld.param.u64 %d1, [data]; ld.param.u32 %r1, [count]; ld.param.u64 %d3, [total];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p, %r2, %r1;
    @%p bra end;
    cvt.rn.f32.u32 %f1, %r2; mul.f32 %f1, %f1, 0f3DCCCCCD;
    atom.global.add.f32 %f2, [%d3], %f1;
end: ret;
}
"""
TOUCH, STAMP, MIX, SUM = range(4)  #: functions of the module, in its order
