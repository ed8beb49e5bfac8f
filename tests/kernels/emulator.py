"""A CUDA source of ours as a C++ program for this CPU: every thread a fiber, PTX by hand.

Runs kernels where no GPU is, slowly, and sees what a GPU may hide: a copy to shared memory arrives only when it is
waited for (until then its place holds NaN), what a kernel reads or copies must lie within its tensors and be aligned,
shared memory starts as NaN and ends where it was said to, and no thread goes on before its barrier. It does not see
races that need two threads between the same barriers, nor what PDL allows to overlap; wgmma and stores to other blocks
of a cluster end at once there, and fences between proxies do nothing. Needs g++.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4ward.kernels import nvrtc

COMPILER = shutil.which("g++")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
RUN = pytest.mark.skipif(DEVICE == "cpu" and COMPILER is None, reason="needs a GPU, or g++ for its emulation")

# A word of an asm statement -> what stands for it, of its operands
PTX: tuple[tuple[str, Callable[[list[str]], str]], ...] = (
    ("wgmma.mma_async", lambda o: "emulated_group(c, a, b)"),
    ("wgmma", lambda o: "(void)0"),
    ("fence.proxy", lambda o: "(void)0"),
    ('asm volatile("" :', lambda o: "(void)0"),
    ("bulk.prefetch", lambda o: f"prefetched({o[0]}, {o[1]})"),
    ("createpolicy", lambda o: f"{o[0]} = 0"),
    ("cp.async.cg.shared.global.L2", lambda o: f"copy({o[0]}, {o[1]}, 16, 16)"),
    ("[%0], [%1], %2", lambda o: f"copy({o[0]}, {o[1]}, {o[2]}, {o[2]})"),
    ("cp.async.cg", lambda o: f"copy({o[0]}, {o[1]}, 16, {o[2] if len(o) > 2 else 16})"),
    ("], 4, %2;", lambda o: f"copy({o[0]}, {o[1]}, 4, {o[2]})"),
    ("commit_group", lambda o: "emulated_commit()"),
    ("wait_group", lambda o: f"emulated_await({o[0]})"),
    ("ld.shared.v4.u32", lambda o: f"shared({o[4]}, &{o[0].split('.')[0]}, 16)"),
    ("ld.shared.v2.f32", lambda o: f"shared({o[2]}, &{o[0].removesuffix('.x')}, 8)"),
    ("ld.shared.u32", lambda o: f"shared({o[1]}, &{o[0]}, 4)"),
    ("ld.global.v4.u32", lambda o: f"global({o[4]}, &{o[0]}, 16)"),
    ("ld.global.cg.b32", lambda o: f"global({o[1]}, &{o[0]}, 4)"),
    ("griddepcontrol", lambda o: "(void)0"),
    ("mul.rn.f16x2", lambda o: f"{o[0]} = product({o[1]}, {o[2]}, true)"),
    ("fma.rn.bf16x2", lambda o: f"{o[0]} = product({o[1]}, {o[2]}, false)"),
    ("cvt.f32.f16", lambda o: f"{o[0]} = widened({o[1]}, true)"),
    ("cvt.rn.f16.f32", lambda o: f"{o[0]} = narrowed({o[1]}, true)"),
    ("cvt.rn.bf16.f32", lambda o: f"{o[0]} = narrowed({o[1]}, false)"),
    ("cvt.rn.f16x2.f32", lambda o: f"{o[0]} = narrowed({o[2]}, true) | narrowed({o[1]}, true) << 16"),
    ("cvt.rn.bf16x2.f32", lambda o: f"{o[0]} = narrowed({o[2]}, false) | narrowed({o[1]}, false) << 16"),
    ("ex2.approx", lambda o: f"{o[0]} = exp2f({o[1]})"),
    ("cvt.rn.f16x2.e4m3x2", lambda o: "(void)0"),  # only where __CUDA_ARCH__ says so
    ("bar.sync", lambda o: f"meet(me->cta->bars[{o[0]}], {o[1]})"),
    ("mma.sync", lambda o: "emulated_mma(c, a, b0, b1)"),
    ("aligned;\\nbarrier", lambda o: "emulated_arrive(), emulated_wait()"),
    ("barrier.cluster.arrive", lambda o: "emulated_arrive()"),
    ("barrier.cluster.wait", lambda o: "emulated_wait()"),
    ("mapa", lambda o: f"{o[0]} = {o[1]} | {o[2]} << 24"),
    ("bytes.f32", lambda o: f"shared_to({o[0]}, {o[1]}, {o[2]})"),
    ("st.async", lambda o: f"shared_to({o[0]}, float4{{{', '.join(o[1:5])}}}, {o[5]})"),
    ('"fence.mbarrier_init', lambda o: "(void)0"),
    ("mbarrier.init", lambda o: f"me->cta->owed[{o[0]}] = 0"),
    ("mbarrier.arrive.expect_tx", lambda o: f"me->cta->owed[{o[0]}] += {o[1]}"),
    ("mbarrier.try_wait", lambda o: f"yield(), {o[0]} = me->cta->owed[{o[1]}] == 0"),
    ("ld.shared::cluster.v4", lambda o: f"shared_of({o[4]}, &{o[0].split('.')[0]})"),
)

BEFORE = r"""
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <ucontext.h>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __restrict__
#define threadIdx (me->index)
#define blockIdx (me->cta->index)
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
float2 make_float2(float a, float b) { return {a, b}; }
float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
struct Index { int x, y, z; };
struct Bar { int arrived = 0, round = 0; };
struct Copy { unsigned to; const void *from; int bytes, live; };
struct Warp { uint64_t said[2][32]; unsigned a[2][32][4], b[2][32][2]; Bar bar; };
struct Cta;
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index index;
  Cta *cta;
  bool done = false;
  int round = 0;  // of the cluster's barrier, at which it arrived
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
struct Cluster;
struct Cta {
  std::vector<char> memory;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Bar bars[17];
  std::map<unsigned, int> owed;  // bytes, by barrier
  Index index;
  Cluster *cluster;
};
struct Cluster { std::vector<Cta> ctas; Bar bar; };
static Fiber *me;
static ucontext_t scheduler;
static Index gridDim, blockDim;
static std::vector<std::pair<const char *, const char *>> tensors;
[[noreturn]] void fault(const char *what) { fprintf(stderr, "emulator: %s\n", what); abort(); }
void yield() { swapcontext(&me->context, &scheduler); }
void meet(Bar &b, int threads) {
  const int round = b.round;
  if (++b.arrived == threads) b.arrived = 0, b.round++;
  else while (b.round == round) yield();
}
void __syncthreads() { meet(me->cta->bars[16], (int)me->cta->fibers.size()); }
void emulated_arrive() {
  Bar &b = me->cta->cluster->bar;
  const std::vector<Cta> &all = me->cta->cluster->ctas;
  me->round = b.round;
  if (++b.arrived == (int)(all.size() * all[0].fibers.size())) b.arrived = 0, b.round++;
}
void emulated_wait() { while (me->cta->cluster->bar.round == me->round) yield(); }
char *far(unsigned at, int bytes = 16) {  // of another block of the cluster, which `mapa` named
  std::vector<char> &memory = me->cta->cluster->ctas[at >> 24].memory;
  if (at % bytes || (at & 0xFFFFFF) + bytes > memory.size()) fault("a cluster's memory: misaligned or beyond its end");
  return memory.data() + (at & 0xFFFFFF);
}
void shared_of(unsigned at, void *to) { memcpy(to, far(at), 16); }
template <typename T> void shared_to(unsigned at, T v, unsigned told) {
  memcpy(far(at, sizeof(T)), &v, sizeof(T));
  me->cta->cluster->ctas[told >> 24].owed.at(told & 0xFFFFFF) -= sizeof(T);
}
Warp &warp_of() { return me->cta->warps[me->index.x >> 5]; }
uint64_t *told(uint64_t v) {  // what every lane says
  Warp &w = warp_of();
  const int side = w.bar.round & 1;
  w.said[side][me->index.x & 31] = v;
  meet(w.bar, 32);
  return w.said[side];
}
void __syncwarp() { told(0); }
template <typename F> unsigned over(uint64_t mine, unsigned r, F f) {
  const uint64_t *v = told(mine);
  for (int i = 0; i < 32; i++) r = f(r, (unsigned)v[i], i);
  return r;
}
unsigned __ballot_sync(unsigned, bool p) {
  return over(p, 0, [](unsigned r, unsigned v, int i) { return r | v << i; });
}
unsigned __match_any_sync(unsigned, unsigned e) {
  return over(e, 0, [e](unsigned r, unsigned v, int i) { return r | (unsigned)(v == e) << i; });
}
unsigned __reduce_max_sync(unsigned, unsigned e) {
  return over(e, 0, [](unsigned r, unsigned v, int) { return v > r ? v : r; });
}
unsigned __reduce_min_sync(unsigned, unsigned e) {
  return over(e, ~0u, [](unsigned r, unsigned v, int) { return v < r ? v : r; });
}
template <typename T> T heard(T mine, int lane) {
  uint64_t u = 0;
  memcpy(&u, &mine, sizeof(T));
  const uint64_t *v = told(u);
  if (lane >= 0 && lane < 32) memcpy(&mine, v + lane, sizeof(T));
  return mine;
}
template <typename T> T __shfl_xor_sync(unsigned, T v, int by) { return heard(v, (me->index.x & 31) ^ by); }
template <typename T> T __shfl_sync(unsigned, T v, int from) { return heard(v, from); }
template <typename T> T __shfl_up_sync(unsigned, T v, int by) { return heard(v, (me->index.x & 31) - by); }
void __threadfence() {}
int atomicAdd(int *p, int v) { const int old = *p; *p += v; return old; }
int min(int a, int b) { return a < b ? a : b; }
int max(int a, int b) { return a > b ? a : b; }
unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
int __popc(unsigned v) { return __builtin_popcount(v); }
int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
float __expf(float v) { return expf(v); }
float __fdividef(float a, float b) { return a / b; }
void sincospif(float v, float *s, float *c) { *s = sin(M_PI * v), *c = cos(M_PI * v); }
float rsqrtf(float v) { return 1 / sqrtf(v); }
float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
unsigned __float_as_uint(float f) { unsigned v; memcpy(&v, &f, 4); return v; }
unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return ((uint64_t)high << 32 | low) >> (by & 31); }
unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (((uint64_t)b << 32 | a) >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
void *emulated_memory() { return me->cta->memory.data(); }
uint64_t __cvta_generic_to_shared(const void *p) { return (const char *)p - me->cta->memory.data(); }
void inside(uint64_t at, int bytes) {
  if (at % bytes || at + bytes > me->cta->memory.size()) fault("shared memory: misaligned or beyond its end");
}
void shared(unsigned at, void *to, int bytes) { inside(at, bytes); memcpy(to, me->cta->memory.data() + at, bytes); }
void readable(const void *p, int bytes) {
  if ((uintptr_t)p % bytes) fault("memory: misaligned");
  for (auto [begin, end] : tensors) if ((const char *)p >= begin && (const char *)p + bytes <= end) return;
  fault("memory: outside of every tensor");
}
void prefetched(const void *from, int bytes) {
  if (bytes % 16 || (uintptr_t)from % 16) fault("a prefetch: misaligned");
  readable(from, 16), readable((const char *)from + bytes - 16, 16);
}
template <typename T> T __ldcg(const T *at) { readable(at, sizeof(T)); return *at; }
void global(const void *at, void *to, int bytes) { readable(at, bytes); memcpy(to, at, bytes); }
void copy(unsigned to, const void *from, int bytes, int live) {
  inside(to, bytes);
  if (live) readable(from, bytes);
  me->open.push_back({to, from, bytes, live});
  memset(me->cta->memory.data() + to, 0xFF, bytes);
}
void emulated_commit() { me->groups.push_back(std::move(me->open)); me->open.clear(); }
void emulated_await(int n) {
  for (; (int)me->groups.size() > n; me->groups.pop_front())
    for (auto &c : me->groups.front())
      if (c.live) memcpy(me->cta->memory.data() + c.to, c.from, c.bytes);
      else memset(me->cta->memory.data() + c.to, 0, c.bytes);
}
float widened(unsigned v, bool half) {
  if (!half) return __uint_as_float(v << 16);
  const uint16_t bits = v;
  _Float16 f;
  memcpy(&f, &bits, 2);
  return f;
}
uint16_t narrowed(float f, bool half) {
  uint16_t v;
  if (half) { const _Float16 h = (_Float16)f; memcpy(&v, &h, 2); return v; }
  const unsigned u = __float_as_uint(f);
  return f != f ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
unsigned product(unsigned a, unsigned b, bool half) {
  auto one = [&](int by) -> unsigned {
    return narrowed(widened(a >> by & 0xFFFF, half) * widened(b >> by & 0xFFFF, half), half);
  };
  return one(0) | one(16) << 16;
}
void emulated_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {  // m16n8k16 of the PTX ISA
  Warp &w = warp_of();
  const int lane = me->index.x & 31, g = lane >> 2, t = lane & 3, side = w.bar.round & 1;
  for (int i = 0; i < 4; i++) w.a[side][lane][i] = a[i];
  w.b[side][lane][0] = b0, w.b[side][lane][1] = b1;
  meet(w.bar, 32);
  auto element = [](unsigned v, int i) { return (double)widened(i ? v >> 16 : v & 0xFFFF, HALF); };
  for (int i = 0; i < 4; i++) {
    const int row = g + 8 * (i >> 1), column = 2 * t + (i & 1);
    double sum = 0;
    for (int k = 0; k < 16; k++)
      sum += element(w.a[side][(row & 7) * 4 + (k & 7) / 2][(row >> 3) + 2 * (k >> 3)], k & 1) *
             element(w.b[side][column * 4 + (k & 7) / 2][k >> 3], k & 1);
    c[i] = (float)(c[i] + sum);
  }
}
// m64nNk16 with A in registers: a warp's 16 rows need nothing of the other warps'. b: its descriptor.
template <int N> void emulated_group(float (&c)[N][4], const unsigned (&a)[4], uint64_t b) {
  const unsigned at = (b & 0x3FFF) << 4, n_step = (b >> 32 & 0x3FFF) << 4;
  if (b >> 62 != 1) fault("only 128-byte swizzle");
  const int lane = me->index.x & 31;
  for (int t = 0; t < N; t++) {
    unsigned b0, b1;
    const unsigned from = at + t * n_step + (lane >> 2) * 128 + (lane & 3) * 4;
    auto swizzled = [](unsigned at) { return at ^ (at >> 3 & 112); };
    shared(swizzled(from), &b0, 4), shared(swizzled(from + 16), &b1, 4);
    emulated_mma(c[t], a, b0, b1);
  }
}
"""

AFTER = r"""
static const uint64_t *given;
static float real(uint64_t v) { return __uint_as_float((unsigned)v); }
static void begin() { CALL; me->done = true; yield(); }
extern "C" void run(const uint64_t *arguments, const int *grid, int threads, int bytes, const char **ranges,
                    int count) {
  given = arguments, gridDim = {grid[0], grid[1], grid[2]}, blockDim = {threads, 1, 1};
  tensors.clear();
  for (int i = 0; i < count; i++) tensors.push_back({ranges[2 * i], ranges[2 * i + 1]});
  for (int i = 0; i < grid[0] * grid[2]; i++)
    for (int y = 0; y < grid[1]; y += CLUSTER) {
      Cluster cluster;
      cluster.ctas.resize(CLUSTER);
      for (int r = 0; r < CLUSTER; r++) {
        Cta &cta = cluster.ctas[r];
        cta.memory.assign(bytes, (char)0xFF), cta.warps.resize((threads + 31) / 32);
        cta.index = {i % grid[0], y + r, i / grid[0]}, cta.cluster = &cluster, cta.fibers.resize(threads);
        for (int i = 0; i < threads; i++) {
          Fiber &f = cta.fibers[i];
          f.stack.reset(new char[96 << 10]), f.index = {i, 0, 0}, f.cta = &cta;
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = 96 << 10;
          f.context.uc_link = &scheduler;
          makecontext(&f.context, begin, 0);
        }
      }
      for (bool any = true; any;) {
        any = false;
        for (Cta &cta : cluster.ctas)
          for (Fiber &f : cta.fibers)
            if (!f.done) any = true, me = &f, swapcontext(&scheduler, &f.context);
      }
    }
}
"""


def translated(source: nvrtc.Source) -> str:
    path = nvrtc.HERE / source.file

    def text(of: Path) -> str:
        return re.sub(r'#include "([^"]+)"', lambda m: text(of.parent / m[1]), of.read_text())

    def statement(found: re.Match[str]) -> str:
        operands = re.findall(r'"[=+]?[a-z]"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)', found[0])
        return next(make for word, make in PTX if word in found[0])(operands) + ";"

    code = text(path).replace(
        "extern __shared__ __align__(1024) uint4 shared_memory[];", "#define shared_memory ((uint4 *)emulated_memory())"
    )
    code = re.sub(
        r'#if HALF\n(  asm\("mma[^\n]*\n)#else\n[^\n]*\n#endif\n', r"\1", code
    )  # one of two of equal operands
    code = re.sub(r'\basm\b(?: volatile)?\s*\((?:[^;"]|"[^"]*")*\);', statement, code)
    signature = re.search(rf"\b{source.entry}\(([^)]*)\)\s*{{", code)
    assert signature, f"{source.entry} is not in {path.name}"
    values = []
    for i, parameter in enumerate(signature[1].split(",")):
        kind = parameter.strip().rsplit(" ", 1)[0].replace("__restrict__", "") + "*" * parameter.count("*")
        value = f"given[{i}]"
        values.append(
            f"({kind.split('*')[0]}*){value}"
            if "*" in parameter
            else f"real({value})"
            if "float" in kind
            else f"(int){value}"
        )
    defines = "".join(
        f"#define {name} {value}\n" for name, value in {"CLUSTER": 1, "BLOCKED": 0, **dict(source.defines)}.items()
    )
    return defines + BEFORE + code + AFTER.replace("CALL", f"{source.entry}({', '.join(values)})")


class Emulated:
    """In place of nvrtc.Kernel."""

    def __init__(self, source: nvrtc.Source, folder: Path) -> None:
        assert COMPILER is not None
        code = translated(source)
        library = folder / f"{hashlib.sha256(code.encode()).hexdigest()[:24]}.so"
        if not library.exists():
            program = library.with_suffix(".cpp")
            program.write_text(code)
            command = [COMPILER, "-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-o", str(library) + "~", str(program)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
            Path(str(library) + "~").replace(library)
        self.library = ctypes.CDLL(str(library))

    def __call__(self, grid: Sequence[int], block: int, shared_bytes: int, *args: Any, pdl: bool = False) -> None:
        values, ranges = [], []
        for value in args:
            if isinstance(value, torch.Tensor):
                start = value.untyped_storage().data_ptr()
                ranges += [start, start + value.untyped_storage().nbytes()]
                values.append(value.data_ptr())
            elif isinstance(value, float):
                values.append(struct.unpack("<I", struct.pack("<f", value))[0])
            else:
                values.append((value or 0) & (1 << 64) - 1)
        self.library.run(
            (ctypes.c_uint64 * len(values))(*values), (ctypes.c_int * 3)(*grid), block, shared_bytes,
            (ctypes.c_void_p * len(ranges))(*ranges), len(ranges) // 2,
        )  # fmt: skip


def kernels(folder: Path) -> Callable[[nvrtc.Source, torch.device], Emulated]:
    """In place of nvrtc.kernel. folder: keeps what is compiled."""
    return functools.cache(lambda source, device: Emulated(source, folder))


@contextlib.contextmanager
def machine(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a test of kernels: the same numbers every time, NaN from torch.empty; without a GPU they run emulated."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if DEVICE == "cpu":
        patch.setattr(nvrtc, "kernel", kernels(request.config.cache.mkdir("emulator")))
    yield
    torch.use_deterministic_algorithms(False)
