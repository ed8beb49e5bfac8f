// Qwen3.5's linear attention for few tokens in one launch: all between the input projections and out_proj, by the
// formulas of gated_delta.py.
//
// A cluster takes a key head of a sequence with all its value heads and their columns of the state. So all who read a
// key head's past of the convolution are in it, and every model's grid is equally large. A CTA has COLUMNS columns of
// HEADS value heads (all; without clusters one after the other) in registers and walks the tokens: 4 lanes of a warp
// have 16 columns of rows t, t + 8, ... of its DK / PARTS rows. Products with the state are made before it moves, with
// o = e S^T q + (k.q) delta, and the lengths of q and k beside them: a token costs one reduction and one barrier. Sums
// of o^2 are pushed to all CTAs of the cluster; once they are there everybody has read the past: it may be replaced.
//
// Tokens come in chunks of up to `most`, which part nothing but work: a sequence alone gives the same bits. A cluster
// that is launched early has its state brought to L2 already. That changes no value, whoever writes there meanwhile,
// nor does a slot that is not the right one yet: it is read again.
//
// Defines: DK, DV, TAPS, REPEAT (value heads of a key head), HEADS, R (rows of a lane), CLUSTER, HALF, PDL.

#define W4 1
#include "mma.cuh"

constexpr int COLUMNS = HEADS * DV / CLUSTER, HERE = COLUMNS / 16, EVERY = HERE * CLUSTER;  // groups of 16 columns
constexpr int PARTS = DK / (8 * R), THREADS = HERE * PARTS * 32;
constexpr int CHANNELS = 2 * DK + COLUMNS, WIDTH = CHANNELS + COLUMNS, OLD = TAPS - 1;
constexpr int GATES = THREADS / 4;  // of a chunk at most; the last threads, who have fewer channels, take one each
constexpr int EARLY = 64;  // clusters that can be among the first to run
static_assert(COLUMNS % 16 == 0 && DV % 16 == 0 && DK % (8 * R) == 0 && TAPS % 4 == 0, "whole groups, parts, copies");

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }
__device__ __forceinline__ void copy4(u32 to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(4) : "memory");
}
__device__ __forceinline__ float over_rows(float v) {  // the sum over a warp's lanes of the same columns
#pragma unroll
  for (int i = 4; i < 32; i <<= 1) v += __shfl_xor_sync(ALL, v, i);
  return v;
}

struct Seat {  // what of the work is a thread's; own: the token of a chunk that it ends, in its 4 columns
  int lane, part, group, across, column, row, own;
};
__device__ __forceinline__ Seat seat_of(int thread) {
  const int lane = thread & 31, warp = thread >> 5, part = warp % PARTS, group = warp / PARTS, across = lane >> 2;
  return {lane, part, group, across, group * 16 + (lane & 3) * 4, part * 8 * R + across, part * 8 + across};
}

