// A block of experts for few tokens, NVFP4 weights, exact: routing with its list of work, then two launches.
//
// Legend: T tokens, E experts on this rank (shared ones are the last), k experts a token, I expert width, H hidden. A
// pair is one choice of one token, p = t k + j. A block is up to S = 8 NT pairs of one expert.
//
// gate_up: h[p] = silu(gate x) * (up x), or relu(up x)^2. A tile of 16 rows is 8 of gate and the same 8 of up, so that
// a lane's C fragment holds both; an item is R tiles. All groups of warps share all (block, item) evenly, each a run of
// neighbours: x stays in registers until the block changes.
// down: y[t] = sum_j weight[t, j] (down h[t k + j]), and the residual. CLUSTER CTAs own 16 R rows of y and share all
// blocks, so the sum needs neither atomics nor another launch: each pair's rows lie in the shared memory of one of them,
// where the others have zeros (or, SPILL, in memory), until all are there. It runs over a token's choices in their
// order; a result does not depend on what the other tokens are.
//
// Both: `parts` warps, a group, share K, SPAN records each; a lane copies what it will read itself into its warp's ring
// of RING items; the activations of the next block replace those of this one record by record. Columns of B do not mix,
// so dead places of a block may hold anything; columns beyond K are zero.
//
// Launched early (PDL): gate_up waits before it reads the list, and only then lets down start; so whatever came before
// gate_up is complete when down begins, and down reads list and weights before it waits for h.
//
// Defines: GATE_UP or DOWN with NT, SPAN, RING, WARPS, CTAS, HALF, PDL, R and GATED (or relu^2); CLUSTER, SPILL; or ROUTE
// with EACH, experts a lane, and WARPS.

#define W4 1
#include "mma.cuh"

