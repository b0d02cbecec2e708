"""Divergence, barriers, memory faults, cancellation: how kernels run."""

# ruff: noqa: E501 - kernels in one line each

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from rgpu.server.device.cpu.ptx import MemoryRanges, parse_module
from tests.support.cpu.ptx import HEADER, compile_cuda, cuda, launch, pack, ptx

K = 'extern "C" __global__ void '


def test_vector_add_with_a_partial_warp():
    module = cuda(K + "add(const float*a,const float*b,float*c,int n){int i=blockIdx.x*blockDim.x+threadIdx.x;if(i<n)c[i]=a[i]+b[i];}")
    a, b = np.arange(1000, dtype="f4"), np.ones(1000, "f4")
    c = np.zeros(1000, "f4")
    assert launch(module, "add", 10, 100, a, b, c, 1000).error == 0
    assert np.array_equal(c, a + b)


def test_a_wild_address_stops_only_its_own_lane():
    module = cuda(K + "w(int*o,long long far,int bad){int i=threadIdx.x;o[i==bad?far:i]=i+1;}")
    o = np.zeros(64, "i4")
    result = module.launch("w", (1, 1, 1), (64, 1, 1), 0, pack(o) + (1 << 40).to_bytes(8, "little") + pack(5),
                           MemoryRanges([(o.ctypes.data, o.ctypes.data + o.nbytes)]))  # fmt: skip
    assert result.error == 700 and result.address == o.ctypes.data + (4 << 40)
    expected = np.arange(1, 65)
    expected[5] = 0
    assert np.array_equal(o, expected)


@pytest.mark.parametrize("access", ["ld.global.b32 r, [d+1];", "ld.b32 r, [d+2];", "ld.global.v2.b32 {r,s}, [d+4];",
                                    "st.global.b64 [d+4], d;", "atom.global.add.u32 r, [d+3], 1;",
                                    "ld.shared.b32 r, [m+2];"])  # fmt: skip
