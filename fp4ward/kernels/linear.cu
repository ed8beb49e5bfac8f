// y = x W^T for few tokens (M <= 64), weights NVFP4 or FP8 (e4m3), exact; activations bf16 or f16, never quantized.
//
// Defines: those of mma.cuh, WARPS, CTAS (a multiprocessor at least), NT (tokens / 8), R (tiles of 16 rows that a warp
// computes at once), CLUSTER (CTAs that share rows and part k), and
//   narrow: DEPTH (records in flight a warp and tile)
//   wide:   WN x WK = WARPS (warps along rows and along k), RING (stages)
//   warpgroup: GROUPS (of four warps; instead of WARPS), RING (stages)

#include "mma.cuh"

#ifdef DEPTH
// Few tokens (M <= 8 NT): a CTA holds x, or with CLUSTER CTAs its part of K, in shared memory and computes a range of
// units of 16 R rows. Their records, k before rows, are dealt evenly to the warps, which go through them at their own
// pace; a unit that several warps share is added up at the end, in their order.
constexpr int CHAINS = NT * R == 1 && !BLOCKED ? 2 : 1;  // sums that need not wait for each other
constexpr int RING = WARPS * DEPTH * R * SLOT;
constexpr int PARTIAL = WARPS * 2 * R * NT * 512;
constexpr int ZEROS = 256;  // what the lanes of absent tokens read

