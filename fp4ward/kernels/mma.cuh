// What the kernels for few tokens share: copies, exact decode, products on tensor cores, scales and stores.
//
// Kernels feed mma.m16n8k16 with weights as A (16 rows) and tokens as B (8 columns). The order of k inside a product
// is free as long as A and B agree: lane t of a quad holds 16 contiguous k, so one NVFP4 scale group. Its four fragments
// of 64 columns are then 16 (FP8: 32) contiguous bytes of weight and 32 contiguous bytes of x, with no shuffle.
//
// Memory: a record is 16 rows x 128 columns (docs: cuda_linear.py), records of 16 rows lie one after the other. A lane
// copies what it will read itself, asynchronously, into its warp's ring in shared memory: no barrier guards weights.
//
// Decode, no table. A code's sign and its other bits are laid (by prepare) so that one shift and one AND put them where
// bf16 has sign, lowest exponent bits and highest mantissa bits: value * 2^-126 (FP8: 2^-120), subnormal codes included.
// One product with the block scale times 2^119 (FP8: 2^120) is exact: code * scale * 2^-7 has 6 significant bits. f16
// alike: 2^-14 and 2^7 (FP8: 2^-8 and 2^8). NVFP4's 2^7 and the row's f32 scale multiply the f32 sum.
//
// Defines: W4 (1 NVFP4, 0 FP8), HALF (1 f16, 0 bf16), BLOCKED (FP8 with an f32 scale for 128 columns), PDL (launch early,
// wait for the previous kernel before x is read), CLUSTER (CTAs that share work; 1 unless given), GROUPS (warpgroup.cu).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr u32 ALL = 0xFFFFFFFFu;  // lanes

#ifndef BLOCKED
#define BLOCKED 0
#endif
#ifndef PDL
#define PDL 0
#endif

constexpr int PIECES = W4 ? 2 : 4;                                // 16-byte pieces of a record that a lane reads
constexpr int RECORD = PIECES * 512 + (W4 ? 128 : BLOCKED ? 64 : 0);  // bytes in memory
constexpr int SLOT = PIECES * 512 + (W4 ? 128 : BLOCKED ? 256 : 0);   // bytes in a ring
constexpr u32 SIGN = 0x80008000u;
constexpr u32 REST = W4 ? 0x01C001C0u : 0x07F007F0u;  // a code's bits but the sign, where bf16 wants them
constexpr float FACTOR = W4 ? 128.0f : 1.0f;

struct Step {
  uint4 code[PIECES];
  u32 scale;     // NVFP4: e5m3 bytes: columns 0-63 of row g and g + 8, columns 64-127 of both
  float2 block;  // FP8: the block scales of rows g and g + 8
};

