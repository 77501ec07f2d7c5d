// Kernels for scripts/tools/simulator_cases/nvcc_cases.py: what nvcc emits and the kernel compilers of
// Python do not. Compiled by `nvcc -ptx -lineinfo`.

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda/atomic>
#include <cuda/pipeline>

namespace cg = cooperative_groups;

struct Pair {
  double first;
  int second[3];
};

// Device functions that are not inlined: structures by value, results, a loop, an early return.
__device__ __noinline__ Pair turned(Pair given, int by) {
  Pair out{given.first * by, {given.second[2], given.second[0], given.second[1]}};
  if (by == 3) return given;
  for (int i = 0; i < by; ++i) out.second[i % 3] += i;
  return out;
}

__device__ __noinline__ float polynomial(const float *coefficients, int degree, float x) {
  float sum = 0;
  for (int i = degree; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

extern "C" __global__ void device_calls(const float *in, double *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float local[4] = {1, in[i], -2, 0.5f};
  Pair pair = turned(Pair{in[i], {i, 2 * i, 3 * i}}, i % 7);
  out[i] = pair.first + pair.second[i % 3] + polynomial(local, 3, in[i]);
}

// The slow path of sin and cos, divisions, and doubles.
extern "C" __global__ void slow_paths(const float *in, float *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  double wide = in[i];
  out[3 * i] = sinf(in[i] * 1e6f) + cosf(in[i]);
  out[3 * i + 1] = in[i] / (1 + in[i] * in[i]);
  out[3 * i + 2] = (float)(wide / (2.0 + sin(wide)) + fmod(wide, 0.75) + pow(fabs(wide), 1.25));
}

// A switch of many cases, local arrays with indices of run time.
extern "C" __global__ void dense_switch(const int *in, int *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int stack[8], top = 0;
  for (int step = 0; step < 6; ++step) {
    int code = (in[i] >> (4 * step)) & 15;
    switch (code) {
      case 0: stack[top++ & 7] = 1; break;
      case 1: stack[top++ & 7] = in[i] & 255; break;
      case 2: stack[top++ & 7] = i; break;
      case 3: stack[top & 7] = top * 3; top++; break;
      case 4: if (top) stack[(top - 1) & 7] *= 5; break;
      case 5: if (top) stack[(top - 1) & 7] -= 7; break;
      case 6: if (top > 1) { stack[(top - 2) & 7] ^= stack[(top - 1) & 7]; top--; } break;
      case 7: if (top > 1) { stack[(top - 2) & 7] += stack[(top - 1) & 7]; top--; } break;
      case 8: stack[top++ & 7] = __popc(in[i]); break;
      case 9: stack[top++ & 7] = __clz(in[i] | 1); break;
      default: stack[top++ & 7] = code; break;
    }
  }
  int sum = top;
  for (int k = 0; k < top && k < 8; ++k) sum = sum * 31 + stack[k];
  out[i] = sum;
}

// A sum in one launch: the block that arrives last adds the others' sums.
__device__ unsigned int arrived;
extern "C" __global__ void last_block(const float *in, float *partial, float *out, int n) {
  __shared__ float shared[8];
  __shared__ bool is_last;
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += in[i];
  sum = cg::reduce(warp, sum, cg::plus<float>());
  if (warp.thread_rank() == 0) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < blockDim.x / 32; ++w) sum += shared[w];
    partial[blockIdx.x] = sum;
    cuda::atomic_ref<unsigned int, cuda::thread_scope_device> counter(arrived);
    is_last = counter.fetch_add(1, cuda::memory_order_acq_rel) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last && threadIdx.x == 0) {
    float total = 0;
    for (int b = 0; b < gridDim.x; ++b) total += __ldcg(partial + b);
    *out = total;
    arrived = 0;
  }
}

// All blocks wait for each other.
extern "C" __global__ void grid_barrier(float *values, float *out, int n) {
  auto grid = cg::this_grid();
  int i = grid.thread_rank();
  for (int round = 0; round < 3; ++round) {
    float next = i < n ? 0.5f * (values[i] + values[(i + blockDim.x) % n]) : 0;
    grid.sync();
    if (i < n) values[i] = next;
    grid.sync();
  }
  if (i < n) out[i] = values[i];
}

// Copies that go on while the block computes.
extern "C" __global__ void staged_copies(const float4 *in, float4 *out, int tiles) {
  __shared__ alignas(16) float4 stage[2][128];
  auto pipe = cuda::make_pipeline();
  auto load = [&](int tile) {
    pipe.producer_acquire();
    cuda::memcpy_async(&stage[tile & 1][threadIdx.x], &in[tile * 128 + threadIdx.x],
                       cuda::aligned_size_t<16>(sizeof(float4)), pipe);
    pipe.producer_commit();
  };
  load(0);
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) load(tile + 1);
    if (tile + 1 < tiles) cuda::pipeline_consumer_wait_prior<1>(pipe);
    else cuda::pipeline_consumer_wait_prior<0>(pipe);
    __syncthreads();
    float4 x = stage[tile & 1][127 - threadIdx.x];
    out[tile * 128 + threadIdx.x] = make_float4(x.w, x.z, x.y, x.x);
    __syncthreads();
    pipe.consumer_release();
  }
}

// Tensor cores by nvcc's own intrinsics.
#include <mma.h>
extern "C" __global__ void tensor_cores(const __half *a, const __half *b, float *c) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, __half, row_major> x;
  fragment<matrix_b, 16, 16, 16, __half, col_major> y;
  fragment<accumulator, 16, 16, 16, float> sum;
  fill_fragment(sum, 0);
  for (int k = 0; k < 64; k += 16) {
    load_matrix_sync(x, a + k, 64);
    load_matrix_sync(y, b + k, 64);
    mma_sync(sum, x, y, sum);
  }
  store_matrix_sync(c, sum, 16, mem_row_major);
}
