/* Stands in for the kernel compiler's CUDA runtime library: hands launches to a callback.
 *
 * Every symbol carries the prefix dsv4sim so that it cannot meet the real library, which may be
 * loaded in the same process. Device attribute 97 is the shared memory a block may opt into. */
#include <stdint.h>
#include <string.h>

#define INVALID_VALUE 1

typedef int (*launch_callback)(const char *kernel, const uint32_t *grid, const uint32_t *block,
                               uint64_t shared, const void *attributes, uint32_t count,
                               void **arguments);

struct launch_config {
  uint32_t grid[3], block[3];
  uint64_t shared;
  void *stream;
  void *attributes;
  uint32_t count;
};

static launch_callback callback;
static int failure;
static int multiprocessors = 148, capability_major = 10, shared_limit = 232448;

void dsv4sim_configure(launch_callback on_launch, int sms, int major, int shared) {
  callback = on_launch;
  multiprocessors = sms;
  capability_major = major;
  shared_limit = shared;
  failure = 0;
}

int dsv4sim_cudaLaunchKernelEx(struct launch_config *c, void *kernel, void **arguments) {
  if (!callback) return 1;
  return callback(kernel, c->grid, c->block, c->shared, c->attributes, c->count, arguments);
}

int dsv4sim_cudaLaunchKernel(void *kernel, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx,
                             uint32_t by, uint32_t bz, void **arguments, uint64_t shared,
                             void *stream) {
  uint32_t grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  (void)stream;
  if (!callback) return 1;
  return callback(kernel, grid, block, shared, 0, 0, arguments);
}

/* The handle of a kernel is its name: the string lives in the compiled module's stack, so copy. */
int dsv4sim_cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  (void)library;
  *kernel = strdup(name);
  return 0;
}

int dsv4sim_cudaLibraryLoadData(void **library, const void *code, void *a, void *b, int n, void *c,
                                void *d, int m) {
  (void)code; (void)a; (void)b; (void)n; (void)c; (void)d; (void)m;
  *library = (void *)1;
  return 0;
}

int dsv4sim_cudaLibraryUnload(void *library) { (void)library; return 0; }

int dsv4sim_cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  (void)attribute; (void)kernel; (void)device;
  *value = 0;
  return 0;
}

int dsv4sim_cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 16: *value = multiprocessors; break;
    case 75: *value = capability_major; break;
    case 97: *value = shared_limit; break;
    default: *value = 0;
  }
  return 0;
}

int dsv4sim_cudaGetDevice(int *device) { *device = 0; return 0; }
int dsv4sim_cudaSetDevice(int device) { (void)device; return 0; }
int dsv4sim_cudaGetDeviceCount(int *count) { *count = 1; return 0; }

/* Attribute 14 allows clusters of more than 8 CTAs. A kernel has it for good: kept by its name, of
 * which a process has few. */
#define MOST_KERNELS 4096
static const char *non_portable[MOST_KERNELS];
static int non_portable_count;

int dsv4sim_is_non_portable(const char *kernel) {
  for (int i = 0; i < non_portable_count; i++)
    if (!strcmp(non_portable[i], kernel)) return 1;
  return 0;
}

int dsv4sim_cudaFuncSetAttribute(void *kernel, int attribute, int value) {
  if (attribute == 14 && value && !dsv4sim_is_non_portable(kernel) &&
      non_portable_count < MOST_KERNELS)
    non_portable[non_portable_count++] = kernel;
  return 0;
}

int dsv4sim_cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  (void)device;
  return dsv4sim_cudaFuncSetAttribute(kernel, attribute, value);
}

int dsv4sim_cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *k, int b, uint64_t s) {
  (void)k; (void)b; (void)s;
  *n = 1;
  return 0;
}

/* The tensor map of TMA, as the driver encodes it; tensor_map.py reads it back. Rejects what the
 * driver rejects: unaligned addresses, strides and box rows, boxes wider than the swizzle or larger
 * than shared memory, NaN for integers, and on sm_90 what only Blackwell has. */