__device__ __forceinline__ int load_l2(const void *at) {  // never from this multiprocessor's own, older copy
  int v;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

#ifndef R
#define R 1
#endif

#if defined(GATE_UP) || defined(DOWN)
constexpr int S = 8 * NT;
constexpr u32 DEAD = 0xFFFF;

struct At {
  u32 block, tile;
};

// 128 registers at most, so that with 8 warps down can be there before gate_up has left.
extern "C" __global__ void SHARE __launch_bounds__(WARPS * 32, CTAS * WARPS < 16 ? 16 / WARPS : CTAS)
#ifdef GATE_UP
gate_up(const u8 *__restrict__ w, const float *__restrict__ scale, const u16 *x, const int *list, u16 *y, int bound,
        int n, int k, int pitch, int parts, int top_k) {
#else
down(const u8 *__restrict__ w, const float *__restrict__ scale, const u16 *x, const int *list, const int *slots,
     const float *weights, float *spilled, const u16 *residual, u16 *y, int bound, int n, int k, int parts, int top_k,
     int tokens) {
  const int pitch = k, pairs = tokens * top_k;
#endif
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const u32 group = warp / parts, part = warp % parts, groups = warps / parts;
  const u32 steps = (k + 127) >> 7, tiles = (n >> 4) / R, first = part * SPAN, own = steps - first;  // of R at once
  const u8 *const codes = w + first * RECORD + lane * 16;
#ifdef GATE_UP
  float4(*partial)[WARPS][R][NT][32] = (float4(*)[WARPS][R][NT][32])shared_memory;  // [2]
  u16 *const expert = (u16 *)(partial + 2);
  after_previous_kernel();
  let_next_kernel_start();
#else
  let_next_kernel_start();
  const u32 rank = CLUSTER > 1 ? blockIdx.y : 0;
  float *const factor = (float *)shared_memory + (SPILL ? 0 : parts * pairs * 16 * R);
  auto rows_of = [&](u32 p, u32 q) {  // the 16 R of pair p from part q
    const u32 at = (q * pairs + p) * 16 * R;
    return (SPILL ? spilled + (long long)blockIdx.x * parts * pairs * 16 * R : (float *)shared_memory) + at;
  };
  u16 *const expert = (u16 *)(factor + pairs);
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    const bool dead = load_l2(slots + p) < 0;  // in no block: nobody writes its rows
    factor[p] = dead ? 0.0f : __uint_as_float(load_l2(weights + p));
    if (dead || (CLUSTER > 1 && !SPILL))
      for (int q = 0; q < parts; q++)
        for (int r = 0; r < 4 * R; r++) ((float4 *)rows_of(p, q))[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
#endif
  const u16 *const pair = expert + bound;
  const u32 ring = ((shared_at(pair + bound * S) + 15) & ~15u) + warp * (R * SLOT);  // [RING][SPAN][warps][R]
#pragma unroll 4
  for (int i = threadIdx.x; i < bound * (1 + S); i += blockDim.x) expert[i] = u16(load_l2(list + 1 + i));
  const u32 blocks = load_l2(list);
  __syncthreads();

  At at = {};
#ifdef GATE_UP
  const u32 total = blocks * tiles, sharers = gridDim.x * groups, which = blockIdx.x * groups + group;
  const u32 end = (which + 1) * total / sharers;
  u32 item = which * total / sharers;
  at.block = item / tiles, at.tile = item - at.block * tiles;
  auto live = [&](const At &, int ahead) { return item + ahead < end; };
  auto next = [&](At &a) {
    if (++a.tile == tiles) a.tile = 0, a.block++;
  };
#else
  const u32 begin = group * CLUSTER + rank;
  at.block = begin, at.tile = begin < blocks ? blockIdx.x : tiles;
  auto live = [&](const At &a, int) { return a.tile < tiles; };
  auto next = [&](At &a) {
    a.block += groups * CLUSTER;
    if (a.block >= blocks) a.block = begin, a.tile += gridDim.x;
  };
#endif
  auto request = [&](const At &a, int slot, int s, int ahead) {  // ahead: items
    if (live(a, ahead) && s < own)
#pragma unroll
      for (int r = 0; r < R; r++)
        fetch(ring + (slot * SPAN + s) * (warps * R * SLOT) + r * SLOT,
              codes + (unsigned long long)(((expert[a.block] * tiles + a.tile) * R + r) * steps + s) * RECORD, lane);
    commit();
  };

  At ahead = at;
#pragma unroll
  for (int r = 0; r < RING; r++) {
#pragma unroll
    for (int s = 0; s < SPAN; s++) request(ahead, r, s, r);
    next(ahead);
  }
#ifdef DOWN
  after_previous_kernel();
#endif

  u32 b[SPAN][2][NT][8];
  const u32 skip = first * 128 + (lane & 3) * 16;
  auto load_x = [&](u32 block, int s) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
      const u32 p = pair[block * S + t * 8 + (lane >> 2)];
#ifdef GATE_UP
      const u16 *row = x + (long long)(p / top_k) * pitch;
#else
      const u16 *row = x + (long long)p * pitch;
#endif
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 column = skip + s * 128 + h * 64;
        const bool live = p != DEAD && column < k;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          u32 *v = &b[s][h][t][4 * i];
          v[0] = v[1] = v[2] = v[3] = 0;
          if (live)
            asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(row + column + 8 * i));
        }
      }
    }
  };
  if (live(at, 0)) {
#pragma unroll
    for (int s = 0; s < SPAN; s++) load_x(at.block, s);
  }

  int slot = 0, turn = 0, side = 0;
  auto multiply_item = [&] {
    const int row = (tiles * expert[at.block] + at.tile) * (16 * R) + (lane >> 2);
    float up[R] = {}, lower[R] = {};
#pragma unroll
    for (int r = 0; r < R; r++)
#ifdef GATE_UP
      if (part == (turn + r) % parts)  // adds up this tile's sums
#endif
        up[r] = scale[row + r * 16] * FACTOR, lower[r] = scale[row + r * 16 + 8] * FACTOR;
    At then = at;
    next(then);
    const u32 other = live(then, 1) && then.block != at.block ? then.block : ~0u;  // the next block, if it is another
    bool full[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) full[t] = t == 0 || pair[at.block * S + t * 8] != DEAD;
    float c[R][NT][4] = {};
#pragma unroll
    for (int s = 0; s < SPAN; s++) {
      await<RING * SPAN - 1>();
      const u32 from = ring + (slot * SPAN + s) * (warps * R * SLOT);
      Step v[R];
#pragma unroll
      for (int r = 0; r < R; r++) v[r].scale = load4(from + r * SLOT + 1024 + lane * 4);
      auto read_codes = [&](int h) {
#pragma unroll
        for (int r = 0; r < R; r++) v[r].code[h] = load16(from + r * SLOT + h * 512 + lane * 16);
      };
      read_codes(0);
      if (R == 1) read_codes(1), request(ahead, slot, s, RING);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (R > 1 && h == 1) read_codes(1), request(ahead, slot, s, RING);  // later: registers are scarce
        if (s >= own) continue;
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int r = 0; r < R; r++) {
            u32 a[4];
            decode(a, v[r], scales_of(v[r], h), h, j);
#pragma unroll
            for (int t = 0; t < NT; t++)
              if (full[t]) multiply(c[r][t], a, b[s][h][t][2 * j], b[s][h][t][2 * j + 1]);
          }
      }
      if (other != ~0u) load_x(other, s);
    }
    next(ahead);
    slot = slot + 1 == RING ? 0 : slot + 1;