__device__ __forceinline__ void copy16(u32 to, const void *from, bool live) {  // zeros unless live
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void await() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ uint4 load16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ u32 load4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ int load_l2(const void *at) {  // never from this multiprocessor's own, older copy
  int v;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ void after_previous_kernel() {
#if PDL && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if PDL && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Weights are read once a step, or nearly, and shall not push out of L2 what is read again. Not beside wgmma, where ptxas 13.0 gives
// such a copy registers that hold something else.
template <int SIZE> __device__ __forceinline__ void copy_once(u32 to, const void *from) {
#ifdef GROUPS
  if (SIZE == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(SIZE) : "memory");
#else
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  if (SIZE == 16)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(SIZE),
                 "l"(policy) : "memory");
#endif
}
// codes: a lane's first piece.
__device__ __forceinline__ void fetch(u32 slot, const u8 *codes, int lane) {
#pragma unroll
  for (int i = 0; i < PIECES; i++) copy_once<16>(slot + i * 512 + lane * 16, codes + i * 512);
  const u8 *scales = codes + (PIECES * 512 - lane * 16 + (W4 ? lane * 4 : (lane >> 2) * 8));
  if (W4) copy_once<4>(slot + PIECES * 512 + lane * 4, scales);
  if (BLOCKED) copy_once<8>(slot + PIECES * 512 + lane * 8, scales);
}
__device__ __forceinline__ Step read(u32 slot, int lane) {
  Step s = {};
#pragma unroll
  for (int i = 0; i < PIECES; i++) s.code[i] = load16(slot + i * 512 + lane * 16);
  if (W4) s.scale = load4(slot + PIECES * 512 + lane * 4);
  if (BLOCKED)
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(s.block.x), "=f"(s.block.y)
                 : "r"(slot + PIECES * 512 + lane * 8));
  return s;
}

__device__ __forceinline__ u32 merge(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
__device__ __forceinline__ u32 place(u32 v) {  // sign and rest at bf16's places -> the operand
  return HALF ? (v & SIGN) | (v << 3 & REST << 3) : v & (SIGN | REST);
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 d;
#if HALF
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else  // a product, for SM80 too: minus zero added
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(SIGN));
#endif
  return d;
}
// v << by as a product, which the compiler cannot see to be a shift: shifts and logic share one unit at half rate, and
// it is what decoding waits for. gridDim.z is 1.
__device__ __forceinline__ u32 shifted(u32 v, int by) { return v * (gridDim.z << by); }
// Byte 2 h (+ 1: row g + 8) of `word`, e5m3, as two equal bf16 of 2^119 its value (f16: 2^7).
__device__ __forceinline__ u32 widen(u32 word, int h, int row) {
  const u32 v = __byte_perm(word, 0, 0x4040 + (2 * h + row) * 0x101);
  return HALF ? shifted(v, 7) : shifted(v, 4) + 0x70007000u;
}
__device__ __forceinline__ u32 word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

struct Scales {  // of rows g and g + 8, what the bits of codes are multiplied with
  u32 up, down;
};
__device__ __forceinline__ Scales scales_of(const Step &s, int h) {
  constexpr u32 one = HALF ? 0x5C005C00u : 0x7B807B80u;  // 2^8, 2^120
  return W4 ? Scales{widen(s.scale, h, 0), widen(s.scale, h, 1)} : Scales{one, one};
}
// The A fragment of columns 64 h + 16 t + 4 j ... + 3 of every lane t of a quad.
__device__ __forceinline__ void decode(u32 (&a)[4], const Step &s, const Scales &by, int h, int j) {
  if (W4) {
    const u32 v = word(s.code[h], j);
    a[0] = times(place(shifted(v, 6)), by.up);
    a[1] = times(place(shifted(v, 2)), by.down);
    a[2] = times(place(__funnelshift_r(v, v, 4)), by.up);
    a[3] = times(place(merge(0x00400040u, v >> 8, v)), by.down);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 v = word(s.code[(2 * h + (j >> 1)) % PIECES], (j & 1) * 2 + i);
      a[2 * i] = times(place(v), by.up);
      a[2 * i + 1] = times(place(merge(0x07000700u, v >> 4, v << 4)), by.down);
    }
  }
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void add(float4 &a, const float4 &b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }
__device__ __forceinline__ float4 fragment(const float (&c)[4]) { return make_float4(c[0], c[1], c[2], c[3]); }
__device__ __forceinline__ float widen16(u16 v) {
  float f;
  if (HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  else f = __uint_as_float(u32(v) << 16);
  return f;
}
__device__ __forceinline__ u16 narrow16(float f) {
  u16 v;
  if (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
}

template <bool F16 = HALF> __device__ __forceinline__ u32 pair(float low, float high) {
  u32 v;
  if (F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// Of rows g and g + 8 of a tile.
__device__ __forceinline__ float2 row_scales(const float *scale, int tile, int n, int lane) {
  const int row = tile * 16 + (lane >> 2);
  if (BLOCKED) return make_float2(1.0f, 1.0f);
  return make_float2(scale[min(row, n - 1)] * FACTOR, scale[min(row + 8, n - 1)] * FACTOR);
}
// v: a lane's part of a C fragment: row g tokens 2 t and 2 t + 1, row g + 8 the same.
__device__ __forceinline__ void store(u16 *y, const float4 &v, float2 scale, const u16 *bias, int tile, int nt, int m,
                                      int n, int lane) {
  const int token = nt * 8 + (lane & 3) * 2;
  const float out[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = tile * 16 + (lane >> 2) + r * 8;
    if (row >= n) continue;
    const float factor = r ? scale.y : scale.x, more = bias ? widen16(bias[row]) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (token + i < m) y[(token + i) * n + row] = narrow16(fmaf(out[2 * r + i], factor, more));
  }
}

extern __shared__ __align__(1024) uint4 shared_memory[];
__device__ __forceinline__ u32 shared_at(const void *p) { return (u32)__cvta_generic_to_shared(p); }

#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define SHARE __cluster_dims__(1, CLUSTER, 1)
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The sum of what every CTA of the cluster has at this place of its shared memory, in the order of their ranks.
__device__ __forceinline__ float4 cluster_sum(const float4 *own) {
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int rank = 0; rank < CLUSTER; rank++) {
    u32 far;
    float4 part;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(shared_at(own)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w) : "r"(far) : "memory");
    add(v, part);
  }
  return v;
}
#else
#define SHARE
__device__ __forceinline__ void meet_cluster() { __syncthreads(); }
__device__ __forceinline__ float4 cluster_sum(const float4 *own) { return *own; }
#endif
