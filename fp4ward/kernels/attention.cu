// Attention of a step of few tokens over the paged cache in one launch: all between the projections and o_proj, by the
// formulas of norm.py, rope.py and attention.py.
//
// Legend: R query heads of a key head, D their size. A tile is 16 keys of a context, from a multiple of 16 on.
//
// A cluster takes a token's R query heads of one key head and a run of its context, a CTA a part of the run, a warp
// every WARPS-th tile of that. A context of many tiles is parted over several clusters, which depends on nothing but
// its length: a token alone gives the same bits. A warp copies K and V of its tiles to its own ring of DEPTH halves of
// tiles, waits for nobody, and has sums, their maximum and their weights for itself; they meet warp by warp, then CTA
// by CTA through the cluster's shared memory, where a CTA has its share of the outputs, then cluster by cluster: of
// those CTAs of a token that have the same share, the last to end adds up all.
//
// K and V of the step's own tokens are not read from the cache but made here, as the cache stores them, by every CTA
// that looks at them; whoever makes them for their own token also stores them. So no CTA waits for another's store. The
// rows of one sequence lie one behind the other, at positions that do, too.
//
// Products, m16n8k16: scores have 16 heads (absent ones zero) as rows and 8 keys as columns, so that their C fragments
// are what the second product takes as B: columns are 8 heads, k 16 keys, rows 16 elements of V. The order of k in the
// first and of rows in the second is free: a lane loads 8 elements at once. An FP8 cache is read as f16, exactly.
//
// Defines: D, R (up to 16), X_HALF (activations are f16, else bf16), CACHE (of bf16 0, f16 1, FP8 2), HALF (products
// are f16: where X_HALF or CACHE is not 0), WARPS (a divisor of 8), DEPTH, SPAN (tiles of a CTA, before there are more
// clusters), CLUSTER, PDL.

#define W4 1
#include "mma.cuh"

constexpr int THREADS = WARPS * 32, KEYS = 16, NT = (R + 7) / 8, SIZE = CACHE == 2 ? 1 : 2;
constexpr int BYTES = D * SIZE, CHUNKS = BYTES / 16, TILE = KEYS * BYTES;  // of a row; bytes of half a tile
constexpr int LANES = D / 8;                                               // that have 8 elements each
constexpr int PITCH = D + 4, SUMS = NT * 8 * PITCH * 4;                    // of a head's sums; bytes of all
constexpr int OWN = DEPTH * TILE > SUMS ? DEPTH * TILE : SUMS;             // bytes of a warp
constexpr int ACROSS = CHUNKS < 8 ? CHUNKS : 8, AT_ONCE = 32 / ACROSS;     // lanes that copy a row; rows
constexpr int HEADS = NT * 8 / WARPS;                                      // of q that a warp makes
constexpr int EIGHTS = (D + 63) / 64, UNITS = R * D / 4 / CLUSTER, PER = (UNITS + THREADS - 1) / THREADS;
constexpr float LOW = -1e30f;
static_assert(D % 32 == 0 && R <= 16 && 8 % WARPS == 0 && DEPTH >= 2 && (CACHE == 0 || HALF), "sizes");