extern "C" __global__ void SHARE __launch_bounds__(WARPS * 32, CTAS)
narrow(const u8 *__restrict__ w, const float *__restrict__ scale, const u16 *x, const u16 *__restrict__ bias, u16 *y,
       int m, int n, int k, int pitch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = CLUSTER > 1 ? blockIdx.y : 0;
  let_next_kernel_start();
  const int steps = (k + 127) >> 7, tiles = (n + 15) >> 4, units = (tiles + R - 1) / R;
  const int share = (steps + CLUSTER - 1) / CLUSTER, step0 = rank * share, own = max(0, min(steps - step0, share));
  const int unit0 = (long long)blockIdx.x * units / gridDim.x;
  const int count = (long long)(blockIdx.x + 1) * units / gridDim.x - unit0, most = (units + gridDim.x - 1) / gridDim.x;
  const int total = count * own, warps = min(WARPS, total);
  auto first_of = [&](int warp) { return (int)((u32)warp * (u32)total / (u32)warps); };
  const int begin = warp < warps ? first_of(warp) : 0, end = warp < warps ? first_of(warp + 1) : 0;

  u8 *const shared = (u8 *)shared_memory;
  float4(*partial)[2][R][NT][32] = (float4(*)[2][R][NT][32])(shared + RING);  // [WARPS]
  float4(*sums)[R][NT][32] = (float4(*)[R][NT][32])(shared + RING + PARTIAL);  // [most], of a cluster
  u8 *const zeros = (u8 *)(CLUSTER > 1 ? sums + most : sums);
  float *const scales = (float *)(zeros + ZEROS);  // [most][R][16]
  u8 *const x_at = (u8 *)(scales + most * R * 16);
  const u32 ring = shared_at(shared) + warp * (DEPTH * R * SLOT);

  int unit = begin / max(own, 1), step = begin - unit * own, next_step = step, left = end - begin;
  const u8 *next = w + lane * 16 + ((long long)(unit0 + unit) * R * steps + step0 + step) * RECORD;
  int next_tile = (unit0 + unit) * R;
  auto request = [&](int slot) {
    if (left > 0) {
#pragma unroll
      for (int r = 0; r < R; r++)
        if (r == 0 || next_tile + r < tiles)
          fetch(ring + (slot * R + r) * SLOT, next + (long long)r * steps * RECORD, lane);
      next += RECORD;
      if (++next_step == own) next_step = 0, next_tile += R, next += (long long)(R * steps - own) * RECORD;
      left--;
    }
    commit();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; i++) request(i);

  // The rows' scales are asked for now and put in their places when x is there: their way is as long
  auto scale_of = [&](int i) {
    return BLOCKED || i >= count * R * 16 ? 1.0f : scale[min(unit0 * R * 16 + i, n - 1)];
  };
  constexpr int HELD = 4;
  float held[HELD];
#pragma unroll
  for (int j = 0; j < HELD; j++) held[j] = scale_of(threadIdx.x + j * WARPS * 32);
  if (threadIdx.x < ZEROS / 16) ((uint4 *)zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  after_previous_kernel();
  // 16 bytes of an odd token lie beside their place, so that reads meet no bank twice
  const int chunks = own * 16, live_chunks = min(chunks, (k >> 3) - step0 * 16), rows = min(m, WARPS);
  const int sharers = WARPS / rows;  // warps that copy one token
  if (warp < sharers * rows)
    for (int token = warp % rows; token < m; token += WARPS) {
      const u16 *from = x + (long long)token * pitch + step0 * 128;
      u8 *const to = x_at + token * chunks * 16;
      constexpr int AHEAD = 8;
      for (int i = warp / rows * 32 + lane; i < chunks; i += AHEAD * sharers * 32) {
        uint4 v[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
          v[j] = make_uint4(0, 0, 0, 0);
          if (i + j * sharers * 32 < live_chunks)
            asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "l"(from + (i + j * sharers * 32) * 8));
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
          if (i + j * sharers * 32 < chunks)
            *(uint4 *)(to + ((i + j * sharers * 32) ^ (token & 1)) * 16) = v[j];
      }
    }
#pragma unroll
  for (int j = 0; j < HELD; j++) asm volatile("" : "+f"(held[j]));  // not needed any earlier
#pragma unroll
  for (int j = 0; j < HELD; j++)
    if (threadIdx.x + j * WARPS * 32 < count * R * 16) scales[threadIdx.x + j * WARPS * 32] = held[j] * FACTOR;
  for (int i = threadIdx.x + HELD * WARPS * 32; i < count * R * 16; i += WARPS * 32) scales[i] = scale_of(i) * FACTOR;
  __syncthreads();

  u32 b_at[NT], b_step[NT];
#pragma unroll
  for (int t = 0; t < NT; t++) {
    const int token = t * 8 + (lane >> 2);
    b_step[t] = token < m ? 256 : 0;
    b_at[t] = token < m ? shared_at(x_at) + token * chunks * 16 + ((lane & 3) * 2 + (token & 1)) * 16 : shared_at(zeros);
  }
  auto finish = [&](int unit, int r, int t, const float4 &v) {
    if (CLUSTER > 1) sums[unit][r][t][lane] = v;
    else if ((unit0 + unit) * R + r < tiles) {
      const float *s = scales + (unit * R + r) * 16 + (lane >> 2);
      store(y, v, make_float2(s[0], s[8]), bias, (unit0 + unit) * R + r, t, m, n, lane);
    }
  };

  float c[CHAINS][R][NT][4] = {};
  int slot = 0, since = step;
  for (int at = begin; at < end; at++) {
    await<DEPTH - 1>();
    Step v[R];
#pragma unroll
    for (int r = 0; r < R; r++) v[r] = read(ring + (slot * R + r) * SLOT, lane);
    request(slot);
    slot = slot + 1 == DEPTH ? 0 : slot + 1;
#if BLOCKED
    float d[1][R][NT][4] = {};
#else
    auto &d = c;
#endif
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint4 b[NT][2];
#pragma unroll
      for (int t = 0; t < NT; t++) {
        const u32 from = b_at[t] + step * b_step[t] + h * 128;
        b[t][0] = load16(from), b[t][1] = load16(from ^ 16);
      }
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int r = 0; r < R; r++) {
          u32 a[4];
          decode(a, v[r], scales_of(v[r], h), h, j);
#pragma unroll
          for (int t = 0; t < NT; t++) {
            const uint4 &q = b[t][j >> 1];
            multiply(d[j % CHAINS][r][t], a, j & 1 ? q.z : q.x, j & 1 ? q.w : q.y);
          }
        }
    }
#if BLOCKED
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          c[0][r][t][i] = fmaf(d[0][r][t][i], i < 2 ? v[r].block.x : v[r].block.y, c[0][r][t][i]);
#endif
    if (++step == own || at + 1 == end) {
      const bool whole = since == 0 && step == own;
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int t = 0; t < NT; t++) {
          float4 sum = fragment(c[0][r][t]);
          if (CHAINS > 1) add(sum, fragment(c[CHAINS - 1][r][t]));
          if (whole) finish(unit, r, t, sum);
          else partial[warp][since == 0][r][t][lane] = sum;
#pragma unroll
          for (int i = 0; i < 4; i++) c[0][r][t][i] = c[CHAINS - 1][r][t][i] = 0.0f;
        }
      since = step = 0, unit++;
    }
  }

  __syncthreads();
  auto add_up = [&](int unit) {  // if several warps share it: this one's part of its fragments
    const int start = unit * own, from = ((start + 1) * warps - 1) / total, to = ((start + own) * warps - 1) / total;
    if (from == to) return;
    for (int f = warp - from; f < R * NT; f += to - from + 1) {
      const int r = f / NT, t = f % NT;
      float4 v = partial[from][1][r][t][lane];
#pragma unroll 4
      for (int q = from + 1; q <= to; q++) add(v, partial[q][0][r][t][lane]);
      finish(unit, r, t, v);
    }
  };
  if (begin < end) {
    const int first = begin / own, last = (end - 1) / own;
    add_up(first);
    if (last != first) add_up(last);
  }