extern "C" __global__ void SHARE
__launch_bounds__(THREADS, (R > 4 || HERE == 1 || __CUDA_ARCH__ != 900 ? 512 : 1024) / THREADS)
mix(const u16 *qkv, const u16 *z, const u16 *a, const u16 *b, const float *__restrict__ conv,
    const float *__restrict__ minus_a, const float *__restrict__ dt_bias, const float *__restrict__ norm,
    const int *starts, const int *slots, u16 *conv_state, float *ssm, u16 *o, int tokens, int most, int known,
    int qkv_pitch, int z_pitch, int a_pitch, int b_pitch, float eps) {
  const int rank = CLUSTER > 1 ? blockIdx.y : 0, sequence = blockIdx.z, sequences = gridDim.z;
  const int key_head = blockIdx.x, key_heads = gridDim.x, heads = key_heads * REPEAT;
  const int values = 2 * key_heads * DK, channels = values + heads * DV;

  float *const partial = (float *)shared_memory + 4;                  // [2][PARTS][2][COLUMNS], behind two barriers
  float4 *const lengths = (float4 *)(partial + 4 * PARTS * COLUMNS);  // [2][PARTS]
  float *const weights = (float *)(lengths + 2 * PARTS);              // [CHANNELS][TAPS]
  float *const scale = weights + CHANNELS * TAPS;                     // [DV]
  float *const rates = scale + DV;                         // [GATES][2]: minus_a, dt_bias
  u32 *const past = (u32 *)(rates + 2 * GATES);            // u16 [CHANNELS][OLD], what conv_state becomes
  float *const u = (float *)(past + CHANNELS * OLD / 2);   // [most][WIDTH]: q, k, v, o
  float2 *const gates = (float2 *)(u + most * WIDTH);      // [most][HERE]: decay, step size
  float *const sums = (float *)(gates + most * HERE);      // [2][most][EVERY]

  int value0;  // of the CTA's columns of this pass, the first one's place among all value heads'
  auto channel = [&](int i) {
    return i >= 2 * DK ? values + value0 + i - 2 * DK : (i < DK ? key_head : key_heads - 1 + key_head) * DK + i;
  };
  auto begin_pass = [&](int pass) {
    value0 = (key_head * REPEAT + pass * HEADS) * DV + rank * COLUMNS;
    for (int i = threadIdx.x; i < CHANNELS / 2; i += THREADS)
#pragma unroll
      for (int j = 0; j < TAPS / 2; j++)
        copy16(shared_at(weights + i * 2 * TAPS + j * 4), conv + channel(2 * i) * TAPS + j * 4, true);
    for (int i = threadIdx.x; i < DV / 4; i += THREADS) copy16(shared_at(scale + i * 4), norm + i * 4, true);
    const int gating = THREADS - 1 - threadIdx.x, head = (value0 + gating % HERE * 16) / DV;
    if (gating < most * HERE) {
      copy4(shared_at(rates + 2 * gating), minus_a + head), copy4(shared_at(rates + 2 * gating + 1), dt_bias + head);
    }
    commit();
  };
  let_next_kernel_start();
#if CLUSTER > 1
  const u32 told = shared_at(shared_memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(told + i * 8) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  begin_pass(0);
#if CLUSTER > 1
  if (const int of = THREADS - 1 - threadIdx.x; of < 4 && key_head + key_heads * sequence < EARLY) {
    const long long slot = load_l2(slots + sequence);
    const int piece = REPEAT * DK * DV / CLUSTER;  // of the state; or the past of q, k, v
    const int at = of == 3 ? values + key_head * REPEAT * DV : (of == 2 ? key_heads + key_head : key_head) * DK;
    const void *from = of ? (const void *)(conv_state + (slot * channels + at) * OLD)
                          : ssm + (slot * heads + key_head * REPEAT) * DK * DV + rank * piece;
    const int bytes = of == 0 ? piece * 4 : (of == 3 ? REPEAT * DV : DK) * OLD * 2;
    if (slot >= 0 && slot < known && (of == 0 || rank == 0))
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
  }
  __syncwarp();
#endif
  after_previous_kernel();

  const int first = load_l2(starts + sequence), end = load_l2(starts + sequence + 1);
  const int slot = load_l2(slots + sequence);
  auto clear = [&](int from, int to) {  // o of this key head
    const int quads = REPEAT * DV / 4;
    for (int i = rank * THREADS + threadIdx.x; i < (to - from) * quads; i += CLUSTER * THREADS)
      *(uint2 *)(o + (from + i / quads) * heads * DV + key_head * REPEAT * DV + i % quads * 4) = make_uint2(0, 0);
  };
  auto meet_first = [&] {  // all CTAs of the cluster have begun
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
  };
  if (sequence == sequences - 1) clear(end, tokens);
  if (slot < 0 || first >= end) return clear(first, end), meet_first();

  u16 *const old = conv_state + (long long)slot * channels * OLD;
  int turn = 0;  // chunks so far
  for (int pass = 0; pass < REPEAT / HEADS; pass++) {
    if (pass) __syncthreads(), begin_pass(pass);
    auto state_at = [&](const Seat &at) {
      int here = slot, v = value0 + at.column;
      asm volatile("" : "+r"(here));  // made anew for storing
      return ssm + ((long long)(here * heads + v / DV) * DK + at.row) * DV + v % DV;
    };
    float4 state[R];
#pragma unroll
    for (int j = 0; j < R; j++) state[j] = __ldcg((const float4 *)(state_at(seat_of(threadIdx.x)) + j * 8 * DV));
    for (int start = first; start < end; start += most, turn++) {
      const int count = min(most, end - start), buffer = turn & 1;
      const bool last = start + count == end;
      int thread = threadIdx.x;
      asm volatile("" : "+r"(thread));  // so that nothing is made of it before this loop, and kept
      const auto [lane, part, group, across, column, row, own] = seat_of(thread);
      if (start > first) __syncthreads();  // everybody has left the chunk before
#if CLUSTER > 1
      if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(told + buffer * 8),
                     "r"(count * EVERY * 4) : "memory");
#endif
      const int gating = THREADS - 1 - thread;
      if (gating < count * HERE) {
        const int token = start + gating / HERE, head = (value0 + gating % HERE * 16) / DV;
        const u16 a_here = __ldcg(a + token * a_pitch + head), b_here = __ldcg(b + token * b_pitch + head);
        await<0>();  // a thread's own copies of constants
        const float x = widen16(a_here) + rates[2 * gating + 1];
        const float decay = rates[2 * gating] * (x > 20.0f ? x : log1pf(expf(x)));
        gates[gating] = make_float2(expf(decay), __fdividef(1.0f, 1.0f + expf(-widen16(b_here))));
      }
      for (int i = thread; i < CHANNELS / 2; i += THREADS) {  // two channels
        const int c = channel(2 * i);
        const float *const w = weights + 2 * i * TAPS;
        u32 x[TAPS];
#pragma unroll 2
        for (int t = 0; t < count; t++) {
          float low = 0.0f, high = 0.0f;
#pragma unroll
          for (int j = 0; j < TAPS; j++) {
            const int at = start - first + t + j;  // in the past and the sequence's tokens, one behind the other
            const u16 *const from = old + c * OLD + at;
            x[j] = j < OLD && at < OLD ? __ldcg(from) | u32(__ldcg(from + OLD)) << 16
                                       : __ldcg((const u32 *)(qkv + (first + at - OLD) * qkv_pitch + c));
          }
          await<0>();
#pragma unroll
          for (int j = 0; j < TAPS; j++)
            low = fmaf(widen16(x[j]), w[j], low), high = fmaf(widen16(x[j] >> 16), w[TAPS + j], high);
          low = widen16(narrow16(silu(low))), high = widen16(narrow16(silu(high)));
          *(float2 *)(u + t * WIDTH + 2 * i) = make_float2(low, high);
        }
#pragma unroll
        for (int j = 0; j < OLD; j++) {
          ((u16 *)past)[2 * i * OLD + j] = x[j + 1];
          ((u16 *)past)[(2 * i + 1) * OLD + j] = x[j + 1] >> 16;
        }
      }
      __syncthreads();
      if (turn == 0) meet_first();

      for (int t = 0; t < count; t++) {
        float *const ut = u + t * WIDTH;
        const int side = t & 1;
        float dots[8] = {}, qq = 0.0f, kk = 0.0f, qk = 0.0f;  // dots: 4 columns of S^T k, of S^T q
#pragma unroll
        for (int j = 0; j < R; j++) {
          const float q = ut[row + j * 8], k = ut[DK + row + j * 8];
          qq = fmaf(q, q, qq), kk = fmaf(k, k, kk), qk = fmaf(q, k, qk);
          const float s[4] = {state[j].x, state[j].y, state[j].z, state[j].w};
#pragma unroll
          for (int i = 0; i < 4; i++) dots[i] = fmaf(s[i], k, dots[i]), dots[4 + i] = fmaf(s[i], q, dots[4 + i]);
        }
        qq = over_rows(qq), kk = over_rows(kk), qk = over_rows(qk);
        // The same for 8 sums: each step halves them and the lanes that share them; sum `across` stays here
#pragma unroll
        for (int h = 4; h; h >>= 1) {
          const bool upper = across & h;
#pragma unroll
          for (int i = 0; i < h; i++) {
            const float keep = upper ? dots[h + i] : dots[i], give = upper ? dots[i] : dots[h + i];
            dots[i] = keep + __shfl_xor_sync(ALL, give, h * 4);
          }
        }
        float *const parts = partial + side * PARTS * 2 * COLUMNS;
        parts[(part * 2 + (across >> 2)) * COLUMNS + column + (across & 3)] = dots[0];
        if (group == 0 && lane == 0) lengths[side * PARTS + part] = make_float4(qq, kk, qk, 0.0f);
        __syncthreads();
        float4 with_k = {}, with_q = {}, length = {};
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
          add(with_k, *(const float4 *)(parts + p * 2 * COLUMNS + column));
          add(with_q, *(const float4 *)(parts + (p * 2 + 1) * COLUMNS + column));
          add(length, lengths[side * PARTS + p]);
        }
        const float to_q = rsqrtf(length.x + 1e-6f) * rsqrtf(float(DK)), to_k = rsqrtf(length.y + 1e-6f);
        const float2 by = gates[t * HERE + group];
        const float4 v = *(const float4 *)(ut + 2 * DK + column);
        const float keep_k = by.x * to_k, keep_q = by.x * to_q, both = length.z * to_k * to_q;
        const float4 delta = make_float4((v.x - keep_k * with_k.x) * by.y, (v.y - keep_k * with_k.y) * by.y,
                                         (v.z - keep_k * with_k.z) * by.y, (v.w - keep_k * with_k.w) * by.y);
        const float4 now = make_float4(fmaf(both, delta.x, keep_q * with_q.x), fmaf(both, delta.y, keep_q * with_q.y),
                                       fmaf(both, delta.z, keep_q * with_q.z), fmaf(both, delta.w, keep_q * with_q.w));
        float square = now.x * now.x + now.y * now.y + now.z * now.z + now.w * now.w;
        square += __shfl_xor_sync(ALL, square, 1), square += __shfl_xor_sync(ALL, square, 2);
        if (part == 0 && lane < CLUSTER) {
          float *const to = sums + (buffer * most + t) * EVERY + rank * HERE + group;
#if CLUSTER > 1
          u32 far, far_told;
          asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(shared_at(to)), "r"(lane));
          asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far_told) : "r"(told + buffer * 8), "r"(lane));
          asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(far),
                       "f"(square), "r"(far_told) : "memory");