__device__ __forceinline__ float power(float v) {  // 2^v
  float p;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p) : "f"(v));
  return p;
}
template <bool F16> __device__ __forceinline__ float number(u32 v) {
  float f;
  if (F16) asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(u16(v)));
  else f = __uint_as_float(v << 16);
  return f;
}
template <bool FROM, bool TO> __device__ __forceinline__ uint4 as(const uint4 &v) {
  u32 to[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (FROM != TO) to[i] = pair<TO>(number<FROM>(to[i]), number<FROM>(to[i] >> 16));
  return make_uint4(to[0], to[1], to[2], to[3]);
}

// Two e4m3 as f16, before SM 89 of 2^-8 their value (and NaN as 480 of that).
#if __CUDA_ARCH__ >= 890
constexpr float UNIT = 1.0f;
__device__ __forceinline__ u32 widen8(u32 v, int upper) {
  u32 d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(u16(upper ? v >> 16 : v)));
  return d;
}
#else
constexpr float UNIT = CACHE == 2 ? 256.0f : 1.0f;
__device__ __forceinline__ u32 widen8(u32 v, int upper) {
  const u32 w = __byte_perm(v, 0, upper ? 0x3424 : 0x1404);
  return (w & SIGN) | (w >> 1 & 0x3F803F80u);
}
#endif
__device__ __forceinline__ u32 narrow8(float v) {  // nearest even, at most 448; NaN stays
  const float a = fminf(fabsf(v), 448.0f);
  const u32 bits = __float_as_uint(a), sign = __float_as_uint(v) >> 24 & 0x80;
  if (v != v) return 0x7F;
  if (a < 0.015625f) return sign | (__float_as_uint(a + 16384.0f) & 15);  // subnormal: what is left beside 2^14
  return sign | ((bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - 960);
}
template <bool F16> __device__ __forceinline__ u32 narrow8(u32 a, u32 b, float scale) {
  return narrow8(number<F16>(a) / scale) | narrow8(number<F16>(a >> 16) / scale) << 8 |
         narrow8(number<F16>(b) / scale) << 16 | narrow8(number<F16>(b >> 16) / scale) << 24;
}

// Where byte `at` of a key's row lies in its tile: no bank is met twice, neither by 8 keys' pieces nor by 8 pieces of V
__device__ __forceinline__ int place_of(int key, int at) {
  return key * BYTES + ((at >> 4 ^ key & 6 ^ (key & 1) << 2) & (CHUNKS - 1)) * 16 + (at & 15);
}
__device__ __forceinline__ uint4 eight(const u8 *tile, int key, int i) {  // elements 8 i ... of a key, for a product
  const u8 *from = tile + place_of(key, i * 8 * SIZE);
  if constexpr (CACHE == 2) {
    const uint2 v = *(const uint2 *)from;
    return make_uint4(widen8(v.x, 0), widen8(v.x, 1), widen8(v.y, 0), widen8(v.y, 1));
  } else
    return as<CACHE == 1, HALF>(*(const uint4 *)from);
}

// Where it stands: before the kernel ahead has ended
__device__ __forceinline__ void eight_of(float (&to)[8], const float *from, int lane) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from + min(lane, LANES - 1) * 8 + i * 4) : "memory");
#pragma unroll
    for (int e = 0; e < 4; e++) to[i * 4 + e] = __uint_as_float(word(v, e));
  }
}

// Norm, then rotation, of N heads, each rounded as activations are. A lane has 8 elements; rows: [N][D], the warp's.
template <int N>
__device__ __forceinline__ void turn(uint4 (&v)[N], const float (&w)[8], u16 *rows, const float *freq, float freq0,
                                     int half, int position, float eps, int lane) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    float x[8], sum = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = number<X_HALF>(word(v[i], e / 2) >> e % 2 * 16), sum = fmaf(x[e], x[e], sum);
#pragma unroll
    for (int by = 16; by; by >>= 1) sum += __shfl_xor_sync(ALL, sum, by);
    const float by = rsqrtf(sum / D + eps);
    u32 to[4];