#ifdef GATE_UP
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int t = 0; t < NT; t++) partial[side][warp][r][t][lane] = fragment(c[r][t]);
    asm volatile("bar.sync %0, %1;" ::"r"(group), "r"(parts * 32) : "memory");
#pragma unroll
    for (int r = 0; r < R; r++)
      if (part == (turn + r) % parts)
#pragma unroll 1
        for (int t = 0; t < NT; t++) {
          float4 v = partial[side][group * parts][r][t][lane];
#pragma unroll 4
          for (int p = 1; p < parts; p++) add(v, partial[side][group * parts + p][r][t][lane]);
          const float sums[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const u32 p = pair[at.block * S + t * 8 + (lane & 3) * 2 + i];
            if (p == DEAD) continue;
            const float high = sums[i] * up[r], low = sums[2 + i] * lower[r];
            u16 *to = y + (long long)p * (GATED ? n / 2 : n) + (at.tile * R + r) * (GATED ? 8 : 16) + (lane >> 2);
            if (GATED) to[0] = narrow16(__fdividef(high, 1.0f + __expf(-high)) * low);
            else {
              const float a = fmaxf(high, 0.0f), b = fmaxf(low, 0.0f);
              to[0] = narrow16(a * a), to[8] = narrow16(b * b);
            }
          }
        }
    side ^= 1, turn = (turn + R) % parts;
#else
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 p = pair[at.block * S + t * 8 + (lane & 3) * 2 + i];
        float *to = rows_of(p, part) + (lane >> 2);
#pragma unroll
        for (int r = 0; r < R; r++)
          if (p != DEAD) to[16 * r] = c[r][t][i] * up[r], to[16 * r + 8] = c[r][t][2 + i] * lower[r];
      }
#endif
    next(at);
  };

#ifdef GATE_UP
  for (; live(at, 0); item++) multiply_item();
#else
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    while (at.tile == tile) multiply_item();
    meet_cluster();
    for (int i = rank * blockDim.x + threadIdx.x; i < tokens * 4 * R; i += blockDim.x * CLUSTER) {
      const int t = i / (4 * R), part_of = i % (4 * R) * 4;
      auto from = [&](u32 p, u32 q) {
        const float4 *own = (const float4 *)(rows_of(p, q) + part_of);
        return SPILL ? *own : cluster_sum(own);
      };
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll(SPILL || RING == 1 || CLUSTER > 1 ? 2 : 4)  // few registers are left
      for (int p = t * top_k; p < (t + 1) * top_k; p++) {
        float4 v = from(p, 0);
#pragma unroll 1
        for (int q = 1; q < parts; q++) add(v, from(p, q));
        const float by = factor[p];
        sum.x = fmaf(by, v.x, sum.x), sum.y = fmaf(by, v.y, sum.y);
        sum.z = fmaf(by, v.z, sum.z), sum.w = fmaf(by, v.w, sum.w);
      }
      const u32 to = t * n + tile * (16 * R) + part_of;
      if (residual) {
        const uint2 v = *(const uint2 *)(residual + to);
        add(sum, make_float4(widen16(v.x), widen16(v.x >> 16), widen16(v.y), widen16(v.y >> 16)));
      }
      *(uint2 *)(y + to) =
          make_uint2(narrow16(sum.x) | u32(narrow16(sum.y)) << 16, narrow16(sum.z) | u32(narrow16(sum.w)) << 16);
    }
    meet_cluster();  // nobody goes on or leaves while its rows are being read
  }
#endif
}

#elif defined(ROUTE)
constexpr u32 ALL = 0xFFFFFFFFu;
constexpr int MOST = 32 * EACH;  // experts

__device__ __forceinline__ u32 key(float v) {  // grows with v; never 0, which marks what cannot be taken
  const u32 bits = __float_as_uint(v + 0.0f);
  return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}
