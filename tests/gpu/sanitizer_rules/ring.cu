// What racecheck takes for a race: a ring of two stages, which its reader gives back in two ways.
//   nvcc -arch=sm_90a -o ring ring.cu && compute-sanitizer --tool racecheck --racecheck-report analysis ./ring 0
// 2025.3.1 on an H200: errors for 0, 2 and 4 (one lane behind __syncwarp), none for 1, 3 and 5 (every lane).
// All six are right by the PTX memory model.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

__device__ uint32_t shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ void wait(uint32_t barrier, uint32_t phase) {
  asm volatile("{ .reg .pred p;\n"
               "W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               "@!p bra W; }" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// LOAD: 0 st.shared, 1 cp.async, 2 cp.async.bulk
template <int LOAD, int EVERY_LANE> __global__ void ring(const uint4 *in, uint4 *out, int n) {
  __shared__ __align__(128) uint4 data[2][32];
  __shared__ uint64_t full[2], empty[2];
  int lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(&full[i])), "r"(LOAD == 2 ? 1 : 32));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(&empty[i])), "r"(EVERY_LANE ? 32 : 1));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int stage = 0;
  uint32_t phase = 0;
  uint4 sum = make_uint4(0, 0, 0, 0);
  for (int i = 0; i < n; i++) {
    uint32_t f = shared(&full[stage]), e = shared(&empty[stage]), to = shared(&data[stage][lane]);
    if (threadIdx.x < 32) {
      wait(e, phase ^ 1);
      if (LOAD == 0) {
        data[stage][lane] = in[i * 32 + lane];
        arrive(f);
      } else if (LOAD == 1) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + i * 32 + lane) : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(f) : "memory");
      } else if (lane == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" ::"r"(f) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];"
                     ::"r"(to), "l"(in + i * 32), "r"(f) : "memory");
      }
    } else {
      wait(f, phase);
      uint4 x = data[stage][(lane + 1) & 31];
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      if (EVERY_LANE) {
        arrive(e);
      } else {
        __syncwarp();
        if (lane == 0) arrive(e);
      }
    }
    if (++stage == 2) stage = 0, phase ^= 1;
  }
  if (threadIdx.x >= 32) out[lane] = sum;
}

template <int LOAD, int EVERY_LANE> void run(const uint4 *in, uint4 *out) {
  ring<LOAD, EVERY_LANE><<<1, 64>>>(in, out, 16);
  printf("%d %d: %s\n", LOAD, EVERY_LANE, cudaGetErrorString(cudaDeviceSynchronize()));
}

int main(int, char **argv) {
  uint4 *in, *out;
  cudaMalloc(&in, 16 * 512);
  cudaMalloc(&out, 512);
  cudaMemset(in, 1, 16 * 512);
  void (*const modes[])(const uint4 *, uint4 *) = {run<0, 0>, run<0, 1>, run<1, 0>, run<1, 1>, run<2, 0>, run<2, 1>};
  modes[atoi(argv[1])](in, out);
}