#pragma unroll
    for (int e = 0; e < 4; e++) to[e] = pair<X_HALF>(x[2 * e] * by * w[2 * e], x[2 * e + 1] * by * w[2 * e + 1]);
    if (lane < LANES) ((uint4 *)(rows + i * D))[lane] = make_uint4(to[0], to[1], to[2], to[3]);
  }
  __syncwarp();
  for (int j = lane; j < half; j += 32) {
    const float angle = (float)position * (j == lane ? freq0 : freq[j]);
    const double turns = angle * 0.15915494309189535;  // of up to 2^18 radians, so that no slow path is needed
    float sin, cos;
    sincospif(2.0f * (float)(turns - rint(turns)), &sin, &cos);
#pragma unroll
    for (int i = 0; i < N; i++) {
      u16 *const a_at = rows + i * D + j, *const b_at = a_at + half;
      const float a = number<X_HALF>(*a_at), b = number<X_HALF>(*b_at);
      *a_at = pair<X_HALF>(a * cos - b * sin, 0.0f), *b_at = pair<X_HALF>(b * cos + a * sin, 0.0f);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = ((const uint4 *)(rows + i * D))[min(lane, LANES - 1)];
  __syncwarp();
}

struct Part {  // of a head: 4 elements' weighted sums, with weights relative to 2^most, and the sum of the weights
  float4 sum;
  float most, weight;
};
__device__ __forceinline__ void join(Part &a, const Part &b) {
  const float most = fmaxf(a.most, b.most), by_a = power(a.most - most), by_b = power(b.most - most);
  a.sum = make_float4(fmaf(by_a, a.sum.x, by_b * b.sum.x), fmaf(by_a, a.sum.y, by_b * b.sum.y),
                      fmaf(by_a, a.sum.z, by_b * b.sum.z), fmaf(by_a, a.sum.w, by_b * b.sum.w));
  a.weight = fmaf(by_a, a.weight, by_b * b.weight), a.most = most;
}
__device__ __forceinline__ float4 of_rank(const float4 *own, int rank) {  // what another CTA has at this place
  float4 v = *own;
#if CLUSTER > 1
  u32 far;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(shared_at(own)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(far) : "memory");
#endif
  return v;
}

// score: of a product of a query and a stored key, in powers of two. pages: a sequence's in a row. most: clusters of a
// token and key head in the grid.
extern "C" __global__ void SHARE __launch_bounds__(THREADS, NT == 1 && CLUSTER > 1 ? 3 : 2)
attend(const u16 *q, const u16 *k, const u16 *v, const float *q_norm, const float *k_norm, const float *freq,
       const long long *positions, const long long *cache_at, const int *owner, const int *pages, u8 *cache_k,
       u8 *cache_v, float4 *parts, int *tickets, u16 *out, int key_heads, int half, int page_size, int page_pitch,
       int q_pitch, int k_pitch, int v_pitch, int most, float eps, float score, float k_scale, float v_scale) {
  const int lane = threadIdx.x & 31, g = lane >> 2, quad = lane & 3;
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);  // so the compiler knows that all lanes have the same
  const int t = blockIdx.x / key_heads, head = blockIdx.x - t * key_heads;
  const int rank = CLUSTER > 1 ? blockIdx.y % CLUSTER : 0, cluster = blockIdx.y / CLUSTER;

  u8 *const ring = (u8 *)shared_memory + warp * OWN;
  uint4 *const queries = shared_memory + WARPS * OWN / 16;                // [D / 16][32], fragments of A
  u16 *const rows = (u16 *)(queries + D * 2) + warp * D;                  // [WARPS][D]
  float4 *const own_stats = (float4 *)(queries + D * 2 + WARPS * D / 8);  // [16]: maximum and weight of a head, here
  float2 *const stats = (float2 *)(own_stats + 16);                       // [WARPS][16], of warps
  int *const told = (int *)(stats + WARPS * 16);

  let_next_kernel_start();
  float q_by[8], k_by[8];
  eight_of(q_by, q_norm, lane), eight_of(k_by, k_norm, lane);
  const float freq0 = __uint_as_float(load_l2(freq + min(lane, half - 1)));
  after_previous_kernel();

  const u16 *const q_own = q + (long long)t * q_pitch + head * R * 2 * D;
  int before = __ldcg(owner + max(t - lane, 0));  // the sequence of the token `lane` rows before
  const int seq = __shfl_sync(ALL, before, 0), n = (int)__ldcg(positions + t) + 1;
  uint2 gate[PER];
  uint4 raw[HEADS];
  auto out_at = [&](int i) { return threadIdx.x + i * THREADS + rank * UNITS; };  // a unit: 4 elements of all heads'
  auto gate_at = [&](int i) {
    return __ldcg((const uint2 *)(q_own + (out_at(i) / (D / 4) * 2 + 1) * D) + out_at(i) % (D / 4));
  };
  if (PER <= 2)  // else there are no registers for them
#pragma unroll
    for (int i = 0; i < PER; i++)
      if (threadIdx.x + i * THREADS < UNITS) gate[i] = gate_at(i);
#pragma unroll
  for (int i = 0; i < HEADS; i++) {
    const int h = warp + i * WARPS;
    raw[i] = make_uint4(0, 0, 0, 0);
    if (h < R && lane < LANES) raw[i] = __ldcg((const uint4 *)(q_own + h * 2 * D) + lane);
  }
  auto give = [&](int i, const Part &p) {
    const float by = __fdividef(v_scale * UNIT, p.weight);
    const uint2 own = PER <= 2 ? gate[i] : gate_at(i);
    const float to[4] = {p.sum.x * by, p.sum.y * by, p.sum.z * by, p.sum.w * by};
    u32 made[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 of = j ? own.y : own.x;
      made[j] = pair<X_HALF>(__fdividef(to[2 * j], 1.0f + __expf(-number<X_HALF>(of))),
                             __fdividef(to[2 * j + 1], 1.0f + __expf(-number<X_HALF>(of >> 16))));
    }
    if (seq < 0) made[0] = made[1] = 0;
    ((uint2 *)out)[(long long)blockIdx.x * (R * D / 4) + out_at(i)] = make_uint2(made[0], made[1]);
  };

  const int tiles = seq < 0 ? 0 : (n + KEYS - 1) / KEYS;
  const int clusters = min((tiles + SPAN * CLUSTER - 1) / (SPAN * CLUSTER), most);
  if (cluster >= max(clusters, 1)) return;
  if (tiles == 0) {  // padding
#pragma unroll
    for (int i = 0; i < PER; i++)
      if (threadIdx.x + i * THREADS < UNITS) give(i, Part{make_float4(0.0f, 0.0f, 0.0f, 0.0f), 0.0f, 1.0f});
    return;
  }
  const int share = (tiles + clusters * CLUSTER - 1) / (clusters * CLUSTER);
  const int first = min(tiles, (cluster * CLUSTER + rank) * share), here = min(tiles - first, share);
  const int count = (here - warp + WARPS - 1) / WARPS;  // of this warp's tiles
  int fresh = 0;                                        // how many keys, the last ones, are of this step
  for (u32 same = ALL; same == ALL; before = __ldcg(owner + max(t - fresh - lane, 0))) {
    same = __ballot_sync(ALL, t - fresh - lane >= 0 && before == seq);
    fresh += __popc(same & ~(same + 1));
  }

  int row = 0;  // of key `lane` of a tile in the cache, or -1 for none, -2 for one of this step
  auto bring = [&](int unit, int slot) {  // a tile's K, or V
    const int key = (first + warp + unit / 2 * WARPS) * KEYS + (lane & 15);
    if (unit < 2 * count) {
      if (unit % 2 == 0) {
        row = key < n ? -2 : -1;
        const int page = key / page_size;
        if (key < n - fresh)
          row = __ldcg(pages + (long long)seq * page_pitch + page) * page_size + key - page * page_size;
      }
      const u8 *const cache = (unit & 1 ? cache_v : cache_k) + head * BYTES;
      const u32 to = shared_at(ring + slot * TILE);
#pragma unroll
      for (int j = 0; j < KEYS / AT_ONCE; j++) {
        const int of = lane / ACROSS + j * AT_ONCE, from = __shfl_sync(ALL, row, of);
        const u8 *const piece = cache + (long long)max(from, 0) * key_heads * BYTES + lane % ACROSS * 16;
        if (from > -2)
#pragma unroll
          for (int c = 0; c < BYTES; c += ACROSS * 16)
            copy16(to + place_of(of, lane % ACROSS * 16) + c, piece + c, from >= 0);
      }
    }
    commit();
  };
  auto make = [&](int tile, u8 *k_to, u8 *v_to) {  // what the step has of it
    for (int key = max(n - fresh, tile * KEYS); key < min(n, tile * KEYS + KEYS); key++) {
      const long long token = t - (n - 1 - key);
      uint4 x[2][1] = {};
      if (lane < LANES) {
        x[0][0] = __ldcg((const uint4 *)(k + token * k_pitch + head * D) + lane);
        x[1][0] = __ldcg((const uint4 *)(v + token * v_pitch + head * D) + lane);
      }
      const long long home = key == n - 1 ? (__ldcg(cache_at + t) * key_heads + head) * BYTES : -1;
      turn(x[0], k_by, rows, freq, freq0, half, key, eps, lane);
      auto put = [&](auto made, u8 *tile_at, u8 *cache) {
        *(decltype(made) *)(tile_at + place_of(key % KEYS, lane * 8 * SIZE)) = made;
        if (home >= 0) *(decltype(made) *)(cache + home + lane * 8 * SIZE) = made;
      };
      if (lane < LANES)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint4 &of = x[i][0];
          u8 *const to = i ? v_to : k_to, *const cache = i ? cache_v : cache_k;
          const float scale = i ? v_scale : k_scale;
          if constexpr (CACHE == 2)
            put(make_uint2(narrow8<X_HALF>(of.x, of.y, scale), narrow8<X_HALF>(of.z, of.w, scale)), to, cache);
          else put(as<X_HALF, CACHE == 1>(of), to, cache);
        }
    }
  };

  float *const sums = (float *)shared_memory;  // of warp w from w * OWN bytes on: [NT * 8][PITCH]
  if (here > 0) {
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) bring(i, i);
    turn(raw, q_by, (u16 *)queries + warp * HEADS * D, freq, freq0, half, n - 1, eps, lane);
    __syncthreads();  // for rows there become fragments
