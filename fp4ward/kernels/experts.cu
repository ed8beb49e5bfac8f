// Experts for few tokens, NVFP4 weights, exact: two or three launches after routing (route.cu).
//
// Legend: T tokens, E experts on this rank (shared ones are the last), k experts a token, I expert width, H hidden. A
// pair is one choice of one token, p = t k + j. A block is up to S pairs of one expert.
//
// gate_up: h[p] = silu(gate x) * (up x), or relu(up x)^2. A tile of 16 rows is 8 of gate and the same 8 of up, so that
// a lane's C fragment holds both. down: rows[p] = down h[p], f32. combine: y[t] = sum_j weight[t, j] rows[t k + j], in
// this order, and the residual. Equal inputs give equal bits; where a sum over K is cut depends on how many blocks there
// are, so the last bits of a token's f32 rows do on where the others are routed.
//
// gate_up and down: a unit is R tiles of a block. The CTAs share all units evenly, each a run of neighbours; blocks that
// it meets, `window` at a time, have their activations in shared memory (with two BUFFERS the next window's come
// meanwhile). A window's records, k before rows, are dealt evenly to the warps, which go through them at their own pace;
// a unit that several warps share is added up at the window's end, in their order. A lane copies what it will read
// itself into its warp's ring of DEPTH records, across windows. Columns of B do not mix, so absent tokens read zeros;
// columns beyond K are zero.
//
// Launched early (PDL): gate_up waits before it reads the list, and only then lets down start; so whatever came before
// gate_up is complete when down begins, and down reads list and weights before it waits for h, combine its weights.
//
// Few tokens (OWN): a CTA computes its rows of down for all blocks, keeps them in shared memory and combines them itself.
//
// Defines: GATE_UP or DOWN with PAIRS (S), NT (times 8 columns for them), R, DEPTH, BUFFERS, WARPS, CTAS, HALF, PDL and
// GATED (or relu^2) or OWN; or COMBINE.

#define W4 1
#include "mma.cuh"

__device__ __forceinline__ void weigh(float4 &sum, float by, const float4 &v) {
  sum.x = fmaf(by, v.x, sum.x), sum.y = fmaf(by, v.y, sum.y), sum.z = fmaf(by, v.z, sum.z), sum.w = fmaf(by, v.w, sum.w);
}
__device__ __forceinline__ void give(u16 *y, const u16 *residual, float4 sum, long long to) {  // 4 columns
  if (residual) {
    const uint2 v = *(const uint2 *)(residual + to);
    add(sum, make_float4(widen16(v.x), widen16(v.x >> 16), widen16(v.y), widen16(v.y >> 16)));
  }
  *(uint2 *)(y + to) =
      make_uint2(narrow16(sum.x) | u32(narrow16(sum.y)) << 16, narrow16(sum.z) | u32(narrow16(sum.w)) << 16);
}

#if defined(GATE_UP) || defined(DOWN)
constexpr int S = PAIRS;
static_assert(S <= 8 * NT && R <= 2, "columns for pairs, and row scales of two tiles");
constexpr u32 DEAD = 0xFFFF;
constexpr int CHAINS = NT * R == 1 ? 2 : 1;  // sums that need not wait for each other
constexpr int RING = WARPS * DEPTH * R * SLOT;
constexpr int PARTIAL = WARPS * 2 * R * NT * 512;
constexpr int ZEROS = 256;  // what the lanes of absent tokens read
template <int N> struct Constant { static constexpr int value = N; };
#ifndef OWN
#define OWN 0
#endif
// a / b of numbers whose product is below 2^32. inverse: ceil(2^32 / b), or 0 for b = 1.
__device__ __forceinline__ u32 divided(u32 a, u32 inverse) { return inverse ? __umulhi(a, inverse) : a; }

