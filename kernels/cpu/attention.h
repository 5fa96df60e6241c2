// Attention of all rows of a step straight from their blocks: decode, prefill, with or without a cached prefix.
//
// A tile is some queries of a row with all G heads that share one KV head, as one matrix of up to kTileRows rows. It
// walks its context in chunks of kChunk positions counted from 0. For each chunk, keys are turned into columns, scores
// computed as a small matrix product, the softmax taken of this chunk alone, values weighted by a second product, and
// the result merged with that of earlier chunks. A row with one query gives its chunks to several threads; the last one
// to finish merges them, in order. Every query's result is so computed by the same operations in the same order,
// whatever the tile, the batch and the number of threads.
//
// Keys and values that are stored in another format than they are computed in are unpacked chunk by chunk.
//
// With a window, a chunk is walked from the first position that some query of the tile sees. Slots before it and behind
// the tile's last query are never read, nor are their entries in the block table.
#pragma once
#include "api.h"
#include "formats.h"
#include "int4.h"
#include "small.h"
#include "vec.h"

namespace {

enum { kGroup = kCols * W };  // keys scored at once

// Number types inside the products. Units are 32 bits: a float, or a pair of bfloat16 where the machine multiplies those.
template <class T>
struct Product;

template <>
struct Product<float> {
  enum { kPerUnit = 1, kWidening = 1 };
  INLINE vf add(vf sum, uint32_t a, vu b) { return sum + splat(as_float(a)) * (vf)b; }
};

#ifdef __AVX512BF16__
template <>
struct Product<bf16> {
  enum { kPerUnit = 2, kWidening = 1 };
  INLINE vf add(vf sum, uint32_t a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)splat(a), (__m512bh)b);
  }
};
#else
template <>
struct Product<bf16> : Product<float> {
  enum { kPerUnit = 1, kWidening = 2 };  // each pair becomes two floats
};
#endif

// out[R, C * W] = a[R, depth] x b[depth, C * W]; strides in units.
template <class T, int R, int C>
void product_block(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* out, int64_t ldo, int64_t depth) {
  vf sums[R][C] = {};
  for (int64_t k = 0; k < depth; k++) {
    vu bs[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) bs[c] = load<vu>(b + k * ldb + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = Product<T>::add(sums[r][c], a[r * lda + k], bs[c]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(out + r * ldo + c * W, sums[r][c]);
}

template <class T, int C>
void product_columns(int64_t rows, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* out, int64_t ldo,
                     int64_t depth) {
  for (; rows >= kRows; rows -= kRows, a += kRows * lda, out += kRows * ldo)
    product_block<T, kRows, C>(a, lda, b, ldb, out, ldo, depth);
  switch (rows) {
    case 1: return product_block<T, 1, C>(a, lda, b, ldb, out, ldo, depth);
    case 2: return product_block<T, 2, C>(a, lda, b, ldb, out, ldo, depth);
    case 3: return product_block<T, 3, C>(a, lda, b, ldb, out, ldo, depth);
    case 4: return product_block<T, 4, C>(a, lda, b, ldb, out, ldo, depth);
    case 5: return product_block<T, 5, C>(a, lda, b, ldb, out, ldo, depth);
  }
}

// columns: a multiple of 2W.
template <class T>
void product(int64_t rows, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t columns, float* out, int64_t ldo,
             int64_t depth) {
  int64_t done = 0;
  for (; done + kCols * W <= columns; done += kCols * W)
    product_columns<T, kCols>(rows, a, lda, b + done, columns, out + done, ldo, depth);
  for (; done < columns; done += 2 * W)
    product_columns<T, 2>(rows, a, lda, b + done, columns, out + done, ldo, depth);
}

// The queries of a tile as rows of units.
INLINE void pack_query(const float* q, uint32_t* to, int64_t dim) { memcpy(to, q, dim * sizeof(float)); }
INLINE void pack_query(const bf16* q, uint32_t* to, int64_t dim) {
  if (Product<bf16>::kPerUnit == 2) {
    memcpy(to, q, dim * sizeof(bf16));
  } else {
    for (int64_t i = 0; i < dim; i++) to[i] = (uint32_t)q[i].bits << 16;
  }
}

// To the second-level cache: what comes next does not fit the first beside what is worked on.
INLINE void prefetch(const void* slot, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)slot + i, 0, 2);
}

// Turns up to kGroup keys into columns `[units of a key, kGroup]`; the missing ones are zero. Calls for `later` keys.
template <class T>
void pack_keys(const T* const* keys, int64_t count, uint32_t* to, int64_t dim, const T* const* later,
               int64_t num_later, int64_t slot_bytes) {
  int64_t units = dim * (int64_t)sizeof(T) / 4;
  for (int64_t first = 0; first < kGroup; first += W) {
    for (int64_t i = first; i < first + W && i < num_later; i++) prefetch(later[i], slot_bytes);
    for (int64_t u = 0; u < units; u += W) {
      vu v[W];
      for (int i = 0; i < W; i++) v[i] = first + i < count ? load<vu>((const uint32_t*)keys[first + i] + u) : (vu){};
      transpose(v);
      for (int i = 0; i < W; i++) {
        if (Product<T>::kWidening == 2) {
          store(to + (u + i) * 2 * kGroup + first, v[i] << 16);
          store(to + ((u + i) * 2 + 1) * kGroup + first, v[i] & 0xffff0000u);
        } else {
          store(to + (u + i) * kGroup + first, v[i]);
        }
      }
    }
  }
}

// Values as rows `[units of the positions, dim]`, in the order of load2.
template <class T>
INLINE void pack_value(const T* value, const T* following, uint32_t* to, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 2 * W) {
    if (Product<T>::kPerUnit == 2) {
      vu a = load<vu>(value + i), b = following ? load<vu>(following + i) : (vu){};
      store(to + i, (a & 0xffffu) | (b << 16));
      store(to + i + W, (a >> 16) | (b & 0xffff0000u));
    } else {
      vf a, b;
      load2(value + i, a, b);
      store(to + i, a);
      store(to + i + W, b);
    }
  }
}

