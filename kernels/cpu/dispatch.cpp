// The C ABI: chooses the instruction set and the number of threads. dtype: 0 float32, 1 bfloat16.
#include "api.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
extern const Kernels kvferry_baseline;
#ifdef __x86_64__
extern const Kernels kvferry_avx2, kvferry_avx512, kvferry_avx512bf16;
#endif
}

namespace {

// The best first.
const Kernels* levels[4];
int num_levels = 0, first_level = 0;

__attribute__((constructor)) void find_levels() {
#ifdef __x86_64__
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    levels[num_levels++] = &kvferry_avx512bf16;
  if (avx512) levels[num_levels++] = &kvferry_avx512;
  if (avx2) levels[num_levels++] = &kvferry_avx2;
#endif
  levels[num_levels++] = &kvferry_baseline;
}

// The best that cuts `width` into pairs of vectors, or null.
const Kernels* choose(int64_t width) {
  for (int i = first_level; i < num_levels; i++)
    if (width % (2 * levels[i]->lanes) == 0) return levels[i];
  return nullptr;
}

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
Parallel parallel = nullptr;

void run(void (*kernel)(void*), void* job, int threads) {
  if (threads > 1 && parallel) {
    parallel(kernel, job, (unsigned)threads, 0);
  } else {
    kernel(job);
  }
}

}  // namespace

EXPORT const char* kvferry_build() { return KVFERRY_BUILD; }

EXPORT int kvferry_levels() { return num_levels; }

// For tests: leave out the best `level` instruction sets.
EXPORT void kvferry_skip_levels(int level) { first_level = level < num_levels ? level : num_levels - 1; }

// `GOMP_parallel` of the OpenMP that torch uses, so that both share one pool of threads. Without: one thread.
EXPORT void kvferry_use_threads_of(void* gomp_parallel) { parallel = (Parallel)gomp_parallel; }

// Floats that one thread needs for a tile of `rows` queries x G.
EXPORT int64_t kvferry_scratch_floats(int64_t rows, int64_t head_dim) {
  int64_t floats = rows * (3 * head_dim + 2 * kChunk + 2) + 2 * kChunk * head_dim;
  return (floats + 31) / 32 * 32;  // so that each thread's begins on a cache line
}

// These return 0, or 1 for a width that is no multiple of 8.
EXPORT int kvferry_add_norm(int dtype, void* x, const void* delta, const void* weight, void* out, float eps, int64_t rows,
                            int64_t width, int threads) {
  const Kernels* kernels = choose(width);
  if (!kernels) return 1;
  AddNorm job = {x, delta, weight, out, eps, rows, width, rows / (threads * 4) + 1, 0};
  run(kernels->add_norm[dtype], &job, threads);
  return 0;
}

EXPORT int kvferry_silu_mul(int dtype, const void* gate_up, void* out, int64_t rows, int64_t width, int threads) {
  const Kernels* kernels = choose(width);
  if (!kernels) return 1;
  SiluMul job = {gate_up, out, rows, width, rows / (threads * 4) + 1, 0};
  run(kernels->silu_mul[dtype], &job, threads);
  return 0;
}

// Of a weight [out_width, in]; in: a multiple of what 32 bits hold.
EXPORT int64_t kvferry_packed_linear_bytes(int dtype, int64_t out_width, int64_t in) {
  return (out_width + kPanel - 1) / kPanel * kPanel * in * (dtype ? 2 : 4);
}

EXPORT void kvferry_pack_linear(int dtype, const void* weight, void* packed, int64_t out_width, int64_t in, int threads) {
  PackLinear job = {(const uint32_t*)weight, (uint32_t*)packed, dtype ? in / 2 : in, out_width, 0};
  run(levels[first_level]->pack_linear, &job, threads);
}

// Strides from row to row, in elements; x's a multiple of what 32 bits hold.
EXPORT void kvferry_linear(int dtype, const void* x, const void* packed, const void* bias, void* out, int64_t rows,
                           int64_t in, int64_t out_width, int64_t x_stride, int64_t out_stride, int threads) {
  LinearRows job = {x, packed, bias, out, rows, in, out_width, x_stride, out_stride, 0};
  run(levels[first_level]->linear[dtype], &job, threads);
}

// Units of 32 bits that a row takes, all its parts together.
EXPORT int64_t kvferry_quantized_row_units(int form, int64_t in) {
  return row_units(form, in) * (form == kFineBytes ? 2 : 1);
}

// steps: memory for the quantised rows. The weight's units were packed as if they were float32.
EXPORT void kvferry_linear_quantized(int form, int dtype, const void* x, const void* packed, const void* bias, void* out,
                                     uint32_t* steps, int64_t rows, int64_t in, int64_t out_width, int64_t x_stride,
                                     int64_t out_stride, int threads) {
  const Kernels* kernels = levels[first_level];
  QuantizeRows quantize = {x, steps, rows, in, x_stride, rows / (threads * 4) + 1, 0};
  run(kernels->quantize[form][dtype], &quantize, rows * in >= 16384 ? threads : 1);
  LinearRows job = {steps, packed, bias, out, rows, in, out_width, row_units(form, in), out_stride, 0};
  run(kernels->linear_quantized[form][dtype], &job, threads);
}

EXPORT int kvferry_attend(int dtype, const Contexts* contexts, void* qkv, const void* angles, const void* q_norm,
                          const void* k_norm, float eps, float scale, float softcap, void* cache, void* out,
                          int threads) {
  const Kernels* kernels = choose(contexts->head_dim);
  if (!kernels) return 1;
  Attend job = {contexts, qkv, angles, q_norm, k_norm, cache, out, eps, scale, softcap, 0, 0};
  run(kernels->rotate_and_write[dtype], &job, contexts->num_tokens >= 8 ? threads : 1);
  job.next = job.joined = 0;
  run(kernels->attend[dtype], &job, threads);
  return 0;
}