#if CLUSTER > 1
  meet_cluster();
  for (int i = warp * CLUSTER + rank; i < count * R * NT; i += WARPS * CLUSTER) {
    const int unit = i / (R * NT), r = i / NT % R, t = i % NT, tile = (unit0 + unit) * R + r;
    const float *s = scales + (unit * R + r) * 16 + (lane >> 2);
    const float4 v = cluster_sum(&sums[unit][r][t][lane]);
    if (tile < tiles) store(y, v, make_float2(s[0], s[8]), bias, tile, t, m, n, lane);
  }
  meet_cluster();  // nobody leaves while its sums are being read
#endif
}

#elif defined(WN)
// More tokens (M <= 8 NT): a CTA computes 16 R WN rows; x goes through shared memory, and every decoded fragment multiplies
// NT blocks of tokens. WK warps, and CLUSTER CTAs, part K; their sums meet at the end in a fixed order, through the
// cluster's shared memory. A chunk of 8 columns of an odd token lies beside its place, so that reads meet no bank twice.
static_assert(WARPS % WN == 0 && WN * R * 16 <= WARPS * 32, "warps along k, and a thread for each scale");
constexpr int WK = WARPS / WN;
constexpr int SIDE = NT < 4 ? NT : 4;  // blocks of tokens at once
constexpr int UNITS = WN * R * NT;    // C fragments of the CTA
constexpr int X_BYTES = NT * 8 * WK * 256;
constexpr int STAGE = X_BYTES + WARPS * R * SLOT;