// listed: blocks whose list is in shared memory, all (`bound`) or what a CTA meets. 2^shift rows of it are a block's x.
// by_...: inverses of the grid, of units, of steps, and of the pairs that share a row of x.
// The smallest gate_up keeps to 80 registers (65536 / 768), so that down can be there before it ends.
#if defined(GATE_UP) && CTAS * NT * R == 1
extern "C" __global__ void __launch_bounds__(768, 1)
#else
extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS)
#endif
#ifdef GATE_UP
gate_up(const u8 *__restrict__ w, const float *__restrict__ scale, const u16 *x, const int *list, u16 *y, int bound,
        int listed, int n, int k, int pitch, int shift, int window, u32 by_grid, u32 by_units, u32 by_steps, u32 by_row) {
#else
down(const u8 *__restrict__ w, const float *__restrict__ scale, const u16 *x, const int *list, const int *slots,
     const float *weights, const u16 *residual, float *all_rows, u16 *y, int tokens, int top_k, int bound, int listed, int n,
     int k, int pitch, int shift, int window, u32 by_grid, u32 by_units, u32 by_steps, u32 by_row) {
#endif
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int steps = (k + 127) >> 7, units = (n >> 4) / R, chunks = steps * 16;
  u8 *const shared = (u8 *)shared_memory;
  float4(*partial)[2][R][NT][32] = (float4(*)[2][R][NT][32])(shared + RING);  // [WARPS]
  u8 *const zeros = shared + RING + PARTIAL;
  u16 *const list_at = (u16 *)(zeros + ZEROS);  // `listed` experts, and their pairs
  const u32 x_at = (shared_at(list_at + listed * (1 + S)) + 31) & ~31u, x_bytes = (window << shift) * chunks * 16;
  const u32 ring = shared_at(shared) + warp * (DEPTH * R * SLOT);
#ifdef GATE_UP
  after_previous_kernel();
#endif
  let_next_kernel_start();
  auto read_list = [&](int start) {
#pragma unroll 4
    for (int i = threadIdx.x; i < listed * (1 + S); i += WARPS * 32) {
      const int j = i < listed ? min(start + i, bound - 1) : bound + min(start * S + i - listed, bound * S - 1);
      list_at[i] = u16(load_l2(list + 1 + j));
    }
  };
  if (listed == bound) read_list(0);
  const u32 blocks = load_l2(list);
  if (threadIdx.x < ZEROS / 16) ((uint4 *)zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
#if OWN
  const int pairs = tokens * top_k;
  float *const factor = (float *)(shared + (x_at - shared_at(shared)) + x_bytes), *const rows = factor + (pairs + 3 & ~3);
  for (int p = threadIdx.x; p < pairs; p += WARPS * 32) {
    const bool dead = load_l2(slots + p) < 0;  // in no block: nobody writes its rows
    factor[p] = dead ? 0.0f : __uint_as_float(load_l2(weights + p));
    for (int i = 0; dead && i < (units / (int)gridDim.x + 1) * R * 4; i++)
      ((float4 *)rows)[((i >> 2) * pairs + p) * 4 + (i & 3)] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
#endif

  // This CTA's units, of all blocks together or (OWN) of each
  const u32 all = OWN ? units : blocks * units, share = divided(all, by_grid), rest = all - share * gridDim.x;
  const u32 first = blockIdx.x * share + min(blockIdx.x, rest), stop = first + share + (blockIdx.x < rest);
  if (first == stop) return after_previous_kernel();  // else down could end before gate_up does
  const int block0 = OWN ? 0 : divided(first, by_units), block1 = OWN ? blocks - 1 : divided(stop - 1, by_units);
  if (listed < bound) read_list(block0);
  const u16 *const expert = list_at - (listed < bound ? block0 : 0);
  const u16 *const pair = list_at + listed - (listed < bound ? block0 : 0) * S;
  __syncthreads();
  const int windows = OWN || block1 - block0 < window ? blocks > 0 : (block1 - block0) / window + 1;
  struct At {
    int block, unit;
  };
  auto place_of = [&](u32 i) {
    At at;
    if (OWN)
      for (at.unit = first, at.block = i; at.block >= (int)blocks; at.block -= blocks) at.unit++;
    else at.block = divided(i, by_units), at.unit = i - at.block * units;
    return at;
  };
  auto advance = [&](At &at) {  // true: in another block
    if (OWN) {
      if (++at.block == blocks) at.block = 0, at.unit++;
      return true;
    }
    if (++at.unit < units) return false;
    at.unit = 0, at.block++;
    return true;
  };
  struct Part {  // a window's units, and its records: each warp has so many, the first ones one more
    u32 unit0;
    int each, more, begin, end;
  };
  auto begin_of = [&](const Part &p, int warp) { return warp * p.each + min(warp, p.more); };
  auto part = [&](int win) {
    Part p;
    p.unit0 = OWN ? 0 : max(first, (u32)((block0 + win * window) * units));
    const u32 end = OWN ? (stop - first) * blocks : min(stop, (u32)((block0 + (win + 1) * window) * units));
    const u32 total = (end - p.unit0) * steps;
    p.each = total / WARPS, p.more = total % WARPS;
    p.begin = begin_of(p, warp), p.end = begin_of(p, warp + 1);
    return p;
  };

  int ahead = -1, left = 0, ahead_step = 0;
  At ahead_at = {};
  const u8 *next = w;
  auto seek = [&] {
    next = w + lane * 16 +
           ((unsigned long long)(expert[ahead_at.block] * units + ahead_at.unit) * R * steps + ahead_step) * RECORD;
  };
  auto request = [&](int slot) {
    while (left == 0 && ahead + 1 < windows) {
      const Part p = part(++ahead);
      const u32 unit = divided(p.begin, by_steps);
      left = p.end - p.begin;
      if (left > 0) ahead_step = p.begin - unit * steps, ahead_at = place_of(p.unit0 + unit), seek();
    }
    if (left > 0) {
#pragma unroll
      for (int r = 0; r < R; r++) fetch(ring + (slot * R + r) * SLOT, next + (long long)r * steps * RECORD, lane);
      left--, next += RECORD;
      if (++ahead_step == steps) {
        ahead_step = 0, next += (long long)(R - 1) * steps * RECORD;
        if (advance(ahead_at) && left > 0) seek();
      }
    }
    commit();
  };
  auto row_at = [&](int win, int block, int token, u32 p) {
    const u32 row = OWN ? p : (block - block0 - win * window << shift) + token;
    return x_at + win % BUFFERS * x_bytes + row * chunks * 16;
  };
  auto bring = [&](int win) {  // x of a window; 16 bytes of an odd token lie beside their place: no bank is met twice
    const int from = block0 + win * window, rows = (OWN ? blocks : min(window, block1 + 1 - from)) << shift;
    for (int row = warp; row < rows; row += WARPS) {
      const int block = from + (row >> shift), token = row & (1 << shift) - 1;
      const u32 p = pair[block * S + token], to = row_at(win, block, token, p);
      if (p == DEAD) continue;
      const u16 *const x_row = x + (long long)divided(p, by_row) * pitch;
#pragma unroll 4
      for (int chunk = lane; chunk < chunks; chunk += 32)
        copy16(to + (chunk ^ (token & 1)) * 16, chunk * 8 < k ? x_row + chunk * 8 : x, chunk * 8 < k);
    }
  };

  Part own;
  float2 by[R], head[R];  // row scales of this unit, of the window's first: asked for when a unit begins
  At is = {};
  int step = 0;
  auto load_scales = [&] {
#pragma unroll
    for (int r = 0; r < R; r++) {
      const float *s = scale + ((expert[is.block] * units + is.unit) * R + r) * 16 + (lane >> 2);
      by[r] = make_float2(s[0], s[8]);
    }
  };
  auto enter = [&](int win) {
    own = part(win);
    if (own.begin == own.end) return;
    const u32 unit = divided(own.begin, by_steps);
    step = own.begin - unit * steps, is = place_of(own.unit0 + unit);
    load_scales();
#pragma unroll
    for (int r = 0; r < R; r++) head[r] = by[r];
  };
#ifdef GATE_UP
  bring(0);
  commit();
#endif
#pragma unroll 1
  for (int i = 0; i < DEPTH; i++) request(i);
  enter(0);
#ifdef GATE_UP
  await<DEPTH>();
#else
  after_previous_kernel();
  bring(0);
  commit();
  await<0>();
#endif
  __syncthreads();

  u32 b_at[NT], b_step[NT];
  bool second;  // has the block more than 8 pairs?
  auto turn_to = [&](int win) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
      const int token = t * 8 + (lane >> 2);
      const u32 p = token >> shift ? DEAD : pair[is.block * S + token];
      b_step[t] = p != DEAD ? 256 : 0;
      b_at[t] = p != DEAD ? row_at(win, is.block, token, p) + ((lane & 3) * 2 + (token & 1)) * 16 : shared_at(zeros);
    }
    second = NT > 1 && shift > 3 && pair[is.block * S + 8] != DEAD;
  };
  auto finish = [&](const At &of, int r, int t, float4 v, float2 s) {
    const float sums[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = t * 8 + (lane & 3) * 2 + i;
      const u32 p = token < S ? pair[of.block * S + token] : DEAD;
      if (p == DEAD) continue;
      const float high = sums[i] * (s.x * FACTOR), low = sums[2 + i] * (s.y * FACTOR);
      const int tile = of.unit * R + r;
#ifdef GATE_UP
      u16 *to = y + (long long)p * (GATED ? n / 2 : n) + tile * (GATED ? 8 : 16) + (lane >> 2);
      if (GATED) to[0] = narrow16(__fdividef(high, 1.0f + __expf(-high)) * low);
      else {
        const float a = fmaxf(high, 0.0f), b = fmaxf(low, 0.0f);
        to[0] = narrow16(a * a), to[8] = narrow16(b * b);
      }
#else
#if OWN
      float *to = rows + ((tile - first * R) * pairs + p) * 16;
#else
      float *to = all_rows + (long long)p * n + tile * 16;
#endif
      to[lane >> 2] = high, to[(lane >> 2) + 8] = low;
#endif
    }
  };

  int slot = 0;
  for (int win = 0; win < windows; win++) {
    const bool more = win + 1 < windows;
    if (BUFFERS > 1 && more) bring(win + 1);  // arrives with the first record asked for from here on
    if (own.begin < own.end) turn_to(win);
    float c[CHAINS][R][NT][4] = {};
    int since = step;
    for (int at = own.begin; at < own.end; at++) {
      await<DEPTH - 1>();
      Step v[R];
#pragma unroll
      for (int r = 0; r < R; r++) v[r] = read(ring + (slot * R + r) * SLOT, lane);
      request(slot);
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
      auto multiply_by = [&](auto eights) {  // blocks of 8 columns that are not all absent
        constexpr int N = decltype(eights)::value;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          uint4 b[N][2];
#pragma unroll
          for (int t = 0; t < N; t++) {
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
              for (int t = 0; t < N; t++) {
                const uint4 &q = b[t][j >> 1];
                multiply(c[j % CHAINS][r][t], a, j & 1 ? q.z : q.x, j & 1 ? q.w : q.y);
              }
            }
        }
      };
      if (NT > 1 && second) multiply_by(Constant<NT>{});
      else multiply_by(Constant<1>{});
      if (++step == steps || at + 1 == own.end) {
        const bool whole = since == 0 && step == steps;
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
          for (int t = 0; t < NT; t++) {
            float4 sum = fragment(c[0][r][t]);
            if (CHAINS > 1) add(sum, fragment(c[CHAINS - 1][r][t]));
            if (whole) finish(is, r, t, sum, by[r]);
            else partial[warp][since == 0][r][t][lane] = sum;
#pragma unroll
            for (int i = 0; i < 4; i++) c[0][r][t][i] = c[CHAINS - 1][r][t][i] = 0.0f;
          }
        since = step = 0;
        if (at + 1 < own.end) {
          if (advance(is)) turn_to(win);
          load_scales();
        }
      }
    }

    if (BUFFERS > 1 && more && own.end - own.begin <= DEPTH) commit(), await<0>();  // else x has come by now
    __syncthreads();
    const int head_unit = divided(own.begin, by_steps), last_unit = divided(max(own.end - 1, 0), by_steps);
#pragma unroll
    for (int side = 0; side < 2; side++) {  // units that several warps share: this one's part of their fragments
      const int of = side ? last_unit : head_unit;
      if (own.begin == own.end || (side && of == head_unit)) break;
      int from = warp, to = warp;
      while (begin_of(own, from) > of * steps) from--;
      while (begin_of(own, to + 1) < (of + 1) * steps) to++;
      if (from < to)
        for (int f = warp - from; f < R * NT; f += to - from + 1) {
          const int r = f / NT, t = f % NT;
          float4 v = partial[from][1][r][t][lane];
#pragma unroll 4
          for (int q = from + 1; q <= to; q++) add(v, partial[q][0][r][t][lane]);
          const float2 &one = side ? by[0] : head[0], &other = side ? by[R - 1] : head[R - 1];
          finish(place_of(own.unit0 + of), r, t, v, make_float2(r ? other.x : one.x, r ? other.y : one.y));
        }
    }
    if (more) {
      enter(win + 1);
      if (BUFFERS == 1) bring(win + 1), commit(), await<0>();
      __syncthreads();
    }
  }
#if OWN
  __syncthreads();
  for (int tile = 0; tile < (stop - first) * R; tile++)
    for (int i = threadIdx.x; i < tokens * 4; i += WARPS * 32) {
      const int t = i >> 2, part_of = (i & 3) * 4;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int p = t * top_k; p < (t + 1) * top_k; p++)
        weigh(sum, factor[p], *(float4 *)(rows + (tile * pairs + p) * 16 + part_of));
      give(y, residual, sum, (long long)t * n + (first * R + tile) * 16 + part_of);
    }