#pragma unroll
    for (int i = 0; i < 8 / WARPS; i++) {
      const uint4 low = as<X_HALF, HALF>(raw[i]), high = as<X_HALF, HALF>(raw[HEADS - 8 / WARPS + i]);
      if (lane < LANES)
#pragma unroll
        for (int j = 0; j < 2; j++)
          queries[(lane / 4 * 2 + j) * 32 + (warp + i * WARPS) * 4 + lane % 4] =
              make_uint4(word(low, 2 * j), NT > 1 ? word(high, 2 * j) : 0, word(low, 2 * j + 1),
                         NT > 1 ? word(high, 2 * j + 1) : 0);
    }
    __syncthreads();

    float acc[NT][EIGHTS * 4][4] = {}, top[NT], weight[NT] = {};
    u32 p[NT][2];  // weights of keys 2 quad, 2 quad + 1, and those 8 further, for head g
#pragma unroll
    for (int h = 0; h < NT; h++) top[h] = LOW;
    int slot = 0;
#pragma unroll 1
    for (int unit = 0; unit < 2 * count; unit++) {
      const int tile = first + warp + unit / 2 * WARPS, next = slot + 1 == DEPTH ? 0 : slot + 1;
      const u8 *const at = ring + slot * TILE;
      if (unit % 2 == 0) make(tile, ring + slot * TILE, ring + next * TILE);
      await<DEPTH - 1>();
      __syncwarp();
      if (unit % 2 == 0) {
        float c[2][2][4] = {};
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
          const uint4 key[2] = {eight(at, g, 4 * i + quad), eight(at, g + 8, 4 * i + quad)};
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const uint4 of = queries[(2 * i + j) * 32 + lane];
            const u32 a[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
            for (int e = 0; e < 2; e++) multiply(c[e][j], a, word(key[e], 2 * j), word(key[e], 2 * j + 1));
          }
        }
#pragma unroll
        for (int h = 0; h < NT; h++) {
          float s[4], high = top[h];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int key = tile * KEYS + e / 2 * 8 + quad * 2 + e % 2;
            s[e] = key < n ? (c[e / 2][0][h * 2 + e % 2] + c[e / 2][1][h * 2 + e % 2]) * (score * UNIT) : LOW;
            high = fmaxf(high, s[e]);
          }
          high = fmaxf(high, __shfl_xor_sync(ALL, high, 1)), high = fmaxf(high, __shfl_xor_sync(ALL, high, 2));
          const float by = power(top[h] - high);
          float sum = 0.0f;
#pragma unroll
          for (int e = 0; e < 4; e++) s[e] = power(s[e] - high), sum += s[e];
          top[h] = high, weight[h] = fmaf(weight[h], by, sum);
          p[h][0] = pair<HALF>(s[0], s[1]), p[h][1] = pair<HALF>(s[2], s[3]);
          const float by0 = __shfl_sync(ALL, by, quad * 8), by1 = __shfl_sync(ALL, by, quad * 8 + 4);
#pragma unroll
          for (int i = 0; i < EIGHTS * 4; i++)
            acc[h][i][0] *= by0, acc[h][i][1] *= by1, acc[h][i][2] *= by0, acc[h][i][3] *= by1;
        }
      } else {
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
          const int from = min(i * 8 + g, LANES - 1);
          const uint4 x[4] = {eight(at, quad * 2, from), eight(at, quad * 2 + 1, from), eight(at, quad * 2 + 8, from),
                              eight(at, quad * 2 + 9, from)};
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const u32 low = word(x[0], j), low1 = word(x[1], j), high = word(x[2], j), high1 = word(x[3], j);
            const u32 a[4] = {__byte_perm(low, low1, 0x5410), __byte_perm(low, low1, 0x7632),
                              __byte_perm(high, high1, 0x5410), __byte_perm(high, high1, 0x7632)};
#pragma unroll
            for (int h = 0; h < NT; h++) multiply(acc[h][i * 4 + j], a, p[h][0], p[h][1]);
          }
        }
      }
      __syncwarp();
      bring(unit + DEPTH, slot);
      slot = next;
    }

    if (count > 0)
