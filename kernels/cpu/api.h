// What the dispatcher and the kernels of each instruction set share. Sizes and strides count elements unless said.
//
// Legend: T tokens, R rows, H query heads, N KV heads, G = H/N, D head dim, B block size.
#pragma once
#include <stdint.h>

enum { kChunk = 128 };  // Positions attended to at once; the softmax of a query is put together from whole chunks.
enum { kTileRows = 96 };  // Queries x G computed at once against a chunk, or one query if G is larger.
enum { kPanel = 32 };  // Outputs side by side in a packed weight.

enum { kShareStep = 32 };  // Rows share a multiple of so many positions of a chunk; a multiple of what products take.

// Rows that are attended for together: one, or some that have one query each.
struct Cut {
  int64_t rows_at, num_rows;  // in `cut_rows`
  int64_t first;              // query; of rows with one query: the chunk
  int64_t shared;             // of several rows: positions of the chunk that all read from the same blocks
};

// The contexts of one step's rows; the same for all layers. Mirrored in attention.py.
struct Contexts {
  int64_t num_tokens, num_tiles, num_heads, num_kv_heads, head_dim, block_size;
  int64_t block_bytes, slot_bytes;  // from one block, and from one key of a head, to the next
  int64_t tile_queries;          // queries of a tile
  int64_t scratch_floats;        // of each thread
  int64_t window;                // positions that a query sees, its own included
  int64_t format;                // of a slot, see formats.h
  int64_t num_threads;           // that are worth to be woken for this
  int64_t scores;                // queries times positions of all KV heads
  const int64_t* first_token;    // [R]
  const int64_t* num_queries;    // [R]
  const int64_t* start;          // [R] position of the first query
  const int64_t* table_at;       // [R] where the row's blocks begin in `tables`
  const int64_t* tables;         // blocks of all rows
  const int64_t* partials_at;    // [R] first of the row's chunks in `partials`
  const int64_t* positions;      // [T]
  const Cut* cuts;               // [tiles]
  const int64_t* cut_rows;       // rows of all cuts
  const int64_t* slots;          // [T] slot of a token's key head 0, counted from the layer's first in block 0
  float* scratch;                // [all threads, scratch_floats]
  float* partials;               // [chunks, N, G, D + 2]
  int32_t* pending;              // [R, N] chunks not yet attended to, zero between calls
};

struct Attend {
  const Contexts* contexts;
  void* qkv;            // [T, H + 2N, D]; queries are rotated in place
  const void* angles;   // [2, num_angles, D/2]: cos and sin by position
  const void* q_norm;   // [D] or null
  const void* k_norm;   // [D] or null
  void* cache;          // this layer of block 0
  void* out;            // [T, H, D]
  float eps;
  float scale, softcap;  // scores = softcap * tanh(scale * q k / softcap); 0: not capped
  int64_t num_angles;
  int64_t next, joined;  // tickets: work to do, threads that came
  const int64_t* wanted;  // tokens, in any order, of which `out` is needed; null: of all
  int64_t num_wanted;
};

struct Embed {
  const int64_t* token_ids;  // [rows]
  const void* table;    // [vocab, width], or packed as a linear's weight
  void* out;            // [rows, width]
  float scale;
  int64_t packed, vocab, rows, width, grain, next;
};

struct AddNorm {
  void* x;              // [·, width]; delta is added in place
  const void* delta;    // [rows, width] or null
  const int64_t* index;  // [rows] which rows of x; null: all
  const void* weight;   // [width]
  void* out;            // [rows, width]
  float eps;
  int64_t rows, width, grain, next;
};

enum Activation { kSilu, kGeluTanh };

struct Gated {
  const void* gate_up;  // [rows, 2 * width]
  void* out;            // [rows, width]
  int64_t activation, rows, width, grain, next;
};

struct Argmax {
  const void* x;        // [rows, width]
  float* values;        // [rows] the largest, NaN if any is
  int64_t* ids;         // [rows] the first that is so large
  int64_t rows, width, next;
};

enum { kRace = 64 };  // tokens, and runs of tokens, that compete at a time

// How a token is drawn from a row of logits. Mirrored in sampling.py.
struct DrawRow {
  int64_t row;
  uint64_t seed;
  uint32_t sequence, position;  // what the noise is a function of, beside the seed
  double min_p, top_p;          // 0, 1: all
  int64_t top_k;                // 0: all
  float temperature;            // more than 0
};

struct Draw {
  const void* x;         // [·, width]
  const DrawRow* draws;  // [num_draws]
  int64_t* ids;          // [num_draws]
  uint8_t* scratch;      // [all threads, scratch_bytes]
  int64_t num_draws, width, padded, scratch_bytes;  // padded: to whole runs of runs
  int64_t next, joined;
};

struct SumParts {
  const void* parts;    // [size, count], stride_bytes from one to the next
  void* out;            // [count]
  int64_t size, stride_bytes, count;
};

// Kinds of quantised weights, each with its form of rows; see quantize.h and linear_quantized.h.
enum QuantizedForm { kBytes, kFineBytes, kNibbles, kNumForms };
enum { kGroupInputs = 32, kGroupUnits = 2 + kGroupInputs / 4 };

static inline int64_t row_units(int form, int64_t in) {
  return form == kNibbles ? in / kGroupInputs * kGroupUnits : 1 + (in + 3) / 4;
}

struct QuantizeRows {
  const void* x;  // [rows, width], x_stride from row to row
  uint32_t* out;  // [rows, row_units(form, width)], twice as many rows in kFineBytes
  int64_t rows, width, x_stride, grain, next;
};

// in: a multiple of what a 32-bit unit holds, as are the strides. Quantised: x_stride counts units, of any `in`, or of a
// multiple of kGroupInputs.
struct LinearRows {
  const void* x;       // [rows, in], x_stride from row to row
  const void* weight;  // packed, see linear.h
  const void* bias;    // [out_width] or null
  void* out;           // [rows, out_width], out_stride from row to row
  const void* after;   // what will be read next, or null
  int64_t rows, in, out_width, x_stride, out_stride, next;
};

struct PackLinear {
  const uint32_t* weight;  // [out_width, units]
  uint32_t* packed;
  int64_t units, out_width, next;
};

// One entry per dtype: float32, bfloat16. Each is run by all threads at once and takes work by tickets.
struct Kernels {
  int lanes;
  void (*embed[2])(void*);
  void (*add_norm[2])(void*);
  void (*gated[2])(void*);
  void (*argmax[2])(void*);
  void (*draw[2])(void*);
  void (*sum_parts[2])(void*);  // by one thread
  void (*quantize[kNumForms][2])(void*);
  void (*pack_linear)(void*);
  void (*linear[2])(void*);
  void (*linear_quantized[kNumForms][2])(void*);
  void (*rotate_and_write[2])(void*);
  void (*attend[2])(void*);
};

static inline int64_t take(int64_t* ticket, int64_t count) { return __atomic_fetch_add(ticket, count, __ATOMIC_RELAXED); }