def test_misaligned(access):
    module = ptx(".entry k(.param .u64 a) { .reg .b64 d; .reg .b32 r, s; .shared .align 8 .b8 m[64];\n"
                 "ld.param.u64 d, [a];" + access + " ret; }")  # fmt: skip
    result = launch(module, "k", 1, 32, np.zeros(4096 // 4, "i4"))
    assert result.error == 716


@pytest.mark.parametrize("access", ["ld.global.b32 r, [d];", "ld.b8 r, [d];", "st.global.v4.b32 [d], {r,r,r,r};",
                                    "red.global.add.u32 [d], 1;", "ld.shared.b32 r, [m+64];", "ld.local.b32 r, [z+64];",
                                    "ld.const.b32 r, [0];", "ld.global.b32 r, [d+-4100];"])  # fmt: skip
def test_out_of_bounds(access):
    module = ptx(".entry k(.param .u64 a) { .reg .b64 d; .reg .b32 r; .shared .align 8 .b8 m[64];\n"
                 ".local .align 8 .b8 z[64]; ld.param.u64 d, [a]; add.s64 d, d, 4096;" + access + " ret; }")  # fmt: skip
    buffer = np.zeros(4096 // 8 + 2, "i8")
    start = -(-buffer.ctypes.data // 16) * 16
    result = module.launch("k", (1, 1, 1), (1, 1, 1), 0, start.to_bytes(8, "little"), MemoryRanges([(start, start + 4096)]))
    assert result.error == 700


def test_many_ranges():
    arrays = [np.full(8, i, "i4") for i in range(50)]
    table = np.array([a.ctypes.data for a in arrays], "u8")
    out = np.zeros(50, "i4")
    module = cuda(K + "g(int**t,int*o){o[threadIdx.x]=t[threadIdx.x][threadIdx.x%8];}")
    valid = MemoryRanges([(a.ctypes.data, a.ctypes.data + a.nbytes) for a in (*arrays, table, out)])
    assert module.launch("g", (1, 1, 1), (50, 1, 1), 0, pack(table, out), valid).error == 0
    assert np.array_equal(out, np.arange(50))


def test_divergent_loops_and_switches():
    module = cuda(K + """d(int*o){int i=threadIdx.x,s=0;
        for(int k=0;k<i;k++){ if(k%3==0) continue; if(k>40) break; switch((k*i)&7){case 0:s+=1;break;case 1:s+=20;
        case 2:s+=3;break;case 3:s^=5;break;case 5:s-=1;break;case 7:s*=3;default:s+=7;} } o[i]=s; }""")  # fmt: skip

    def reference(i: int) -> int:
        s = 0
        for k in range(i):
            if k % 3 == 0:
                continue
            if k > 40:
                break
            c = (k * i) & 7
            if c == 0:
                s += 1
            elif c == 1:
                s += 23
            elif c == 2:
                s += 3
            elif c == 3:
                s ^= 5
            elif c == 5:
                s -= 1
            else:
                s = (s * 3 if c == 7 else s) + 7
        return s

    o = np.zeros(128, "i4")
    assert launch(module, "d", 1, 128, o).error == 0
    assert o.tolist() == [((reference(i) + 2**31) % 2**32) - 2**31 for i in range(128)]


def test_brx_idx():
    module = ptx(""".entry k(.param .u64 a) { .reg .b64 d, e; .reg .b32 i, r; ld.param.u64 d, [a]; mov.u32 i, %tid.x;
        mad.wide.u32 e, i, 4, d; and.b32 i, i, 3;
        T: .branchtargets L0, L1, L2, L3;
        brx.idx i, T;
        L0: mov.u32 r, 10; bra.uni E; L1: mov.u32 r, 11; bra.uni E; L2: mov.u32 r, 12; bra E; L3: mov.u32 r, 13;
        E: st.global.u32 [e], r; ret; }""")
    o = np.zeros(32, "i4")
    assert launch(module, "k", 1, 32, o).error == 0
    assert o.tolist() == [10 + i % 4 for i in range(32)]


def test_lanes_reconverge_before_a_shuffle():
    module = cuda(K + """s(int*o){int i=threadIdx.x,v=i; if(i&1){for(int k=0;k<i;k++) v+=o[k]+1;} else v*=2;
        o[i]=0; int t=__shfl_xor_sync(~0u,v,1); o[i]=t; }""")
    o = np.zeros(32, "i4")
    assert launch(module, "s", 1, 32, o).error == 0
    own = [2 * i if i % 2 else 2 * i for i in range(32)]
    assert o.tolist() == [own[i ^ 1] for i in range(32)]


def test_member_masks_of_half_warps():
    module = cuda(K + """h(int*o){int i=threadIdx.x,r; if(i<16) r=__shfl_sync(0xffff,i,3); else r=__shfl_sync(0xffff0000u,i,20);
        unsigned b=__ballot_sync(~0u,i%3==0); o[i]=r+(__popc(b)<<8); }""")
    o = np.zeros(32, "i4")
    assert launch(module, "h", 1, 32, o).error == 0
    assert o.tolist() == [(3 if i < 16 else 20) + (11 << 8) for i in range(32)]


def test_barriers_order_shared_memory():
    module = cuda(K + """b(int*o){extern __shared__ int s[]; int i=threadIdx.x,n=blockDim.x; s[i]=i; __syncthreads();
        for(int k=1;k<n;k*=2){ int v=i>=k?s[i-k]:0; __syncthreads(); s[i]+=v; __syncthreads(); } o[blockIdx.x*n+i]=s[i]; }""")
    o = np.zeros(3 * 200, "i4")
    assert launch(module, "b", 3, 200, o, shared=800).error == 0
    assert o.tolist() == np.cumsum(np.arange(200)).tolist() * 3


def test_barrier_with_threads_that_left_and_reductions():
    module = cuda(K + """b(int*o){int i=threadIdx.x; if(i>=150) return; int c=__syncthreads_count(i%5==0);
        int a=__syncthreads_and(i<150), r=__syncthreads_or(i==149), z=__syncthreads_and(i!=7); o[i]=c*8+a*4+r*2+z; }""")
    o = np.zeros(150, "i4")
    assert launch(module, "b", 1, 200, o).error == 0
    assert set(o.tolist()) == {30 * 8 + 6}


def test_named_barriers_with_thread_counts():
    module = ptx(""".entry k(.param .u64 a) { .reg .b64 d; .reg .b32 i, r; .reg .pred p; .shared .align 4 .b8 m[4];
        ld.param.u64 d, [a]; mov.u32 i, %tid.x; setp.lt.u32 p, i, 32; @p bra PRODUCER;
        bar.sync 3, 64; ld.shared.u32 r, [m]; mad.wide.u32 d, i, 4, d; st.global.u32 [d], r; ret;
        PRODUCER: mov.u32 r, 77; st.shared.u32 [m], r; bar.arrive 3, 64; ret; }""")
    o = np.zeros(64, "i4")
    assert launch(module, "k", 1, 64, o).error == 0
    assert o.tolist() == [0] * 32 + [77] * 32


def test_a_barrier_that_cannot_complete_is_an_error():
    module = ptx(".entry k() { .reg .b32 i; bar.sync 1, 64; ret; }")
    result = launch(module, "k", 1, 32)
    assert result.error == 719 and "barrier" in result.detail


LOCK = """l(int*lock,int*n){ bool done=false; while(!done){ if(atomicCAS(lock,0,1)==0){ int v=*(volatile int*)n;
    *(volatile int*)n=v+1; __threadfence(); atomicExch(lock,0); done=true; } } }"""
SPIN = """l(int*lock,int*n){ while(atomicCAS(lock,0,1)!=0); int v=*(volatile int*)n; *(volatile int*)n=v+1;
    __threadfence(); atomicExch(lock,0); }"""


@pytest.mark.parametrize("source", [LOCK, SPIN], ids=["if-inside-while", "plain-spin"])
def test_spin_locks_make_progress(source):
    lock, n = np.zeros(1, "i4"), np.zeros(1, "i4")
    assert launch(cuda(K + source), "l", 4, 64, lock, n).error == 0
    assert n[0] == 256 and lock[0] == 0


def test_warps_of_a_block_can_wait_for_each_other():
    module = cuda(K + "w(volatile int*f,int*o){ if(threadIdx.x<32){ while(f[0]==0); o[threadIdx.x]=f[1]; } else { f[1]=9; __threadfence(); f[0]=1; } }")
    f, o = np.zeros(2, "i4"), np.zeros(32, "i4")
    assert launch(module, "w", 1, 64, f, o).error == 0
    assert set(o.tolist()) == {9}


def test_blocks_can_wait_for_each_other():
    """A launch begins with one thread; one that takes long gets the others, so that this ends."""
    module = cuda(K + "w(volatile int*f,int*o){ if(blockIdx.x==0){ while(f[0]==0); o[0]=f[1]; } else { f[1]=9; __threadfence(); f[0]=1; } }")
    f, o = np.zeros(2, "i4"), np.zeros(1, "i4")
    assert launch(module, "w", 2, 32, f, o).error == 0
    assert o[0] == 9


@pytest.mark.parametrize("body", ["for(;;) atomicAdd(o,1);", "while(*(volatile int*)o==0);",
                                  "if(threadIdx.x&1) while(*(volatile int*)o==0); else for(;;) o[1]++;"])  # fmt: skip
def test_cancel(body):
    module = cuda(K + "c(int*o){" + body + "}")
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    start = time.monotonic()
    o = np.zeros(2, "i4")
    result = launch(module, "c", 8, 64, o, cancel=cancel)
    assert (result.error, result.detail) == (719, "cancelled")
    assert time.monotonic() - start < 5


def test_two_launches_at_once():
    module = cuda(K + "w(volatile int*a,volatile int*b){ b[0]=1; while(a[0]==0); b[1]=a[0]; }")
    a, b = np.zeros(2, "i4"), np.zeros(2, "i4")
    results = []
    threads = [threading.Thread(target=lambda x=x, y=y: results.append(launch(module, "w", 1, 1, x, y)))
               for x, y in ((a, b), (b, a))]  # fmt: skip
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert [r.error for r in results] == [0, 0] and a.tolist() == b.tolist() == [1, 1]


def test_device_functions_with_struct_parameters_and_divergence():
    module = cuda("""struct P{int a; float b[3]; char c;};
        __device__ __noinline__ float g(P p,int k){ return p.b[k%3]*p.a+p.c; }
        __device__ __noinline__ float f(P p,int k){ if(k&1) return g(p,k)+1; p.a=k; return g(p,k+1); }
        """ + K + "d(float*o){int i=threadIdx.x; P p={i,{1.5f,2.f,4.f},(char)(i-5)}; o[i]=i%3?f(p,i):-1.f; }")
    o = np.zeros(64, "f4")
    assert launch(module, "d", 1, 64, o).error == 0

    def g(a: int, c: int, k: int) -> float:
        return (1.5, 2.0, 4.0)[k % 3] * a + c

    want = [(g(i, i - 5, i) + 1 if i & 1 else g(i, i - 5, i + 1)) if i % 3 else -1 for i in range(64)]
    assert o.tolist() == want


def test_barrier_inside_a_device_function():
    module = cuda("__device__ __noinline__ int f(int*s,int i){ s[i]=i; __syncthreads(); return s[(i+33)%96]; }"
                  + K + "d(int*o){ __shared__ int s[96]; o[threadIdx.x]=f(s,threadIdx.x); }")  # fmt: skip
    o = np.zeros(96, "i4")
    assert launch(module, "d", 2, 96, o).error == 0
    assert o.tolist() == [(i + 33) % 96 for i in range(96)]


def test_generic_addresses_of_every_space():
    source = ("__constant__ int c[4]={5,6,7,8}; __device__ int g[4]={1,2,3,4}; __device__ int* gp=g+1;"
              "__device__ __noinline__ int get(const int*p,int i){return p[i];}"
              + K + """v(int*o,int n){ __shared__ int s[4]; int l[4]; int i=threadIdx.x; s[i]=i*10; for(int k=0;k<4;k++) l[k]=i+k;
        __syncthreads(); o[i]=get(s,i)+1000*get(l,n)+100000*get(c,i)+10000000*get(g,i)+gp[0]; }""")  # fmt: skip
    parsed = parse_module(compile_cuda(source))
    memory = np.zeros(256, "u1")
    addresses, at = {}, -(-memory.ctypes.data // 64) * 64
    for name in parsed.globals:
        addresses[name] = at
        at += 64
    for name, data in parsed.initial_image(addresses).items():
        start = addresses[name] - memory.ctypes.data
        memory[start : start + len(data)] = np.frombuffer(data, "u1")
    o = np.zeros(4, "i4")
    valid = MemoryRanges([(x.ctypes.data, x.ctypes.data + x.nbytes) for x in (memory, o)])
    result = parsed.link(addresses).launch("v", (1, 1, 1), (4, 1, 1), 0, pack(o, 2), valid)
    assert result.error == 0
    assert o.tolist() == [i * 10 + 1000 * (i + 2) + 100000 * (5 + i) + 10000000 * (1 + i) + 2 for i in range(4)]
    assert {n: i.space for n, i in parsed.globals.items()} == {"c": "const", "g": "global", "gp": "global"}


def test_printf():
    source = K + r'p(int n){ printf("%d %s %5.2f %c|%llu|%x%%\n", (int)threadIdx.x-1, "text", n*0.5, 65, 1ull<<40, 255); }'
    parsed = parse_module(compile_cuda(source))
    memory = np.zeros(512, "u1")
    addresses = {name: memory.ctypes.data + 64 * i for i, name in enumerate(parsed.globals)}
    for name, data in parsed.initial_image(addresses).items():
        start = addresses[name] - memory.ctypes.data
        memory[start : start + len(data)] = np.frombuffer(data, "u1")
    lines: list[bytes] = []
    valid = MemoryRanges([(memory.ctypes.data, memory.ctypes.data + 512)])
    result = parsed.link(addresses).launch("p", (1, 1, 1), (3, 1, 1), 0, pack(3), valid, printf=lines.append)
    assert result.error == 0
    assert lines == [f"{i} text  1.50 A|1099511627776|ff%\n".encode() for i in (-1, 0, 1)]


def test_trap_and_assert():
    assert launch(cuda(K + "t(int n){ if(threadIdx.x==n) __trap(); }"), "t", 1, 32, 3).error == 719
    assert launch(cuda(K + "t(int n){ if(threadIdx.x==n) __trap(); }"), "t", 1, 32, 99).error == 0
    text = """.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
        .entry k() { { .param .b64 p0; .param .b64 p1; .param .b32 p2; .param .b64 p3; .param .b64 p4;
        call.uni __assertfail, (p0, p1, p2, p3, p4); } ret; }"""
    assert launch(ptx(text), "k", 1, 1).error == 710


def test_special_registers():
    module = cuda(K + """s(unsigned*o){ unsigned l,w,m,n,d; asm("mov.u32 %0,%%laneid;":"=r"(l)); asm("mov.u32 %0,%%warpid;":"=r"(w));
        asm("mov.u32 %0,%%lanemask_lt;":"=r"(m)); asm("mov.u32 %0,%%nwarpid;":"=r"(n)); asm("mov.u32 %0,%%dynamic_smem_size;":"=r"(d));
        int t=threadIdx.x+blockDim.x*(threadIdx.y+blockDim.y*threadIdx.z);
        int b=blockIdx.x+gridDim.x*(blockIdx.y+gridDim.y*blockIdx.z); o[b*60+t]=l+w*100+n*1000+d*10000+(__popc(m)==l?1<<30:0)+b*(1<<20); }""")
    o = np.zeros(60 * 8, "u4")
    assert launch(module, "s", (2, 2, 2), (5, 4, 3), o, shared=16).error == 0
    want = [t % 32 + t // 32 * 100 + 2000 + 160000 + (1 << 30) + b * (1 << 20) for b in range(8) for t in range(60)]
    assert o.tolist() == want


def test_numba_ptx():
    from numba import cuda as numba_cuda
    from numba import float32, int32, void

    def kernel(x, y, n):
        i = numba_cuda.grid(1)
        s = numba_cuda.shared.array(64, float32)
        s[numba_cuda.threadIdx.x] = x[i] if i < n else 0
        numba_cuda.syncthreads()
        if i < n:
            y[i] = s[numba_cuda.threadIdx.x ^ 1] ** 2 + n // 3

    text, _ = numba_cuda.compile_ptx(kernel, void(float32[::1], float32[::1], int32), cc=(7, 5))
    parsed = parse_module(text)
    ((name, info),) = parsed.kernels.items()
    x, y = np.arange(128, dtype="f4"), np.zeros(128, "f4")
    addresses = {g: y.ctypes.data for g in parsed.globals}

    def array(a: np.ndarray) -> list[int]:
        return [0, 0, a.size, a.itemsize, a.ctypes.data, a.size, a.itemsize]

    params = b"".join(v.to_bytes(8, "little") for v in (*array(x), *array(y), 128))[: info.param_bytes]
    valid = MemoryRanges([(a.ctypes.data, a.ctypes.data + a.nbytes) for a in (x, y)])
    assert parsed.link(addresses).launch(name, (2, 1, 1), (64, 1, 1), 0, params, valid).error == 0
    assert np.array_equal(y, x.reshape(-1, 2)[:, ::-1].ravel() ** 2 + 42)


def test_kernel_info():
    text = HEADER.replace("8.4", "7.8") + """.const .align 4 .b8 c[12];
        .visible .entry k(.param .u8 a, .param .u64 b, .param .align 16 .b8 s[20]) .reqntid 8, 4 {
        .reg .b32 r<40>; .shared .align 16 .b8 m[100]; .local .align 8 .b8 l[24]; mov.u32 r0, m; ret; }"""
    info = parse_module(text).kernels["k"]
    assert [(p.offset, p.size) for p in info.params] == [(0, 1), (8, 8), (16, 20)]
    assert (info.param_bytes, info.static_shared, info.local_bytes, info.max_threads) == (36, 100, 32, 32)
    assert (info.const_bytes, info.ptx_version, info.binary_version, info.num_regs) == (12, 78, 75, 16)