#pragma unroll
      for (int h = 0; h < NT; h++) {
        weight[h] += __shfl_xor_sync(ALL, weight[h], 1), weight[h] += __shfl_xor_sync(ALL, weight[h], 2);
        if (quad == 0) stats[warp * 16 + h * 8 + g] = make_float2(top[h], weight[h]);
#pragma unroll
        for (int i = 0; i < EIGHTS; i++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float *const to = (float *)ring + (h * 8 + quad * 2 + e) * PITCH + i * 64 + g * 8;
            if (i * 64 + g * 8 >= D) continue;
#pragma unroll
            for (int j = 0; j < 2; j++)
              ((float4 *)to)[j] = make_float4(acc[h][i * 4 + 2 * j][e], acc[h][i * 4 + 2 * j][2 + e],
                                              acc[h][i * 4 + 2 * j + 1][e], acc[h][i * 4 + 2 * j + 1][2 + e]);
          }
      }
    __syncthreads();
  }

  const int live = min(here, WARPS);  // warps that had something
  for (int u = threadIdx.x; u < R * D / 4; u += THREADS) {
    const int h = u / (D / 4);
    float4 *const at = (float4 *)(sums + h * PITCH) + u % (D / 4);
    Part all = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), LOW, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      if (w < live) join(all, Part{at[w * OWN / 16], stats[w * 16 + h].x, stats[w * 16 + h].y});
    *at = all.sum;  // warp 0's place
    if (u % (D / 4) == 0) own_stats[h] = make_float4(all.most, all.weight, 0.0f, 0.0f);
  }
  meet_cluster();
  Part all[PER];
