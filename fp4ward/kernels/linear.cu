// y = x W^T for few tokens (M <= 64), weights NVFP4 or FP8 (e4m3), exact; activations bf16 or f16, never quantized.
//
// Defines: those of mma.cuh, WARPS, NT (tokens / 8), R (tiles of 16 rows that a warp computes at once), CLUSTER (CTAs that
// share rows and part k), and
//   narrow: DEPTH (records in flight a warp and tile)
//   wide:   WN x WK = WARPS (warps along rows and along k), RING (stages), CTAS (a multiprocessor at least)
// warpgroup.cu has a third kernel, pack.cu lays the weights out.

#include "mma.cuh"

#ifdef DEPTH
// Few tokens (M <= 8 NT): a CTA holds x, or with CLUSTER CTAs its part of K, in shared memory and computes a range of
// units of 16 R rows. Their records, k before rows, are dealt evenly to the warps, which go through them at their own
// pace; a unit that several warps share is added up at the end, in their order.
constexpr int CHAINS = NT * R == 1 && !BLOCKED ? 2 : 1;  // sums that need not wait for each other
constexpr int RING = WARPS * DEPTH * R * SLOT;
constexpr int PARTIAL = WARPS * 2 * R * NT * 512;
constexpr int ZEROS = 256;  // what the lanes of absent tokens read

extern "C" __global__ void SHARE __launch_bounds__(WARPS * 32, 1)  // with one said, it takes more registers
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
#endif
