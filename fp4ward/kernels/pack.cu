// The checkpoint's bytes into records; one thread for a lane's share of 64 columns. rows, columns: those that exist.

#include "mma.cuh"

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