__device__ __forceinline__ float number(const void *at, long long i, int kind) {  // 0 f32, 1 bf16, 2 f16
  if (kind == 0) return ((const float *)at)[i];
  const u16 v = ((const u16 *)at)[i];
  if (kind == 1) return __uint_as_float(u32(v) << 16);
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}
__device__ __forceinline__ float sum_of(float v) {
#pragma unroll
  for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(ALL, v, i);
  return v;
}

// Pairs of one token, lane by lane, as blocks of one: no two of a token's experts are the same.
__device__ __forceinline__ void list_one(int id, int pairs, int *list, int size, int bound, int lane) {
  const u32 live = __ballot_sync(ALL, lane < pairs && id >= 0);
  if (lane < pairs && id >= 0) {
    const int at = __popc(live & ((1u << lane) - 1));
    list[1 + at] = id;
    for (int i = 0; i < size; i++) list[1 + bound + at * size + i] = i ? -1 : lane;
  }
  if (lane == 0) list[0] = __popc(live);
}

// Pairs by expert, each expert's in their order, in blocks of `size`: a counting sort by one CTA. Every warp counts its
// run of pairs; sums over warps and experts give each run its places. id(p): a slot below `local`, or negative.
template <typename Ids>
__device__ __forceinline__ void list_all(Ids id, int pairs, int local, int *list, int size, int bound, int *hist) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int chunks = (pairs + 31) >> 5, runs = min(WARPS, max(chunks, 1)), run = (chunks + runs - 1) / runs * 32;
  int *first = hist + runs * local, *sums = first + local;
  for (int i = threadIdx.x; i < runs * local; i += WARPS * 32) hist[i] = 0;
  __syncthreads();
  auto each = [&](auto &&visit) {
    if (warp < runs)
      for (int at = warp * run; at < min(pairs, (warp + 1) * run); at += 32) {
        const int e = at + lane < pairs ? id(at + lane) : -1;
        const u32 same = __match_any_sync(ALL, e);
        const int rank = __popc(same & ((1u << lane) - 1));
        int *count = hist + warp * local + e;
        const int before = e >= 0 ? *count : 0;
        __syncwarp();
        if (e >= 0 && rank == 0) *count = before + __popc(same);
        __syncwarp();
        if (e >= 0) visit(at + lane, e, before + rank);
      }
  };
  each([](int, int, int) {});
  __syncthreads();
  const int share = (local + WARPS * 32 - 1) / (WARPS * 32), begin = threadIdx.x * share;
  int mine = 0;  // blocks of this thread's experts
  for (int e = begin; e < min(local, begin + share); e++) {
    int count = 0;
    for (int r = 0; r < runs; r++) {
      const int c = hist[r * local + e];
      hist[r * local + e] = count, count += c;
    }
    first[e] = count, mine += (count + size - 1) / size;
  }
  int upto = mine;
#pragma unroll
  for (int i = 1; i < 32; i <<= 1) {
    const int v = __shfl_up_sync(ALL, upto, i);
    if (lane >= i) upto += v;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  for (int r = 0; r < warp; r++) upto += sums[r];
  if (threadIdx.x == WARPS * 32 - 1) list[0] = upto;
  int block = upto - mine;
  for (int e = begin; e < min(local, begin + share); e++) {
    const int count = first[e], stop = block + (count + size - 1) / size;
    first[e] = block;
    for (int i = count; i < (stop - block) * size; i++) list[1 + bound + block * size + i] = -1;
    for (; block < stop; block++) list[1 + block] = e;
  }
  __syncthreads();
  each([&](int p, int e, int rank) { list[1 + bound + first[e] * size + rank] = p; });
}

// Scores, choice, weights and list. A warp takes a token; the last CTA to end makes the list. size 0: no list.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
route(const void *logits, const float *bias, const int *map, const void *gate, int *slots, float *weights, int *list,
      int *ticket, int tokens, int experts, int pitch, int kind, int top_k, int sigmoid, int groups, int top_groups,
      int normalize, float factor, int copies, int local, int shared, int gate_pitch, int size, int bound) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = blockIdx.x * WARPS + warp, all = top_k + shared;
  let_next_kernel_start();
  int *chosen = (int *)shared_memory;                       // [WARPS][32], of this CTA's tokens
  float *score = (float *)(chosen + WARPS * 32) + warp * MOST;  // [WARPS][MOST]
  after_previous_kernel();
  int slot = -1;
  if (t < tokens) {
    float v[EACH];
    u32 keys[EACH];
    float high = __uint_as_float(0xFF800000u), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int e = i * 32 + lane;
      v[i] = e < experts ? number(logits, (long long)t * pitch + e, kind) : __uint_as_float(0xFF800000u);
      keys[i] = e < experts ? key(v[i]) : 0;
      high = fmaxf(high, v[i]);
    }