extern "C" __global__ void SHARE __launch_bounds__(WARPS * 32, CTAS)
wide(const u8 *__restrict__ w, const float *__restrict__ scale, const u16 *x, const u16 *__restrict__ bias, u16 *y,
     int m, int n, int k, int pitch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row_warp = warp % WN, part = warp / WN;
  const int steps = (k + 127) >> 7, tiles = (n + 15) >> 4;
  const int share = (steps + CLUSTER - 1) / CLUSTER, first = blockIdx.y * share, last = min(steps, first + share);
  const int stages = (max(last - first, 0) + WK - 1) / WK;
  const int tile0 = (blockIdx.x * WN + row_warp) * R;
  const u32 base = shared_at(shared_memory);
  let_next_kernel_start();
  const int row = blockIdx.x * (WN * R * 16) + threadIdx.x;  // whose scale this thread asks for in time
  const float held_scale = BLOCKED || threadIdx.x >= WN * R * 16 ? 1.0f : scale[min(row, n - 1)];

  auto request_w = [&](int stage) {
    const int step = first + stage * WK + part;
    if (step >= last) return;
#pragma unroll
    for (int r = 0; r < R; r++)
      if (tile0 + r < tiles)
        fetch(base + (stage % RING) * STAGE + X_BYTES + (warp * R + r) * SLOT,
              w + lane * 16 + u32((tile0 + r) * steps + step) * RECORD, lane);
  };
  constexpr int TOKENS = 2 * WN;  // that the CTA copies at once
  const int token = threadIdx.x / (WK * 16), chunk = threadIdx.x % (WK * 16), column = first * 128 + chunk * 8;
  const u16 *from_x = x + (long long)token * pitch + column;
  const u32 to_x = base + token * (WK * 256) + (chunk ^ (token & 1)) * 16;
  auto request_x = [&](int stage) {
    const bool inside = column + stage * (WK * 128) < k;
#pragma unroll
    for (int t = 0; t < NT * 8; t += TOKENS) {
      if (NT * 8 % TOKENS && token + t >= NT * 8) break;
      const bool live = inside && token + t < m;
      copy16(to_x + (stage % RING) * STAGE + t * (WK * 256), live ? from_x + stage * (WK * 128) + t * pitch : x, live);
    }
  };

  constexpr int EARLY = RING > 2 ? 2 : 1;  // stages of weights before the wait; with all, the first would await the last
#pragma unroll
  for (int s = 0; s < EARLY; s++)
    if (s < stages) request_w(s);
  after_previous_kernel();
#pragma unroll
  for (int s = 0; s < RING - 1; s++) {
    if (s >= EARLY && s < stages) request_w(s);
    if (s < stages) request_x(s);
    commit();
  }

  float c[R][NT][4] = {};
  for (int stage = 0; stage < stages; stage++) {
    await<RING - 2>();
    __syncthreads();  // everybody's x of this stage has arrived, and everybody has left the slot that is filled next
    if (stage + RING - 1 < stages) request_w(stage + RING - 1), request_x(stage + RING - 1);
    commit();
    if (first + stage * WK + part >= last || tile0 >= tiles) continue;
    const u32 from = base + (stage % RING) * STAGE;
    const u32 from_x = from + (lane >> 2) * (WK * 256) + part * 256;
    Step v[R];
#pragma unroll
    for (int r = 0; r < R; r++)  // beyond the last tile: the last one again, whose result is dropped
      v[r] = read(from + X_BYTES + (warp * R + (tile0 + r < tiles ? r : 0)) * SLOT, lane);
#if BLOCKED
    float d[R][NT][4] = {};
#else
    auto &d = c;
#endif
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 a[R][4][4];
#pragma unroll
      for (int r = 0; r < R; r++) {
        const Scales by = scales_of(v[r], h);
#pragma unroll
        for (int j = 0; j < 4; j++) decode(a[r][j], v[r], by, h, j);
      }
#pragma unroll
      for (int t0 = 0; t0 < NT; t0 += SIDE) {  // products that follow each other add to different sums
        uint4 b[SIDE][2];
#pragma unroll
        for (int t = 0; t < SIDE; t++) {
          const u32 chunk = h * 8 + (lane & 3) * 2, odd = lane >> 2 & 1;
          const u32 token = from_x + (t0 + t) * 8 * (WK * 256) + (chunk ^ odd) * 16;
          b[t][0] = load16(token), b[t][1] = load16(token ^ 16);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int t = 0; t < SIDE; t++)
#pragma unroll
            for (int r = 0; r < R; r++) {
              const uint4 &q = b[t][j >> 1];
              multiply(d[r][t0 + t], a[r][j], j & 1 ? q.z : q.x, j & 1 ? q.w : q.y);
            }
      }
    }
#if BLOCKED
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[r][t][i] = fmaf(d[r][t][i], i < 2 ? v[r].block.x : v[r].block.y, c[r][t][i]);
#endif
  }

  await<0>();
  __syncthreads();
  float4(*sums)[UNITS][32] = (float4(*)[UNITS][32])shared_memory;  // [WK]
  float *const scales = (float *)(sums + WK);
  if (threadIdx.x < WN * R * 16) scales[threadIdx.x] = held_scale * FACTOR;
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int t = 0; t < NT; t++)
      sums[part][(row_warp * R + r) * NT + t][lane] = fragment(c[r][t]);
  __syncthreads();
  auto finish = [&](int unit, const float4 &v) {
    const int tile = blockIdx.x * WN * R + unit / NT;
    const float *s = scales + unit / NT * 16 + (lane >> 2);
    if (tile < tiles) store(y, v, make_float2(s[0], s[8]), bias, tile, unit % NT, m, n, lane);
  };
#pragma unroll
  for (int unit = warp; unit < UNITS; unit += WARPS) {
    float4 v = sums[0][unit][lane];
#pragma unroll
    for (int p = 1; p < WK; p++) add(v, sums[p][unit][lane]);
    if (CLUSTER == 1) finish(unit, v);
    else if (WK > 1) sums[0][unit][lane] = v;
  }
