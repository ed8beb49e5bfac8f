// y = x W^T for 9 to 64 tokens on SM90, as linear.cu has it.
//
// Defines: as there, but GROUPS (of four warps) instead of WARPS, and RING (stages).
//
// Warpgroups multiply decoded registers with x in shared memory, and decode the next half of a record meanwhile. Each
// warp computes R tiles of 16 rows; CLUSTER CTAs part K. x of 64 columns lies as the tensor cores read it with 128-byte
// swizzle: a token has 8 chunks of 16 bytes, the products' k in order, chunk i at place i ^ (token & 7). A warp copies a
// token's 32 words at once: 128 bytes of memory, and each to a bank of its own.
//
// Shared memory: RING slots of a stage, x of 128 columns and each warp's records. They are gone through backwards, so
// that the last stage is in slot 0; then, in a cluster, every CTA's parts of the sums may come to lie from slot 1 on
// while the last one is still being multiplied, and behind all that a barrier a warp, which counts their bytes.

#include "mma.cuh"

constexpr int WARPS_ALL = GROUPS * 4;
constexpr int X_HALF = NT * 1024;  // of 64 columns
constexpr int STAGE = (2 * X_HALF + WARPS_ALL * R * SLOT + 1023) / 1024 * 1024;
constexpr int AHEAD = RING - 2;  // stages on their way; the last products of one read x while the next one starts
__device__ __forceinline__ void copy4(u32 to, const void *from, bool live) {  // zeros unless live
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(live ? 4 : 0) : "memory");
}
// Nothing is published, and what was read has been awaited: a release would flush every write to the GPU
__device__ __forceinline__ void arrive_at_cluster() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
#if HALF
#define TYPES ".f32.f16.f16 "
#else
#define TYPES ".f32.bf16.bf16 "
#endif
#define SUMS(t) "+f"(c[t][0]), "+f"(c[t][1]), "+f"(c[t][2]), "+f"(c[t][3])

