// RMS norm of rows, alone or with the product that reads it: the gates of a mixture of experts.
//
// A thread holds PER pieces of 8 columns of every row, so that weights lie in registers before the kernel ahead has ended
// and x stays there until it is a norm. A sum over columns goes over a thread's, a warp's lanes, then warps, in an order
// that depends neither on the number of tokens nor on that of gates.
//
// rms_norm: a CTA a token. rms_norm_gates: a CTA has ROWS gates in registers, of those columns that the warp has of x,
// computes the norm of every token for itself, TOKENS at once, and writes down those whose turn it is.
//
// Defines: THREADS of a CTA, a multiple of 128; PER; HALF; PDL; for rms_norm_gates ROWS (at most 8) and TOKENS (2, 4, 8;
// 1 where there is but one).

#define W4 1
#include "mma.cuh"

constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ uint4 load(const void *at) {  // stays where it stands, before or after the kernel ahead
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
constexpr int STEP = THREADS * 8;  // columns from a piece to the next
// row: at the thread's first piece. left: columns from there to the end; zeros beyond.
__device__ __forceinline__ void load_row(uint4 (&v)[PER], const u16 *row, int left) {
#pragma unroll
  for (int j = 0; j < PER; j++) v[j] = j * STEP < left ? load(row + j * STEP) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void load_weight(float (&w)[PER][8], const float *weight, int left) {
#pragma unroll
  for (int j = 0; j < PER; j++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 v = j * STEP < left ? load(weight + j * STEP + half * 4) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < 4; i++) w[j][half * 4 + i] = __uint_as_float(word(v, i));
    }
}
__device__ __forceinline__ float element(const uint4 &v, int i) { return widen16(u16(word(v, i / 2) >> i % 2 * 16)); }
__device__ __forceinline__ float square_of(const uint4 (&v)[PER]) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < PER; j++)
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(element(v[j], i), element(v[j], i), sum);
  return sum;
}
__device__ __forceinline__ void normalise(uint4 (&v)[PER], const float (&w)[PER][8], float by) {
#pragma unroll
  for (int j = 0; j < PER; j++) {
    u32 to[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      to[i] = pair(element(v[j], 2 * i) * by * w[j][2 * i], element(v[j], 2 * i + 1) * by * w[j][2 * i + 1]);
    v[j] = make_uint4(to[0], to[1], to[2], to[3]);
  }
}

// Sums over a warp's lanes, value by value in one order, however many there are: of value i in lanes i * 32 / N and on.
template <int N, int LANES = 16> __device__ __forceinline__ float over_lanes(const float (&v)[N], int lane) {
  if constexpr (N == 1) {
    float sum = v[0];
#pragma unroll
    for (int by = LANES; by; by >>= 1) sum += __shfl_xor_sync(ALL, sum, by);
    return sum;
  } else {  // half of the lanes go on with half of the values
    float kept[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float low = v[i], high = v[i + N / 2], given = __shfl_xor_sync(ALL, lane & LANES ? low : high, LANES);
      kept[i] = (lane & LANES ? high : low) + given;
    }
    return over_lanes<N / 2, LANES / 2>(kept, lane);
  }
}
// A warp's part of N sums, to [N][WARPS].
template <int N> __device__ __forceinline__ void tell(float *to, const float (&v)[N]) {
  const int lane = threadIdx.x & 31;
  const float sum = over_lanes(v, lane);
  if (lane % (32 / N) == 0) to[lane / (32 / N) * WARPS + (threadIdx.x >> 5)] = sum;
}
__device__ __forceinline__ float told(const float *from) {
  const float4 *parts = (const float4 *)from;
  float4 sum = parts[0];
#pragma unroll
  for (int i = 1; i < WARPS / 4; i++) add(sum, parts[i]);
  return sum.x + sum.y + (sum.z + sum.w);
}

#ifndef ROWS
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const u16 *x, const float *weight, u16 *n, int h, int pitch, float inverse, float eps) {  // inverse: 1 / h
  float *const squares = (float *)shared_memory;
  const int column = threadIdx.x * 8, left = h - column;
  let_next_kernel_start();
  float w[PER][8];
  uint4 v[PER];
  load_weight(w, weight + column, left);
  after_previous_kernel();
  load_row(v, x + (long long)blockIdx.x * pitch + column, left);
  const float square[1] = {square_of(v)};
  tell(squares, square);
  __syncthreads();
  normalise(v, w, rsqrtf(fmaf(told(squares), inverse, eps)));
  n += (long long)blockIdx.x * h + column;
#pragma unroll
  for (int j = 0; j < PER; j++)
    if (j * STEP < left) *(uint4 *)(n + j * STEP) = v[j];
}
#else
// A piece as mma takes it whole, and back: two of its words are the token's in the first 8 rows of a product, two in the
// last 8. Times half a piece of gates the former give a sum, times the other half the latter; the rest is dropped.
__device__ __forceinline__ uint4 turned(const uint4 &v) { return make_uint4(v.x, v.z, v.y, v.w); }

extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm_gates(const u16 *x, const float *weight, const u16 *gates, u16 *n, float *logits, int tokens, int h, int pitch,
               int count, float inverse, float eps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, first = blockIdx.x * ROWS;
  const int column = threadIdx.x * 8, left = h - column, own_column = warp * 256 + (lane & 3) * 16;
  let_next_kernel_start();
  if (TOKENS == 1) tokens = 1;
  uint4 *const own = shared_memory + warp * TOKENS * PER * 32;  // [TOKENS][PER][32], what this warp has of n
  float *const squares = (float *)(shared_memory + TOKENS * PER * THREADS), *const dots = squares + 16 * WARPS;
  uint4 gate[PER][8];  // of every 64 columns 16 contiguous ones of row g
  float w[PER][8];
  gates += (first + g) * h + own_column;
  const int own_left = g < ROWS && first + g < count ? h - own_column : 0;
#pragma unroll
  for (int j = 0; j < PER; j++)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int at = j * STEP + i / 2 * 64 + i % 2 * 8;
      gate[j][i] = at < own_left ? load(gates + at) : make_uint4(0, 0, 0, 0);
    }
  load_weight(w, weight + column, left);
  after_previous_kernel();
  x += column, n += column;
  int turn = blockIdx.x;  // the next token that this CTA writes
  for (int t0 = 0; t0 < tokens; t0 += TOKENS) {
    uint4 v[TOKENS][PER];
    float square[TOKENS], c[4][4] = {};
#pragma unroll
    for (int t = 0; t < TOKENS; t++) load_row(v[t], x + (t0 + t) * pitch, t0 + t < tokens ? left : 0);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) square[t] = square_of(v[t]);
    tell(squares + t0 * WARPS, square);
    __syncthreads();
    const float by = rsqrtf(fmaf(told(squares + (t0 + lane % TOKENS) * WARPS), inverse, eps));
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      if (t0 + t >= tokens) break;
      normalise(v[t], w, TOKENS == 1 ? by : __shfl_sync(ALL, by, t));
#pragma unroll
      for (int j = 0; j < PER; j++) own[(t * PER + j) * 32 + (lane ^ t & 1)] = turned(v[t][j]);
    }
    for (; turn < min(tokens, t0 + TOKENS); turn += gridDim.x)
#pragma unroll
      for (int j = 0; j < PER; j++)
        if (j * STEP < left)
          *(uint4 *)(n + turn * h + j * STEP) = turned(own[((turn - t0) * PER + j) * 32 + (lane ^ turn - t0 & 1)]);
    __syncwarp();
    const int t = g % TOKENS;  // rows of the product without a token are dropped
#pragma unroll
    for (int j = 0; j < PER; j++)
#pragma unroll
      for (int q = 0; q < 8; q++) {
        const int at = (t * PER + j) * 32 + (q / 2 * 8 + (lane & 3) * 2 + q % 2 ^ t & 1);
        const u32 a[4] = {own[at].x, own[at].y, own[at].z, own[at].w};
        multiply(c[q % 2], a, gate[j][q].x, gate[j][q].y);
        multiply(c[2 + q % 2], a, gate[j][q].z, gate[j][q].w);
      }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = (lane & 3) * 2 + i;
      if (t0 + g < tokens && g < TOKENS && row < ROWS)
        dots[((t0 + g) * ROWS + row) * WARPS + warp] = c[0][i] + c[1][i] + (c[2][2 + i] + c[3][2 + i]);
    }
  }
  __syncthreads();
  const int token = threadIdx.x / ROWS, row = first + threadIdx.x % ROWS;  // there are at most 128 of both together
  if (token < tokens && row < count) logits[token * count + row] = told(dots + threadIdx.x * WARPS);
}
#endif