#else
          *to = square;
#endif
        }
        if (t == own) *(float4 *)(ut + CHANNELS + column) = now;
#pragma unroll
        for (int j = 0; j < R; j++) {
          const float by_k = ut[DK + row + j * 8] * to_k;
          state[j].x = fmaf(by_k, delta.x, by.x * state[j].x), state[j].y = fmaf(by_k, delta.y, by.x * state[j].y);
          state[j].z = fmaf(by_k, delta.z, by.x * state[j].z), state[j].w = fmaf(by_k, delta.w, by.x * state[j].w);
        }
      }
      if (last)
#pragma unroll
        for (int j = 0; j < R; j++) *(float4 *)(state_at(seat_of(thread)) + j * 8 * DV) = state[j];
      uint2 gate;
      if (own < count) gate = __ldcg((const uint2 *)(z + (start + own) * z_pitch + value0 + column));
#if CLUSTER > 1
      u32 done = 0;
      while (!done)
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(told + buffer * 8), "r"(turn >> 1 & 1) : "memory");
#else
      __syncthreads();
#endif
      if (own < count) {
        const float *const of_head = sums + (buffer * most + own) * EVERY + (rank * COLUMNS + column) / DV * (DV / 16);
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < DV / 16; i++) total += of_head[i];
        const float by = rsqrtf(total / DV + eps);
        const float4 w = *(const float4 *)(scale + (rank * COLUMNS + column) % DV);
        const float4 v = *(const float4 *)(u + own * WIDTH + CHANNELS + column);
        const u32 low = narrow16(v.x * by * w.x * silu(widen16(gate.x))) |
                        u32(narrow16(v.y * by * w.y * silu(widen16(gate.x >> 16)))) << 16;
        const u32 high = narrow16(v.z * by * w.z * silu(widen16(gate.y))) |
                         u32(narrow16(v.w * by * w.w * silu(widen16(gate.y >> 16)))) << 16;
        *(uint2 *)(o + (start + own) * heads * DV + value0 + column) = make_uint2(low, high);
      }
      if (last)  // all CTAs have sent their last token's sums, so have read all of the past
        for (int i = thread; i < CHANNELS * OLD / 2; i += THREADS) {
          const int c = 2 * i / OLD;
          if (c >= 2 * DK || (rank == 0 && pass == REPEAT / HEADS - 1))
            *(u32 *)(old + channel(c) * OLD + 2 * i % OLD) = past[i];
        }
    }
  }
}
