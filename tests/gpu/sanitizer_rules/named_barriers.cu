// What synccheck takes for an error at named barriers: pairs of warps that meet, in six ways.
//   nvcc -arch=sm_90a -o barriers named_barriers.cu && compute-sanitizer --tool synccheck ./barriers 0
// 2025.3.1 on an H200: errors for 0 and 2, none for 1, 3, 4 and 5. All six are right by the PTX ISA.
#include <cstdio>
#include <cstdlib>

template <int MODE> __global__ void meet(int *out, int x) {
  __shared__ int s[256];
  int t = threadIdx.x, w = t / 32, b = w & 3;  // warps b and b + 4 meet at barrier 1 + b
  s[t] = t;
  if (MODE == 0) {  // by two instructions
    if (w < 4) { s[t] += x; asm volatile("barrier.sync.aligned %0, 64;" ::"r"(1 + b) : "memory"); s[t] += 3; }
    else { s[t] *= x; asm volatile("barrier.sync.aligned %0, 64;" ::"r"(1 + b) : "memory"); s[t] ^= 5; }
  } else if (MODE == 1) {  // by one
    asm volatile("barrier.sync.aligned %0, 64;" ::"r"(1 + b) : "memory");
  } else if (MODE == 2) {  // by two, the barrier a constant
    if (w == 0) { s[t] += x; asm volatile("barrier.sync.aligned 1, 64;" ::: "memory"); s[t] += 3; }
    if (w == 4) { s[t] *= x; asm volatile("barrier.sync.aligned 1, 64;" ::: "memory"); s[t] ^= 5; }
  } else if (MODE == 3) {  // by two that are not aligned
    if (w < 4) { s[t] += x; asm volatile("barrier.sync %0, 64;" ::"r"(1 + b) : "memory"); s[t] += 3; }
    else { s[t] *= x; asm volatile("barrier.sync %0, 64;" ::"r"(1 + b) : "memory"); s[t] ^= 5; }
  } else if (MODE == 4) {  // by one for each barrier
    if (b == 0) asm volatile("barrier.sync.aligned 1, 64;" ::: "memory");
    else if (b == 1) asm volatile("barrier.sync.aligned 2, 64;" ::: "memory");
    else if (b == 2) asm volatile("barrier.sync.aligned 3, 64;" ::: "memory");
    else asm volatile("barrier.sync.aligned 4, 64;" ::: "memory");
  } else {  // one arrives, the other waits
    if (w < 4) asm volatile("barrier.arrive.aligned %0, 64;" ::"r"(1 + b) : "memory");
    else asm volatile("barrier.sync.aligned %0, 64;" ::"r"(1 + b) : "memory");
  }
  __syncthreads();
  out[blockIdx.x * 256 + t] = s[(t + 128) & 255];
}

template <int MODE> void run(int *out) {
  meet<MODE><<<12, 256>>>(out, 7);
  printf("%d: %s\n", MODE, cudaGetErrorString(cudaDeviceSynchronize()));
}

int main(int, char **argv) {
  int *out;
  cudaMalloc(&out, 12 * 256 * sizeof(int));
  void (*const modes[])(int *) = {run<0>, run<1>, run<2>, run<3>, run<4>, run<5>};
  modes[atoi(argv[1])](out);
}
