// The C ABI: chooses the instruction set and the number of threads. dtype: 0 float32, 1 bfloat16.
#include "dispatch.h"

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

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
typedef int (*Count)();
Parallel parallel = nullptr;
Count count = nullptr;

}  // namespace

const Kernels* choose(int64_t width) {
  for (int i = first_level; i < num_levels; i++)
    if (width % (2 * levels[i]->lanes) == 0) return levels[i];
  return nullptr;
}

void run(void (*kernel)(void*), void* job, int threads) {
  if (threads > 1 && parallel) {
    parallel(kernel, job, (unsigned)threads, 0);
  } else {
    kernel(job);
  }
}

int num_threads() { return parallel ? count() : 1; }

EXPORT const char* kvferry_build() { return KVFERRY_BUILD; }

EXPORT int kvferry_levels() { return num_levels; }

// For tests: leave out the best `level` instruction sets.
EXPORT void kvferry_skip_levels(int level) { first_level = level < num_levels ? level : num_levels - 1; }

// `GOMP_parallel` and `omp_get_num_threads` of the OpenMP that torch uses, so that both share one pool of threads.
// Without: one thread.
EXPORT void kvferry_use_threads_of(void* gomp_parallel, void* omp_get_num_threads) {
  parallel = (Parallel)gomp_parallel;
  count = (Count)omp_get_num_threads;
}

// Floats that one thread needs for a tile of `rows` queries x G.
EXPORT int64_t kvferry_scratch_floats(int64_t rows, int64_t head_dim) {
  int64_t floats = rows * (3 * head_dim + 2 * kChunk + 2) + 2 * kChunk * head_dim;
  return (floats + 31) / 32 * 32;  // so that each thread's begins on a cache line
}

// Positions of all tokens, and where their keys go. The rest of `all` up to here is known, but for tiles and scratch.
EXPORT void kvferry_place_tokens(const Contexts* all, int64_t rows, int64_t* positions, int64_t* slots) {
  int64_t block_slots = all->block_bytes / all->slot_bytes;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t* table = all->tables + all->table_at[row];
    for (int64_t i = 0; i < all->num_queries[row]; i++) {
      int64_t position = all->start[row] + i;
      *positions++ = position;
      *slots++ = table[position / all->block_size] * block_slots + position % all->block_size;
    }
  }
}

// The same with each row one token further: `start`, which is the caller's, is counted up.
EXPORT void kvferry_move_tokens(const Contexts* all, int64_t rows, int64_t* positions, int64_t* slots) {
  for (int64_t row = 0; row < rows; row++) ((int64_t*)all->start)[row]++;
  kvferry_place_tokens(all, rows, positions, slots);
}

// These return 0, or 1 for a width that is no multiple of 8.
EXPORT int kvferry_embed_packed(int dtype, const int64_t* token_ids, const void* packed, void* out, float scale,
                                int64_t vocab, int64_t rows, int64_t width, int threads) {
  const Kernels* kernels = choose(width);
  if (!kernels) return 1;
  Embed job = {token_ids, packed, out, scale, 1, vocab, rows, width, rows / (threads * 4) + 1, 0};
  run(kernels->embed[dtype], &job, threads);
  return 0;
}

EXPORT int kvferry_add_norm(int dtype, void* x, const void* delta, const void* weight, void* out, float eps, int64_t rows,
                            int64_t width, int threads) {
  const Kernels* kernels = choose(width);
  if (!kernels) return 1;
  AddNorm job = {x, delta, nullptr, weight, out, eps, rows, width, rows / (threads * 4) + 1, 0};
  run(kernels->add_norm[dtype], &job, threads);
  return 0;
}

EXPORT int kvferry_gated(int dtype, const void* gate_up, void* out, int64_t activation, int64_t rows, int64_t width,
                         int threads) {
  const Kernels* kernels = choose(width);
  if (!kernels) return 1;
  Gated job = {gate_up, out, activation, rows, width, rows / (threads * 4) + 1, 0};
  run(kernels->gated[dtype], &job, threads);
  return 0;
}

EXPORT void kvferry_argmax(int dtype, const void* x, int64_t rows, int64_t width, float* values, int64_t* ids, int threads) {
  Argmax job = {x, values, ids, rows, width, 0};
  run(choose(0)->argmax[dtype], &job, threads);
}

// A row's width up to whole runs of runs.
static int64_t race_width(int64_t width) { return (width + kRace * kRace - 1) / (kRace * kRace) * kRace * kRace; }

// Bytes of scratch memory for each thread that draws.
EXPORT int64_t kvferry_draw_bytes(int64_t width) {
  int64_t padded = race_width(width), runs = padded / kRace;
  return padded * 8 + (runs + runs / kRace) * 8;
}

EXPORT void kvferry_draw(int dtype, const void* x, int64_t width, const DrawRow* draws, int64_t num_draws, int64_t* ids,
                         uint8_t* scratch, int threads) {
  Draw job = {x, draws, ids, scratch, num_draws, width, race_width(width), kvferry_draw_bytes(width), 0, 0};
  run(levels[first_level]->draw[dtype], &job, threads);
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
  LinearRows job = {x, packed, bias, out, nullptr, rows, in, out_width, x_stride, out_stride, 0};
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
  LinearRows job = {steps, packed, bias, out, nullptr, rows, in, out_width, row_units(form, in), out_stride, 0};
  run(kernels->linear_quantized[form][dtype], &job, threads);
}

EXPORT int kvferry_attend(int dtype, const Contexts* contexts, void* qkv, const void* angles, int64_t num_angles,
                          const void* q_norm, const void* k_norm, float eps, float scale, float softcap, void* cache,
                          void* out) {
  const Kernels* kernels = choose(contexts->head_dim);
  if (!kernels) return 1;
  Attend job = {contexts, qkv, angles, q_norm, k_norm, cache, out, eps, scale, softcap, num_angles, 0, 0};
  int threads = (int)contexts->num_threads;
  run(kernels->rotate_and_write[dtype], &job, contexts->num_tokens >= 8 ? threads : 1);
  job.next = job.joined = 0;
  run(kernels->attend[dtype], &job, threads);
  return 0;
}