#if CLUSTER > 1
  meet_cluster();
  for (int unit = warp * CLUSTER + blockIdx.y; unit < UNITS; unit += WARPS * CLUSTER) {
    const float4 v = cluster_sum(&sums[0][unit][lane]);
    finish(unit, v);
  }
  meet_cluster();  // nobody leaves while its sums are being read
#endif
}

#elif defined(GROUPS)
// More tokens on SM90 (M <= 8 NT): warpgroups multiply decoded registers with x in shared memory, and decode the next half
// of a record meanwhile. Each warp computes R tiles of 16 rows; CLUSTER CTAs part K. x of 64 columns lies as the tensor
// cores read it with 128-byte swizzle: a token has 8 chunks of 16 bytes, the products' k in order, chunk i at place
// i ^ (token & 7). A warp copies a token's 32 words at once: 128 bytes of memory, and each to a bank of its own.
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

#elif defined(PACK)
// The checkpoint's bytes into records; one thread for a lane's share of 64 columns. rows, columns: those that exist.
__device__ __forceinline__ u32 bits(u32 code, int bit, int to) { return (code >> bit & 1) << to; }

extern "C" __global__ void pack(const u8 *__restrict__ codes, const void *__restrict__ scales, u8 *__restrict__ out, int n,
                                int k, int tiles) {
  const int steps = (k + 127) >> 7;
  const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = index & 31, h = index >> 5 & 1;
  const long long record = index >> 6;
  if (record >= (long long)tiles * steps) return;
  const int step = record % steps, tile = record / steps, column = step * 128 + h * 64 + (lane & 3) * 16;
  u8 *to = out + record * RECORD;
  constexpr int BYTES = W4 ? 8 : 16;  // of 16 codes
  u32 raw[2][BYTES / 4] = {};
  u32 nibble_scale[2] = {};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = tile * 16 + (lane >> 2) + 8 * r;
    if (row >= n || column >= k) continue;
    const u32 *from = (const u32 *)(codes + ((long long)row * k + column) / (W4 ? 2 : 1));
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++) raw[r][i] = from[i];
    if (W4) {
      const u32 s = ((const u8 *)scales)[(long long)row * (k / 16) + column / 16] & 127;
      if (s >= 8) nibble_scale[r] = s + (15 << 3);  // e4m3 exponent field 1 is 2^-6: field 16 of e5m3 with bias 22
      else if (s == 0)
        for (int i = 0; i < BYTES / 4; i++) raw[r][i] = 0;  // no byte means zero to the kernel: the codes do
      else {
        const int top = 31 - __clz(s);  // subnormal s * 2^-9
        nibble_scale[r] = (top + 13) << 3 | (s << (3 - top) & 7);
      }
    }
  }
  u32 words[BYTES / 2] = {};
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
      for (int e = 0; e < 2; e++) {  // pair p: row p & 1, columns 4 j + 2 (p >> 1) + e
        const int at = 4 * j + 2 * (p >> 1) + e;
        if (W4) {
          constexpr int place[4][4] = {{0, 1, 2, 9}, {4, 5, 6, 13}, {10, 11, 12, 19}, {14, 7, 8, 15}};
          const u32 code = raw[p & 1][at / 8] >> (at % 8 * 4);
#pragma unroll
          for (int i = 0; i < 4; i++) words[j] |= bits(code, i, (place[p][i] + 16 * e) & 31);
        } else {
          constexpr int place[2][8] = {{4, 5, 6, 7, 8, 9, 10, 15}, {0, 1, 2, 3, 12, 13, 14, 11}};
          const u32 code = raw[p & 1][at / 4] >> (at % 4 * 8);
#pragma unroll
          for (int i = 0; i < 8; i++) words[(W4 ? 0 : 2 * j + (p >> 1))] |= bits(code, i, place[p & 1][i] + 16 * e);
        }
      }
#pragma unroll
  for (int i = 0; i < BYTES / 8; i++)
    *(uint4 *)(to + (h * (BYTES / 8) + i) * 512 + lane * 16) =
        make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  if (W4) *(u16 *)(to + 1024 + lane * 4 + h * 2) = u16(nibble_scale[0] | nibble_scale[1] << 8);
  if (BLOCKED && h == 0 && (lane & 3) == 0)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = tile * 16 + (lane >> 2) + 8 * r;
      ((float *)(to + 2048))[(lane >> 2) * 2 + r] = row < n ? ((const float *)scales)[(long long)row * steps + step] : 0;
    }
}
#endif