// scores = to * tanh(scores * factor), within 2e-7 * to.
INLINE void cap(float* scores, int64_t padded, float factor, float to) {
  for (int64_t t = 0; t < padded; t += W) {
    vf e = exp(load<vf>(scores + t) * (2.0f * factor));
    store(scores + t, to - (2.0f * to) / (e + 1.0f));
  }
}

// Softmax numerators of one row of raw scores, of which those in [begin, end) count; the rest up to `padded` becomes 0.
template <class T>
void weigh(float* scores, uint32_t* weights, int64_t begin, int64_t end, int64_t padded, float scale, float* top,
           float* total) {
  vf most = splat(-__builtin_inff()), sums = {};
  for (int64_t t = 0; t < begin; t++) scores[t] = -__builtin_inff();
  for (int64_t t = end; t < padded; t++) scores[t] = -__builtin_inff();
  for (int64_t t = 0; t < padded; t += W) most = max(load<vf>(scores + t), most);
  float m = most[0];
  for (int i = 1; i < W; i++) m = most[i] > m ? most[i] : m;
  for (int64_t t = 0; t < padded; t += 2 * W) {
    vf a = exp((load<vf>(scores + t) - m) * scale), b = exp((load<vf>(scores + t + W) - m) * scale);
    sums += a;
    sums += b;
    if (Product<T>::kPerUnit == 2) {
#ifdef __AVX512BF16__
      store((uint16_t*)weights + t, _mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#endif
    } else {
      store(weights + t, a);
      store(weights + t + W, b);
    }
  }
  *top = m;
  *total = sum(sums);
}

// Of one query and head: the largest raw score, the sum of the numerators and the values weighted by them.
struct Part {
  float top, total;
  float* values;  // [D] in the order of load2
};

INLINE void merge(Part& into, const Part& next, bool first, float scale, int64_t dim) {
  if (first) {
    into.top = next.top;
    into.total = next.total;
    memcpy(into.values, next.values, dim * sizeof(float));
    return;
  }
  float top = next.top > into.top ? next.top : into.top;
  float old_factor = exp(splat((into.top - top) * scale))[0], new_factor = exp(splat((next.top - top) * scale))[0];
  into.top = top;
  into.total = into.total * old_factor + next.total * new_factor;
  for (int64_t i = 0; i < dim; i += W)
    store(into.values + i, load<vf>(into.values + i) * old_factor + load<vf>(next.values + i) * new_factor);
}

template <class T>
INLINE void finish(const Part& part, T* out, int64_t dim) {
  float factor = 1.0f / part.total;
  for (int64_t i = 0; i < dim; i += 2 * W)
    store2(out + i, load<vf>(part.values + i) * factor, load<vf>(part.values + i + W) * factor);
}

// The first position that a query sees.
INLINE int64_t first_seen(const Contexts& all, int64_t position) {
  return position < all.window ? 0 : position - all.window + 1;
}

// One tile of one KV head.
struct Tile {
  int64_t row, head, first, queries;  // queries of the row: [first, first + queries)
  int64_t chunk, last_chunk;          // to be attended to
  int64_t position;                   // of the first query
  int64_t seen;                       // the first position that it sees
  bool split;                         // these chunks are not all: they are merged elsewhere

  Tile(const Contexts& all, int64_t work) {
    int64_t tile = work / all.num_kv_heads, count;
    head = work % all.num_kv_heads;
    row = all.tile_row[tile];
    count = all.num_queries[row];
    first = count == 1 ? 0 : all.tile_first[tile];
    queries = count - first < all.tile_queries ? count - first : all.tile_queries;
    position = all.start[row] + first;
    last_chunk = (position + queries - 1) / kChunk;
    seen = first_seen(all, position);
    chunk = seen / kChunk;
    split = count == 1 && last_chunk > chunk;
    if (count == 1) chunk = last_chunk = all.tile_first[tile];
  }

  int64_t length(int64_t c) const {  // positions of a chunk up to the last that some query sees
    int64_t rest = position + queries - c * kChunk;
    return rest < kChunk ? rest : kChunk;
  }

  int64_t hidden(int64_t c) const {  // of these, how many come before the first that some query sees
    int64_t before = seen - c * kChunk;
    return before > 0 ? before : 0;
  }

  // Where the chunk's keys are stored.
  template <class T>
  void find_keys(const Contexts& all, const uint8_t* cache, int64_t c, const T** keys) const {
    int64_t skip = hidden(c), at = c * kChunk + skip, block = at / all.block_size, slot = at % all.block_size;
    const int64_t* table = all.tables + all.table_at[row];
    const uint8_t* base = cache + head * all.block_size * all.slot_bytes;
    for (int64_t i = skip, n = length(c); i < n; block++, slot = 0)
      for (const uint8_t* span = base + table[block] * all.block_bytes; slot < all.block_size && i < n; slot++, i++)
        keys[i] = (const T*)(span + slot * all.slot_bytes);
  }
};

template <class T>
class Worker {
  const Attend& job;
  const Contexts& all;
  int64_t dim, group, units;
  int64_t to_value;  // bytes from a key to its value
  float scale;  // of scores as `weigh` finds them: capped ones are scaled already
  const T* keys[2][kChunk];  // where they are stored, in whatever format
  const T* vectors[kChunk];  // keys, then values of the chunk in rows of `unpacked`
  int64_t num_next = 0;  // keys of the chunk after this one, in keys[1 - now]
  int now = 0;
  uint32_t *q, *packed, *weights;
  float *scores, *fresh, *merged;
  float *tops, *totals;
  T* unpacked;

 public:
  Worker(const Attend& job, int64_t me) : job(job), all(*job.contexts), dim(all.head_dim) {
    group = all.num_heads / all.num_kv_heads;
    units = dim / Product<T>::kPerUnit;
    to_value = all.num_kv_heads * all.block_size * all.slot_bytes;
    scale = job.softcap > 0 ? 1.0f : job.scale;
    int64_t rows = all.tile_queries * group;
    float* p = all.scratch + me * all.scratch_floats;
    auto part = [&](int64_t count) { float* at = p; p += count; return at; };
    q = (uint32_t*)part(rows * dim);
    packed = (uint32_t*)part(kChunk * dim);
    weights = (uint32_t*)part(rows * kChunk);
    scores = part(rows * kChunk);
    fresh = part(rows * dim);
    merged = part(rows * dim);
    tops = part(rows);
    totals = part(rows);
    unpacked = (T*)part(kChunk * dim);
  }

  void run(int64_t* next_work) {
    int64_t num_work = all.num_tiles * all.num_kv_heads, work = take(next_work, 1);
    if (work < num_work) look_at(Tile(all, work), Tile(all, work).chunk);
    while (work < num_work) {
      int64_t following = take(next_work, 1);  // known early, so that its keys are on their way
      Tile tile(all, work);
      load_queries(tile);
      for (int64_t c = tile.chunk; c <= tile.last_chunk; c++) {
        now ^= 1;
        if (c < tile.last_chunk) {
          look_at(tile, c + 1);
        } else if (following < num_work) {
          Tile next(all, following);
          look_at(next, next.chunk);
        } else {
          num_next = 0;
        }
        attend(tile, c);
      }
      if (tile.split) {
        merge_split(tile);
      } else {
        write(tile);
      }
      work = following;
    }
  }

 private:
  void look_at(const Tile& tile, int64_t chunk) {
    tile.find_keys(all, (const uint8_t*)job.cache, chunk, keys[1 - now]);
    num_next = tile.length(chunk);
  }

  static const T* behind(const T* slot, int64_t bytes) { return (const T*)((const uint8_t*)slot + bytes); }

  // The chunk's keys, or what lies `offset` bytes behind each, as they are computed with; before `hidden`, something
  // finite that gets no weight.
  const T* const* view(int64_t hidden, int64_t length, int64_t offset) {
    const T** shown = keys[now];
    if (all.format != Native<T>::kFormat) {
      for (int64_t i = hidden; i < length; i++) {
        unpack((const uint8_t*)keys[now][i], offset, unpacked + i * dim);
        vectors[i] = unpacked + i * dim;
      }
      shown = vectors;
    }
    for (int64_t i = 0; i < hidden; i++) shown[i] = shown[hidden];
    return shown;
  }

  // offset: 0 of keys, `to_value` of values.
  void unpack(const uint8_t* key, int64_t offset, T* to) const {
    if (all.format != kInt4) {
      unpack_slot(all.format, key + offset, to, dim);
    } else if (offset == 0) {
      unpack_int4_key(key, key + to_value, to, dim);
    } else {
      unpack_int4_value(key + offset, to, dim);
    }
  }

  T* out(const Tile& tile, int64_t query) const {
    return (T*)job.out + ((all.first_token[tile.row] + tile.first + query) * all.num_heads + tile.head * group) * dim;
  }

  float* partial(const Tile& tile, int64_t chunk) const {
    int64_t at = all.partials_at[tile.row] + chunk - tile.seen / kChunk;
    return all.partials + (at * all.num_kv_heads + tile.head) * group * (dim + 2);
  }

  void load_queries(const Tile& tile) {
    int64_t stride = (all.num_heads + 2 * all.num_kv_heads) * dim;
    const T* from = (const T*)job.qkv + (all.first_token[tile.row] + tile.first) * stride + tile.head * group * dim;
    for (int64_t i = 0; i < tile.queries; i++)
      for (int64_t g = 0; g < group; g++) pack_query(from + i * stride + g * dim, q + (i * group + g) * units, dim);
  }

  // One chunk of a tile: its part of each row's result, merged with the earlier ones or left for later.
  void attend(const Tile& tile, int64_t chunk) {
    int64_t start = chunk * kChunk, length = tile.length(chunk), hidden = tile.hidden(chunk);
    bool native = all.format == Native<T>::kFormat;
    const T* const* mine = view(hidden, length, 0);
    int64_t shift = native ? to_value : 0;
    auto first_row = [&](int64_t position) { return position > tile.position ? (position - tile.position) * group : 0; };
    int64_t seeing = start + length - 1 + all.window - tile.position;  // queries whose window has not left the chunk
    int64_t rows = (seeing < tile.queries ? seeing : tile.queries) * group;
    for (int64_t t = hidden / kGroup * kGroup; t < length; t += kGroup) {
      int64_t count = length - t < kGroup ? length - t : kGroup, from = first_row(start + t);
      pack_keys(mine + t, count, packed, dim, keys[1 - now] + t, num_next - t, all.slot_bytes);
      product<T>(rows - from, q + from * units, units, packed, kGroup, scores + from * kChunk + t, kChunk, units);
    }
    int64_t from = first_row(start), padded = (length + 2 * W - 1) / (2 * W) * (2 * W);
    enum { kStep = Product<T>::kPerUnit };
    int64_t stride = kChunk / kStep, skip = hidden / kStep;
    for (int64_t r = from; r < rows; r++) {
      int64_t position = tile.position + r / group, sees = position + 1 - start, first = first_seen(all, position) - start;
      if (job.softcap > 0) cap(scores + r * kChunk, padded, job.scale / job.softcap, job.softcap);
      weigh<T>(scores + r * kChunk, weights + r * stride, first, sees < length ? sees : length, padded, scale,
               fresh_top(r), fresh_total(r));
    }
    if (!native) view(hidden, length, to_value);
    for (int64_t t = skip * kStep; t < length; t += kStep) {
      for (int64_t i = t; i < t + kStep && i < num_next; i++) prefetch(behind(keys[1 - now][i], to_value), all.slot_bytes);
      const T* following = t + 1 < length ? behind(mine[t + 1], shift) : nullptr;
      pack_value<T>(behind(mine[t], shift), following, packed + (t / kStep - skip) * dim, dim);
    }
    for (int64_t i = length; i < num_next; i++) prefetch(behind(keys[1 - now][i], to_value), all.slot_bytes);
    product<T>(rows - from, weights + from * stride + skip, stride, packed, dim, fresh + from * dim, dim,
               (length + kStep - 1) / kStep - skip);
    if (tile.split) {
      save(tile, chunk);
    } else {
      for (int64_t r = from; r < rows; r++) {
        Part into = {tops[r], totals[r], merged + r * dim};
        bool first = first_seen(all, tile.position + r / group) >= start;
        merge(into, Part{*fresh_top(r), *fresh_total(r), fresh + r * dim}, first, scale, dim);
        tops[r] = into.top;
        totals[r] = into.total;
      }
    }
  }

  // The scores of a row are used up when these are written.
  float* fresh_top(int64_t r) { return scores + r * kChunk; }
  float* fresh_total(int64_t r) { return scores + r * kChunk + 1; }

  void save(const Tile& tile, int64_t chunk) {
    float* to = partial(tile, chunk);
    for (int64_t g = 0; g < group; g++, to += dim + 2) {
      to[0] = *fresh_top(g);
      to[1] = *fresh_total(g);
      memcpy(to + 2, fresh + g * dim, dim * sizeof(float));
    }
  }

  void give(const Part& part, T* to) {
    finish(part, to, dim);
    if (all.format == kInt4) {
      widen(to, fresh, dim);
      turn(fresh, dim);
      for (int64_t i = 0; i < dim; i += W) store1(to + i, load1(fresh + i));
    }
  }

  void write(const Tile& tile) {
    for (int64_t r = 0; r < tile.queries * group; r++)
      give(Part{tops[r], totals[r], merged + r * dim}, out(tile, r / group) + r % group * dim);
  }

  // Whoever ends the last chunk of a row merges all of them.
  void merge_split(const Tile& tile) {
    int64_t first = tile.seen / kChunk, last = tile.position / kChunk;
    int32_t* done = all.pending + tile.row * all.num_kv_heads + tile.head;
    if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) < last - first + 1) return;
    *done = 0;
    for (int64_t g = 0; g < group; g++) {
      Part into = {0, 0, merged};
      for (int64_t c = first; c <= last; c++) {
        float* from = partial(tile, c) + g * (dim + 2);
        merge(into, Part{from[0], from[1], from + 2}, c == first, scale, dim);
      }
      give(into, out(tile, 0) + g * dim);
    }
  }
};

template <class T>
void attend(void* arg) {
  Attend* job = (Attend*)arg;
  Worker<T>(*job, take(&job->joined, 1)).run(&job->next);
}

}  // namespace