#endif
}

#elif defined(COMBINE)
// y[t] = sum_j weight[t, j] rows[t k + j] (+ residual[t]); a thread has 4 columns.
extern "C" __global__ void __launch_bounds__(128)
combine(const float *rows, const int *slots, const float *weights, const u16 *residual, u16 *y, int tokens, int n,
        int top_k) {
  let_next_kernel_start();
  const int i = blockIdx.x * 128 + threadIdx.x, t = i / (n >> 2), column = (i - t * (n >> 2)) * 4;
  if (t >= tokens) return;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  constexpr int ONCE = 8;
  for (int j = 0; j < top_k; j += ONCE) {
    float by[ONCE];
    float4 v[ONCE];
    bool live[ONCE];  // else in no block: nobody wrote its rows
#pragma unroll
    for (int q = 0; q < ONCE; q++) {
      live[q] = j + q < top_k && load_l2(slots + t * top_k + j + q) >= 0;
      by[q] = live[q] ? __uint_as_float(load_l2(weights + t * top_k + j + q)) : 0.0f;
    }
    if (j == 0) after_previous_kernel();
#pragma unroll
    for (int q = 0; q < ONCE; q++) {
      v[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (live[q]) v[q] = *(const float4 *)(rows + (long long)(t * top_k + j + q) * n + column);
    }
#pragma unroll
    for (int q = 0; q < ONCE; q++) weigh(sum, by[q], v[q]);
  }
  give(y, residual, sum, (long long)t * n + column);
}
#endif