#pragma unroll
    for (int i = 16; i; i >>= 1) high = fmaxf(high, __shfl_xor_sync(ALL, high, i));
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      v[i] = sigmoid ? __fdividef(1.0f, 1.0f + expf(-v[i])) : expf(v[i] - high);
      sum += v[i];
    }
    const float inverse = sigmoid ? 1.0f : __fdividef(1.0f, sum_of(sum));
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int e = i * 32 + lane;
      v[i] *= inverse;
      score[e] = v[i];
      if (e < experts && (bias || groups > 1)) v[i] += bias ? bias[e] : 0.0f, keys[i] = key(v[i]);
    }
    if (groups > 1) {  // a group is as good as its two best experts; only the best groups stay
      const int width = experts / groups, inverse = ((1 << 20) + width - 1) / width;  // e / width = e * this >> 20
      __syncwarp();
      float best = __uint_as_float(0xFF800000u), second = best;
      for (int e = lane * width; lane < groups && e < (lane + 1) * width; e++) {
        const float s = score[e] + (bias ? bias[e] : 0.0f);
        if (s > best) second = best, best = s;
        else second = fmaxf(second, s);
      }
      u32 mine = lane < groups ? key(width > 1 ? best + second : best) : 0, kept = 0;
      for (int i = 0; i < top_groups; i++) {
        const u32 most = __reduce_max_sync(ALL, mine);
        const u32 winner = __reduce_min_sync(ALL, mine == most ? lane : 32u);
        kept |= 1u << winner;
        if (lane == winner) mine = 0;
      }
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (i * 32 + lane < experts && !(kept >> ((i * 32 + lane) * inverse >> 20) & 1)) keys[i] = 0;
    }
    int expert = 0;
    for (int j = 0; j < top_k; j++) {
      u32 most = 0, at = 0;
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (keys[i] > most) most = keys[i], at = i;
      const u32 top = __reduce_max_sync(ALL, most);
      const u32 winner = __reduce_min_sync(ALL, most == top ? at * 32 + lane : ALL);
      if (lane == j) expert = winner;
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (winner == i * 32 + lane) keys[i] = 0;
    }
    __syncwarp();
    float weight = lane < top_k ? score[expert] : 0.0f;
    const float whole = sum_of(weight);
    weight = (normalize ? __fdividef(weight, whole + 1e-20f) : weight) * factor;
    if (lane < top_k) slot = map ? map[expert * copies + t % copies] : expert;
    else if (lane < all) {
      slot = local - shared + lane - top_k;
      weight = gate ? __fdividef(1.0f, 1.0f + expf(-number(gate, (long long)t * gate_pitch, kind))) : 1.0f;
    }
    if (slot >= local) slot = -1;
    if (lane < all) {
      slots[t * all + lane] = slot, weights[t * all + lane] = weight;
      if (gridDim.x == 1) chosen[t * all + lane] = slot;
    }
  }
  if (size == 0) return;
  if (tokens == 1) {
    if (warp == 0) list_one(slot, all, list, size, bound, lane);
    return;
  }
  __syncthreads();
  int *const hist = chosen + WARPS * 32;
  if (gridDim.x == 1) return list_all([&](int p) { return chosen[p]; }, tokens * all, local, list, size, bound, hist);
  if (threadIdx.x == 0) {
    __threadfence();
    *chosen = atomicAdd(ticket, 1);
    __threadfence();
    if (*chosen + 1 == gridDim.x) *ticket = 0;  // as the next launch wants it
  }
  __syncthreads();
  if (*chosen + 1 == gridDim.x)
    list_all([&](int p) { return load_l2(slots + p); }, tokens * all, local, list, size, bound, hist);
}

// The list alone, of ids that somebody else chose. wide: they have 64 bits.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
listing(const void *ids, int *slots, int *list, int pairs, int wide, int local, int size, int bound) {
  let_next_kernel_start();
  after_previous_kernel();
  for (int p = threadIdx.x; p < pairs; p += WARPS * 32) {
    const long long id = wide ? ((const long long *)ids)[p] : ((const int *)ids)[p];
    slots[p] = id >= 0 && id < local ? (int)id : -1;
  }
  __syncthreads();
  list_all([&](int p) { return slots[p]; }, pairs, local, list, size, bound, (int *)shared_memory);
}
#endif
