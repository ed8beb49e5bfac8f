// y = x W^T for few tokens (M <= 64), weights NVFP4 or FP8 (e4m3), exact; activations bf16 or f16, never quantized.
//
// Defines: those of mma.cuh, WARPS, CTAS (a multiprocessor at least), NT (tokens / 8), and
//   narrow: STEPS (records a warp holds x for), RING (tiles in flight)
//   wide:   WN x WK = WARPS (warps along rows and along k), RING (stages), CLUSTER (CTAs that share rows and part k)

#include "mma.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif

#ifdef STEPS
// Few tokens (M <= 8 NT): a CTA goes through tiles of 16 rows; its warps part K and keep their part of x in registers for
// all tiles. Partial sums meet in shared memory in a fixed order, one warp after the other taking a turn.
constexpr int TILES = 8;  // of one round through K
constexpr int CHAINS = NT == 1 && STEPS < 4 && !BLOCKED ? 2 : 1;  // sums that need not wait for each other

struct At {
  int tile, slot;   // slot: which of the round's tiles
  int chunk, left;  // left: records of the tile from this warp's first one on
  u32 offset;       // of that record
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS)
narrow(const u8 *__restrict__ w, const float *__restrict__ scale, const u16 *x, const u16 *__restrict__ bias, u16 *y,
       int m, int n, int k, int pitch, int parts, int chunks) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = warp / parts, part = warp % parts, groups = (blockDim.x >> 5) / parts;
  let_next_kernel_start();
  const int steps = (k + 127) >> 7, tiles = (n + 15) >> 4, stride = gridDim.x * groups;
  float4(*partial)[WARPS][NT][32] = (float4(*)[WARPS][NT][32])shared_memory;  // [2]
  float4(*sums)[NT][32] = (float4(*)[NT][32])(partial + 2);                   // [TILES]
  const u32 ring = shared_at(sums + TILES) + warp * SLOT;  // [RING][STEPS][WARPS]
  const u8 *codes = w + lane * 16;

  auto seek = [&](At &a) {
    const int step = (a.chunk * parts + part) * STEPS;
    a.left = steps - step, a.offset = u32(a.tile * steps + step) * RECORD;
  };
  auto next = [&](At &a) {
    a.tile += stride, a.slot++, a.offset += u32(stride * steps) * RECORD;
    if (a.tile >= tiles || a.slot == TILES) {
      if (++a.chunk < chunks) a.tile -= a.slot * stride;
      else a.chunk = 0;
      a.slot = 0;
      seek(a);
    }
  };
  auto request = [&](const At &a, int slot, int s) {
    if (a.tile < tiles && s < a.left)
      fetch(ring + (slot * STEPS + s) * (WARPS * SLOT), codes + a.offset + s * RECORD, lane);
    commit();
  };

  At at, ahead;
  at.tile = blockIdx.x * groups + group, at.chunk = at.slot = 0;
  seek(at);
  ahead = at;
#pragma unroll
  for (int r = 0; r < RING; r++) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) request(ahead, r, s);
    next(ahead);
  }
  after_previous_kernel();

  u32 b[STEPS][2][NT][8];
  auto load_x = [&] {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int t = 0; t < NT; t++) {
          const int column = (steps - at.left + s) * 128 + h * 64 + (lane & 3) * 16, token = t * 8 + (lane >> 2);
          const bool live = column < k && token < m;
          const u16 *from = x + (long long)token * pitch + column;
#pragma unroll
          for (int i = 0; i < 2; i++) {
            u32 *v = &b[s][h][t][4 * i];
            v[0] = v[1] = v[2] = v[3] = 0;
            if (live)
              asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                           : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(from + 8 * i));
          }
        }
  };
  load_x();

  int slot = 0, side = 0, turn = 0;
  while (at.tile < tiles) {
    if (at.slot == 0) turn = 0;
    int own = part - turn;  // first block of tokens whose sums this warp adds up
    if (own < 0) own += parts;
    for (turn += NT; turn >= parts;) turn -= parts;
    float2 row_scale = {};
    if (own < NT) row_scale = row_scales(scale, at.tile, n, lane);
    float c[CHAINS][NT][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      await<RING * STEPS - 1>();
      const Step v = read(ring + (slot * STEPS + s) * (WARPS * SLOT), lane);
      request(ahead, slot, s);
      if (s >= at.left) continue;
#if BLOCKED
      float d[NT][4] = {};
#endif
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const Scales by = scales_of(v, h);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          u32 a[4];
          decode(a, v, by, h, j);
#pragma unroll
          for (int t = 0; t < NT; t++)
#if BLOCKED
            multiply(d[t], a, b[s][h][t][2 * j], b[s][h][t][2 * j + 1]);
#else
            multiply(c[j % CHAINS][t], a, b[s][h][t][2 * j], b[s][h][t][2 * j + 1]);
#endif
        }
      }