__device__ __forceinline__ void multiply_group(float (&c)[NT][4], const u32 (&a)[4], unsigned long long b) {
#if NT == 8
  asm volatile("{.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16" TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
               "%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
               : SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5), SUMS(6), SUMS(7)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#elif NT == 4
  asm volatile("{.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n32k16" TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
               : SUMS(0), SUMS(1), SUMS(2), SUMS(3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#else
  asm volatile("{.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n16k16" TYPES
               "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;}"
               : SUMS(0), SUMS(1) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
extern "C" __global__ void SHARE __launch_bounds__(WARPS_ALL * 32, CTAS)
warpgroup(const u8 *__restrict__ w, const float *__restrict__ scale, const u16 *x, const u16 *__restrict__ bias, u16 *y,
          int m, int n, int k, int pitch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = CLUSTER > 1 ? blockIdx.y : 0;
  const int steps = (k + 127) >> 7, tiles = (n + 15) >> 4;
  const int share = (steps + CLUSTER - 1) / CLUSTER, first = rank * share, stages = max(min(steps - first, share), 0);
  const int tile0 = blockIdx.x * (WARPS_ALL * R) + warp;  // then every WARPS_ALL-th
  const u32 base = shared_at(shared_memory);
  auto slot_of = [&](int stage) { return base + (stages - 1 - stage) % RING * STAGE; };  // the last one's is the first
  let_next_kernel_start();
  float2 by[R];  // asked for in time
#pragma unroll
  for (int r = 0; r < R; r++) by[r] = row_scales(scale, min(tile0 + r * WARPS_ALL, tiles - 1), n, lane);
#if CLUSTER > 1
  constexpr int OWN = (R * NT + CLUSTER - 1) / CLUSTER;  // of a tile's fragments, that the warp adds up at the end
  constexpr u32 PART = WARPS_ALL * OWN * 512;            // of them, from one CTA
  const u32 told = base + max(min(RING, share) * STAGE, int(STAGE + CLUSTER * PART)) + warp * 32;  // when they are there
  if (lane == 0)
    asm volatile("mbarrier.init.shared.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(told) : "memory");
  __syncwarp();
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(told),
                 "r"((R * NT - rank + CLUSTER - 1) / CLUSTER * CLUSTER * 512) : "memory");
#endif

  const u32 own_w = 2 * X_HALF + warp * (R * SLOT), record = tile0 * steps + first;
  auto request_w = [&](int stage, u32 slot) {
#pragma unroll
    for (int r = 0; r < R; r++)
      if (tile0 + r * WARPS_ALL < tiles)
        fetch(slot + own_w + r * SLOT, w + u32(record + r * WARPS_ALL * steps + stage) * RECORD + lane * 16, lane);
  };
  constexpr int ROWS_X = (NT * 8 + WARPS_ALL - 1) / WARPS_ALL;  // of x, that a warp copies; the last for absent tokens
  u32 row[ROWS_X];
#pragma unroll
  for (int i = 0; i < ROWS_X; i++) row[i] = min(warp + i * WARPS_ALL, m - 1) * pitch * 2 + lane * 4;
  const int column = first * 128 + lane * 2;
  const u32 own_x = warp * 128 + ((lane ^ warp) & 7) * 16 + (lane >> 3) * 4;
  auto request_x = [&](int stage, u32 slot) {
    const u8 *from = (const u8 *)(x + (first + stage) * 128);
#pragma unroll
    for (int i = 0; i < ROWS_X; i++) {
      const u32 to = slot + (own_x ^ (i * WARPS_ALL & 4) * 16) + i * WARPS_ALL * 128;
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (NT * 8 % WARPS_ALL == 0 || i + 1 < ROWS_X || warp + i * WARPS_ALL < NT * 8)
          copy4(to + h * X_HALF, from + row[i] + h * 128, column + stage * 128 + h * 64 < k);
    }
  };
  constexpr int EARLY = AHEAD < 2 ? AHEAD : 2;  // stages of weights before the wait, as above
#pragma unroll
  for (int s = 0; s < EARLY; s++)
    if (s < stages) request_w(s, slot_of(s));
  after_previous_kernel();
#pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    if (s >= EARLY && s < stages) request_w(s, slot_of(s));
    if (s < stages) request_x(s, slot_of(s));
    commit();
  }

  float c[R][NT][4] = {};
  u32 slot = slot_of(0), next = slot_of(AHEAD);
  auto advance = [&](u32 slot) { return slot == base ? base + (RING - 1) * STAGE : slot - STAGE; };
  for (int stage = 0; stage < stages; stage++) {
    await<AHEAD - 1>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();  // everybody's x of this stage has arrived, and everybody has left the slot that is filled next
    u32 a[2][4][4];
    const unsigned long long b = slot >> 4 | (unsigned long long)(1024 >> 4) << 32 | 1ull << 62;
#pragma unroll
    for (int r = 0; r < R; r++) {
      const Step v = read(slot + own_w + r * SLOT, lane);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        unsigned long long at[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          decode(a[h][j], v, scales_of(v, h), h, j);
          at[j] = b + (h * X_HALF + j * 32 >> 4);
#pragma unroll
          for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[h][j][i]));
          asm volatile("" : "+l"(at[j]));
        }
        // What products read is made before the fence, in registers of its own, and only products that add to the sums of
        // the next ones are pending where the loop ends; else the compiler awaits each product
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int j = 0; j < 4; j++) multiply_group(c[r], a[h][j], at[j]);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (r == 0 && h == 0) {
          if (stage + AHEAD < stages) request_w(stage + AHEAD, next), request_x(stage + AHEAD, next);
          commit();
        }
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // for the half before: the next one's registers
        if (CLUSTER > 1 && r == 0 && h == 0 && stage + 1 == stages) arrive_at_cluster();  // only this stage is in use
      }
    }
    if (R > 1) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    slot = advance(slot), next = advance(next);
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  await<0>();

  auto finish = [&](int i, const float4 &v) {
    const int r = i / NT, tile = tile0 + r * WARPS_ALL;
    if (tile < tiles) store(y, v, r ? by[R - 1] : by[0], bias, tile, i % NT, m, n, lane);
  };
#if CLUSTER > 1
  // Fragment i is CTA i % CLUSTER's, whose same warp gets all parts of it, where its ring was behind the last stage
  if (stages == 0) arrive_at_cluster();
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  const u32 place = base + STAGE + (warp * OWN * 32 + lane) * 16;
#pragma unroll
  for (int to = 0; to < CLUSTER; to++) {
    u32 far, far_told;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(place + rank * PART), "r"(to));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far_told) : "r"(told), "r"(to));
#pragma unroll
    for (int i = to; i < R * NT; i += CLUSTER) {
      const float(&v)[4] = c[i / NT][i % NT];
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
                       far + i / CLUSTER * 512), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(far_told) : "memory");
    }
  }
  for (u32 done = 0; !done;)
    asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                 "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(told) : "memory");
  const u8 *const parts = (u8 *)shared_memory + (place - base);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (i * CLUSTER + rank >= R * NT) break;
    float4 v = *(float4 *)(parts + i * 512);
#pragma unroll
    for (int from = 1; from < CLUSTER; from++) add(v, *(float4 *)(parts + from * PART + i * 512));
    finish(i * CLUSTER + rank, v);
  }
#else
#pragma unroll
  for (int i = 0; i < R * NT; i++) finish(i, fragment(c[i / NT][i % NT]));
#endif
}
