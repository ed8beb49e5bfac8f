// The practical floor of a decode kernel: read the same bytes once, with nothing else to do.
//
// Up to three buffers (packed weights, block scales, the rest), counted in 16 bytes. Each thread has LOADS independent
// 16-byte loads in flight; blocks go on to the next piece of a buffer until none is left. The sum is stored only when it
// has one value in 2^32, so that the loads cannot be removed and the store costs nothing.

__device__ __forceinline__ uint4 load(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ unsigned add_up(const uint4* p, int count) {
    unsigned sum = 0;
    for (int at = blockIdx.x * LOADS * THREADS + threadIdx.x; at < count; at += gridDim.x * LOADS * THREADS) {
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            v[i] = at + i * THREADS < count ? load(p + at + i * THREADS) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
read_all(const uint4* a, const uint4* b, const uint4* c, int count_a, int count_b, int count_c, unsigned* out) {
    const unsigned sum = add_up(a, count_a) + add_up(b, count_b) + add_up(c, count_c);
    if (sum == 0x9e3779b9u) *out = sum;
}
