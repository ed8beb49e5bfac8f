// Routing for few tokens in one launch: scores, choice, weights, and the list of work that experts.cu goes through.
//
// Legend: as in experts.cu. A list is: the number of blocks; [bound] their experts; [bound, size] their pairs, absent ones
// (-1) last. It depends on nothing but the choices.
//
// Defines: EACH, experts a lane; WARPS; PDL; HALF, which mma.cuh wants.

#define W4 1
#include "mma.cuh"

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
      const int width = experts / groups, by_width = ((1 << 20) + width - 1) / width;  // e / width = e * this >> 20
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
        if (i * 32 + lane < experts && !(kept >> ((i * 32 + lane) * by_width >> 20) & 1)) keys[i] = 0;
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