int dsv4sim_cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, void *address,
                                   const uint64_t *dims, const uint64_t *strides,
                                   const uint32_t *box, const uint32_t *steps, int interleave,
                                   int swizzle, int promotion, int fill) {
  /* Driver type codes to the hardware's, and bits per element in shared memory. The two TF32 types
   * are float32 with a rounding bit; the last three are 4- and 6-bit elements, some padded. */
  static const uint8_t code[16] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7, 8, 11, 12, 13};
  static const uint8_t bits[16] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 8, 8};
  const int newest = capability_major >= 10;
  uint64_t stride[5] = {0}, volume;
  uint32_t i, inner, span, atomicity, unit = interleave == 2 ? 32 : 16;
  if (interleave < 0 || interleave > 2 || (interleave && rank < 3)) return INVALID_VALUE;
  if (type < 0 || type > (newest ? 15 : 12) || rank < 1 || rank > 5) return INVALID_VALUE;
  if (swizzle < 0 || swizzle > (newest ? 6 : 3)) return INVALID_VALUE;
  if ((uint64_t)address & (unit - 1)) return INVALID_VALUE;
  if (fill && (type < 6 || type > 12)) return INVALID_VALUE;
  /* Beyond 3 come the 128-byte swizzles that keep 32, 32 (with 8-byte flips) or 64 bytes together. */
  atomicity = swizzle > 3 ? swizzle - 3 : 0;
  span = swizzle > 3 ? 3 : swizzle;
  inner = box[0] * bits[type] / 8;
  if (inner & 15 || (span && !interleave && inner > 16u << span)) return INVALID_VALUE;
  volume = bits[type] / 8;
  for (i = 0; i < rank; i++) {
    if (!dims[i] || dims[i] > 1ull << 32) return INVALID_VALUE;
    if (!box[i] || box[i] > 256 || !steps[i] || steps[i] > 8) return INVALID_VALUE;
    volume *= box[i] / steps[i];
    if (i + 1 < rank) {
      if (strides[i] & (unit - 1) || strides[i] >= 1ull << 40) return INVALID_VALUE;
      stride[i] = strides[i] >> 4;
    }
  }
  if (volume > (uint64_t)shared_limit) return INVALID_VALUE;
  memset(map, 0, 128);
  map[0] = (uint64_t)address;
  map[1] = (rank - 1) << 4 | (uint64_t)code[type] << 7 | (uint64_t)interleave << 11 |
           (uint64_t)span << 13 | (uint64_t)(fill != 0) << 15 |
           (uint64_t)(type == 11 || type == 12) << 16 | (uint64_t)(promotion & 3) << 17 |
           (uint64_t)atomicity << 19 | stride[0] << 32;
  map[2] = (stride[1] & 0xffffffff) | stride[2] << 32;
  map[3] = (stride[3] & 0xffffffff);
  /* Beyond what the hardware reads: bytes of a box and the alignment it wants. */
  map[8] = volume;
  map[9] = span ? 128u << span : 16;
  for (i = 0; i < 4; i++) map[3] |= (stride[i] >> 32) << (32 + 4 * i);
  for (i = 0; i < rank; i++) {
    map[4 + i / 2] |= (dims[i] - 1) << (32 * (i & 1));
    map[6] |= (uint64_t)(steps[i] - 1) << (32 + 3 * i);
    if (i == 0)
      map[6] |= (uint64_t)(box[0] - 1) << 56;
    else
      map[7] |= (uint64_t)(box[i] - 1) << (8 * (i - 1));
  }
  return 0;
}

/* Host code asserts success of some calls; the first failure is kept for the caller. */
void dsv4sim_cuda_dialect_assert_success(int code) {
  if (code && !failure) failure = code;
}

int dsv4sim_failure(void) { return failure; }

int dsv4sim_cudaDeviceSynchronize(void) { return 0; }
int dsv4sim_cudaStreamSynchronize(void *stream) { (void)stream; return 0; }

int dsv4sim_cudaMemset(void *p, int value, uint64_t n) { memset(p, value, n); return 0; }

int dsv4sim_cudaMemsetAsync(void *p, int value, uint64_t n, void *stream) {
  (void)stream;
  memset(p, value, n);
  return 0;
}

int dsv4sim_cuda_dialect_init_library_once(void **state, int (*init)(void *),
                                          int (*load)(void *, int), void *set_error) {
  int error;
  (void)set_error;
  if (*state) return 0;
  error = init(state);
  return error ? error : load(state, 0);
}

void dsv4sim_cuda_dialect_unload_library_once(void **state) { (void)state; }
void dsv4sim_CuteDSLRT_TVMFFISetRaisedCudaError(const char *text, int code) { (void)text; (void)code; }
void dsv4sim_CuteDSLRT_TVMFFISetRaisedCudaLaunchError(const char *text, int code) { (void)text; (void)code; }

const char *dsv4sim_cuda_dialect_get_error_name(int code) {
  (void)code;
  return "error in the simulated launch";
}