#pragma unroll
  for (int i = 0; i < PER; i++)
    if (threadIdx.x + i * THREADS < UNITS) {
      const int h = out_at(i) / (D / 4);
      float4 of[CLUSTER], stat[CLUSTER];
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) {
        of[r] = of_rank((float4 *)(sums + h * PITCH) + out_at(i) % (D / 4), r);
        stat[r] = of_rank(own_stats + h, r);
      }
      all[i] = Part{of[0], stat[0].x, stat[0].y};
#pragma unroll
      for (int r = 1; r < CLUSTER; r++) join(all[i], Part{of[r], stat[r].x, stat[r].y});
    }
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");  // this CTA reads no other's memory any more
#endif
  bool ends = clusters == 1;
  if (!ends) {
    auto part_at = [&](int of, int i) {
      return parts + (((blockIdx.x * (long long)most + of) * CLUSTER + rank) * UNITS + threadIdx.x + i * THREADS) * 2;
    };
#pragma unroll
    for (int i = 0; i < PER; i++)
      if (threadIdx.x + i * THREADS < UNITS) {
        float4 *const to = part_at(cluster, i);
        to[0] = all[i].sum, to[1] = make_float4(all[i].most, all[i].weight, 0.0f, 0.0f);
      }
    __syncthreads();
    if (threadIdx.x == 0) {
      int *const ticket = tickets + blockIdx.x * CLUSTER + rank;
      __threadfence();
      *told = atomicAdd(ticket, 1) + 1 == clusters;
      __threadfence();
      if (*told) *ticket = 0;  // as the next launch wants it
    }
    __syncthreads();
    ends = *told;
    if (ends)
#pragma unroll
      for (int i = 0; i < PER; i++)
        if (threadIdx.x + i * THREADS < UNITS) {
          all[i] = Part{make_float4(0.0f, 0.0f, 0.0f, 0.0f), LOW, 0.0f};
#pragma unroll 4
          for (int c = 0; c < clusters; c++) {
            const float4 sum = __ldcg(part_at(c, i)), stat = __ldcg(part_at(c, i) + 1);
            join(all[i], Part{sum, stat.x, stat.y});
          }
        }
  }
  if (ends)
#pragma unroll
    for (int i = 0; i < PER; i++)
      if (threadIdx.x + i * THREADS < UNITS) give(i, all[i]);
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // nor does another this one's
#endif
}