#if BLOCKED
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[0][t][i] = fmaf(d[t][i], i < 2 ? v.block.x : v.block.y, c[0][t][i]);
#endif
    }
    next(ahead);
    slot = slot + 1 == RING ? 0 : slot + 1;

#pragma unroll
    for (int t = 0; t < NT; t++) {
      float4 sum = fragment(c[0][t]);
#pragma unroll
      for (int i = 1; i < CHAINS; i++) add(sum, fragment(c[i][t]));
      partial[side][warp][t][lane] = sum;
    }
    asm volatile("bar.sync %0, %1;" ::"r"(group), "r"(parts * 32) : "memory");
#pragma unroll 1
    for (; own < NT; own += parts) {
      float4 v = partial[side][group * parts][own][lane];
#pragma unroll 4
      for (int p = 1; p < parts; p++) add(v, partial[side][group * parts + p][own][lane]);
      if (at.chunk > 0) add(v, sums[at.slot][own][lane]);
      if (at.chunk + 1 < chunks) sums[at.slot][own][lane] = v;
      else store(y, v, row_scale, bias, at.tile, own, m, n, lane);
    }
    side ^= 1;
    const int chunk = at.chunk;
    next(at);
    if (at.chunk != chunk && at.tile < tiles) load_x();
  }
}

#elif defined(WN)
// More tokens (M <= 8 NT): a CTA computes 32 WN rows; x goes through shared memory, and every decoded fragment multiplies
// NT blocks of tokens. WK warps, and CLUSTER CTAs, part K; their sums meet at the end in a fixed order, through the
// cluster's shared memory. A chunk of 8 columns of an odd token lies beside its place, so that reads meet no bank twice.
constexpr int R = 2;                  // tiles of 16 rows a warp
constexpr int WK = WARPS / WN;
constexpr int UNITS = WN * R * NT;    // C fragments of the CTA
constexpr int X_BYTES = NT * 8 * WK * 256;
constexpr int STAGE = X_BYTES + WARPS * R * SLOT;

#if CLUSTER > 1
#define SHARE __cluster_dims__(1, CLUSTER, 1)
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
#else
#define SHARE
#endif

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
      if (TOKENS > NT * 8 && token >= NT * 8) break;
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
      for (int t = 0; t < NT; t++) {
        const u32 chunk = h * 8 + (lane & 3) * 2, odd = lane >> 2 & 1;
        const u32 token = from_x + t * 8 * (WK * 256);
        const uint4 b0 = load16(token + (chunk ^ odd) * 16), b1 = load16(token + ((chunk + 1) ^ odd) * 16);
#pragma unroll
        for (int r = 0; r < R; r++) {
          multiply(d[r][t], a[r][0], b0.x, b0.y);
          multiply(d[r][t], a[r][1], b0.z, b0.w);
          multiply(d[r][t], a[r][2], b1.x, b1.y);
          multiply(d[r][t], a[r][3], b1.z, b1.w);
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
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int t = 0; t < NT; t++)
      sums[part][(row_warp * R + r) * NT + t][lane] = fragment(c[r][t]);
  __syncthreads();
  auto finish = [&](int unit, const float4 &v) {
    const int tile = blockIdx.x * WN * R + unit / NT;
    if (tile < tiles)
      store(y, v, row_scales(scale, tile, n, lane), bias, tile, unit % NT, m, n, lane);
  };
#pragma unroll
  for (int i = 0; i < UNITS / WARPS; i++) {
    const int unit = i * WARPS + warp;
    float4 v = sums[0][unit][lane];
#pragma unroll
    for (int p = 1; p < WK; p++) add(v, sums[p][unit][lane]);
    if (CLUSTER == 1) finish(unit, v);
    else if (WK > 1) sums[0][unit][lane] = v;
  }
#if CLUSTER > 1
  meet_cluster();
  for (int unit = warp * CLUSTER + blockIdx.y; unit < UNITS; unit += WARPS * CLUSTER) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++) {
      u32 far;
      float4 part_of;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(shared_at(&sums[0][unit][lane])), "r"(rank));
      asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=f"(part_of.x), "=f"(part_of.y), "=f"(part_of.z), "=f"(part_of.w) : "r"(far) : "memory");
      add(v, part_of);
    }
    finish(unit, v);
  }
  meet_cluster();  // nobody leaves while its sums are being read
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
