// Attention of all rows of a step straight from their blocks: decode, prefill, with or without a cached prefix.
//
// A tile is some queries with all G heads that share one KV head, as one matrix of up to kTileRows rows. It walks its
// context in chunks of kChunk positions counted from 0. For each chunk, keys are turned into columns, scores computed
// as a small matrix product, the softmax taken of this chunk alone, values weighted by a second product, and the result
// merged with that of earlier chunks. Every query's result is so computed by the same operations in the same order,
// whatever the tile, the batch and the number of threads.
//
// Rows with one query give each of their chunks to a tile of its own, and whoever ends a row's last one merges them, in
// order. Rows that read the beginning of a chunk from the same blocks are one tile there: what they share is read once
// for all, then comes the rest of each (tiles.cpp says which).
//
// Keys and values that are stored in another format than they are computed in are unpacked chunk by chunk.
//
// With a window, a chunk is walked from the first position that some query of the tile sees. Slots before it and behind
// the tile's last query are never read, nor are their entries in the block table.
#pragma once
#include "api.h"
#include "formats.h"
#include "int4.h"
#include "products.h"
#include "small.h"
#include "tile.h"
#include "vec.h"

namespace {

// Of one query and head: the largest raw score, the sum of the numerators and the values weighted by them.
struct Part {
  float top, total;
  float* values;  // [D] in the order of load2
};

// What W pairs of parts count for when they are put together.
struct Merge {
  vf top, old_factor, new_factor;

  INLINE_LAMBDA Merge(vf old_top, vf new_top, float scale) {
    top = max(new_top, old_top);
    old_factor = exp2((old_top - top) * scale);
    new_factor = exp2((new_top - top) * scale);
  }

  INLINE_LAMBDA void apply(int lane, Part& into, const Part& next, int64_t dim) const {
    float old = old_factor[lane], fresh = new_factor[lane];
    into.top = top[lane];
    into.total = into.total * old + next.total * fresh;
    for (int64_t i = 0; i < dim; i += W)
      store(into.values + i, load<vf>(into.values + i) * old + load<vf>(next.values + i) * fresh);
  }
};

INLINE void replace(Part& part, const Part& by, int64_t dim) {
  part.top = by.top;
  part.total = by.total;
  memcpy(part.values, by.values, dim * sizeof(float));
}

template <class T>
INLINE void finish(const Part& part, T* out, int64_t dim) {
  float factor = 1.0f / part.total;
  for (int64_t i = 0; i < dim; i += 2 * W)
    store2(out + i, load<vf>(part.values + i) * factor, load<vf>(part.values + i + W) * factor);
}

template <class T>
class Worker {
  const Attend& job;
  const Contexts& all;
  int64_t dim, group, units;
  int64_t to_value;  // bytes from a key to its value
  float scale;  // of exponents of 2, of scores as `weigh` finds them: capped ones are scaled already
  const T* keys[2][kChunk];  // where they are stored, in whatever format
  const T* own[2][kChunk];   // those that one of several rows does not share, and those of the next
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
    scale = (job.softcap > 0 ? 1.0f : job.scale) * 1.44269504f;
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
    int64_t num_work = all.num_tiles * all.num_kv_heads, work = take_wanted(next_work, num_work);
    if (work < num_work) look_at(Tile(all, work), Tile(all, work).chunk);
    while (work < num_work) {
      int64_t following = take_wanted(next_work, num_work);  // known early, so that its keys are on their way
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
      if (tile.single) {
        for (int64_t member = 0; member < tile.num_rows; member++) settle(tile, member);
      } else {
        write(tile);
      }
      work = following;
    }
  }

 private:
  int64_t take_wanted(int64_t* next_work, int64_t num_work) const {
    int64_t work;
    do work = take(next_work, 1);
    while (work < num_work && !is_wanted(Tile(all, work)));
    return work;
  }

  bool is_wanted(const Tile& tile) const {
    if (!job.wanted || tile.single) return true;
    int64_t first = all.first_token[tile.rows[0]] + tile.first;
    for (int64_t i = 0; i < job.num_wanted; i++)
      if (job.wanted[i] >= first && job.wanted[i] < first + tile.queries) return true;
    return false;
  }

  void look_at(const Tile& tile, int64_t chunk) {
    num_next = tile.common(chunk);
    tile.find_keys(all, job.cache, 0, chunk, tile.hidden(chunk), num_next, keys[1 - now]);
  }

  // Keys, or what lies `offset` bytes behind each, as they are computed with; at what a product takes with the first,
  // something finite that gets no weight.
  const T* const* view(const T** stored, int64_t begin, int64_t end, int64_t offset) {
    const T** shown = stored;
    if (all.format != Native<T>::kFormat) {
      for (int64_t i = begin; i < end; i++) {
        unpack((const uint8_t*)stored[i], offset, unpacked + i * dim);
        vectors[i] = unpacked + i * dim;
      }
      shown = vectors;
    }
    for (int64_t i = begin / kPair * kPair; i < begin; i++) shown[i] = shown[begin];
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

  T* out(const Tile& tile, int64_t row, int64_t query) const {
    return (T*)job.out + ((all.first_token[row] + tile.first + query) * all.num_heads + tile.head * group) * dim;
  }

  void load_queries(const Tile& tile) {
    int64_t stride = (all.num_heads + 2 * all.num_kv_heads) * dim;
    uint32_t* to = q;
    for (int64_t member = 0; member < tile.num_rows; member++)
      for (int64_t i = 0; i < tile.queries; i++) {
        int64_t token = all.first_token[tile.rows[member]] + tile.first + i;
        const T* from = (const T*)job.qkv + token * stride + tile.head * group * dim;
        for (int64_t g = 0; g < group; g++, to += units) pack_query(from + g * dim, to, dim);
      }
  }

  // One chunk of a tile: its part of each row's result, merged with the earlier ones or left for later.
  void attend(const Tile& tile, int64_t chunk) {
    int64_t start = chunk * kChunk, common = tile.common(chunk);
    int64_t seeing = start + common - 1 + all.window - tile.position;  // queries whose window has not left the chunk
    int64_t queries = seeing < tile.queries ? seeing : tile.queries;
    Span span = {tile.hidden(chunk), common, first_row(tile, start), queries * tile.num_rows * group};
    Slots<T> next = stored(keys[1 - now], num_next);
    score(tile, start, keys[now], span, next);
    for_each_rest(tile, [&](const T** keys, Span rest, Slots<T> later) { score(tile, start, keys, rest, later); });
    weigh_rows(tile, start, span);
    add_values(keys[now], span, next, false);
    for_each_rest(tile, [&](const T** keys, Span rest, Slots<T> later) { add_values(keys, rest, later, true); });
    if (!tile.single) merge_rows(tile, start, span);
  }

  // Rows that see nothing before this chunk have nothing to be merged with.
  void merge_rows(const Tile& tile, int64_t start, Span span) {
    for (int64_t r = span.from; r < span.to; r += W) {
      vf new_tops;
      int64_t count = span.to - r < W ? span.to - r : W;
      for (int i = 0; i < W; i++) new_tops[i] = scores[(r + (i < count ? i : 0)) * kChunk];
      Merge merge(load<vf>(tops + r), new_tops, scale);
      for (int i = 0; i < count; i++) {
        Part into = {tops[r + i], totals[r + i], merged + (r + i) * dim};
        if (first_seen(all, tile.position + (r + i) / group) >= start) {
          replace(into, fresh_part(r + i), dim);
        } else {
          merge.apply(i, into, fresh_part(r + i), dim);
        }
        tops[r + i] = into.top;
        totals[r + i] = into.total;
      }
    }
  }

  // The first row that sees a position, of one row's queries.
  int64_t first_row(const Tile& tile, int64_t position) const {
    return !tile.single && position > tile.position ? (position - tile.position) * group : 0;
  }

  // What each of several rows does not share with the others.
  template <class Use>
  void for_each_rest(const Tile& tile, Use use) {
    if (tile.num_rows == 1 || tile.shared == kChunk) return;
    int64_t following = find_rest(tile, 0);
    for (int64_t member = 0; member < tile.num_rows; member++) {
      int64_t end = following;
      following = member + 1 < tile.num_rows ? find_rest(tile, member + 1) : 0;
      Span rest = {tile.shared, end, member * group, (member + 1) * group};
      if (rest.begin < rest.end) use(own[member % 2], rest, stored(own[(member + 1) % 2], following));
    }
  }

  int64_t find_rest(const Tile& tile, int64_t member) {
    int64_t end = tile.length(all, member);
    tile.find_keys(all, job.cache, member, tile.chunk, tile.shared, end, own[member % 2]);
    return end;
  }

  Slots<T> stored(const T* const* keys, int64_t count) const { return {keys, count, to_value, all.slot_bytes}; }

  // later: what will be attended to next, so that it is on its way.
  void score(const Tile& tile, int64_t start, const T** keys, Span span, Slots<T> later) {
    Slots<T> mine = {view(keys, span.begin, span.end, 0), span.end, 0, 0};
    for (int64_t t = span.begin / kPair * kPair; t < span.end; t += kGroup) {
      int64_t count = span.end - t < kGroup ? span.end - t : kGroup, columns = (count + kPair - 1) / kPair * kPair;
      int64_t first = first_row(tile, start + t), from = first > span.from ? first : span.from;
      pack_keys(mine.from(t), packed, columns, dim, later.from(t));
      product<T>(span.to - from, q + from * units, units, packed, kGroup, columns, scores + from * kChunk + t, kChunk,
                 units, false);
    }
  }

  void weigh_rows(const Tile& tile, int64_t start, Span span) {
    int64_t stride = kChunk / Product<T>::kPerUnit;
    for (int64_t r = span.from; r < span.to; r++) {
      int64_t position = tile.position_of(all, r / group), sees = position + 1 - start;
      int64_t end = sees < kChunk ? sees : kChunk, all_end = end > span.end ? end : span.end;
      int64_t padded = (all_end + kPair - 1) / kPair * kPair;
      float* of_row = scores + r * kChunk;
      if (job.softcap > 0) cap(of_row, padded, job.scale / job.softcap, job.softcap);
      vf total;
      float top = weigh<T>(of_row, weights + r * stride, first_seen(all, position) - start, end, padded, scale, &total);
      of_row[0] = top;  // the scores are used up
      store(of_row + W, total);
    }
    int64_t r = span.from;
    for (; r + W <= span.to; r += W) {
      vu lanes[W];
      for (int i = 0; i < W; i++) lanes[i] = load<vu>(scores + (r + i) * kChunk + W);
      transpose(lanes);
      vf total = {};
      for (int i = 0; i < W; i++) total += (vf)lanes[i];
      for (int i = 0; i < W; i++) scores[(r + i) * kChunk + 1] = total[i];
    }
    for (; r < span.to; r++) scores[r * kChunk + 1] = sum(load<vf>(scores + r * kChunk + W));
  }

  Part fresh_part(int64_t r) const { return {scores[r * kChunk], scores[r * kChunk + 1], fresh + r * dim}; }

  // add: to those of positions before.
  void add_values(const T** keys, Span span, Slots<T> later, bool add) {
    enum { kStep = Product<T>::kPerUnit };
    int64_t stride = kChunk / kStep, skip = span.begin / kStep, rows = span.to - span.from;
    bool native = all.format == Native<T>::kFormat;
    Slots<T> mine = {view(keys, span.begin, span.end, to_value), span.end, native ? to_value : 0, 0};
    const uint32_t* weighed = weights + span.from * stride;
    float* to = fresh + span.from * dim;
    for (int64_t i = span.end; i < later.count; i++) prefetch(later.value(i), later.bytes);
    switch (rows) {
      case 1: return few_values<T, 1>(weighed, stride, mine, skip, later, to, dim, add);
      case 2: return few_values<T, 2>(weighed, stride, mine, skip, later, to, dim, add);
      case 3: return few_values<T, 3>(weighed, stride, mine, skip, later, to, dim, add);
      case 4: return few_values<T, 4>(weighed, stride, mine, skip, later, to, dim, add);
    }
    for (int64_t t = skip * kStep; t < span.end; t += kStep) {
      for (int64_t i = t; i < t + kStep && i < later.count; i++) prefetch(later.value(i), later.bytes);
      const T* following = t + 1 < span.end ? mine.value(t + 1) : nullptr;
      pack_value<T>(mine.value(t), following, packed + (t / kStep - skip) * dim, dim);
    }
    product<T>(rows, weighed + skip, stride, packed, dim, dim, to, dim, (span.end + kStep - 1) / kStep - skip, add);
  }

  void give(const Part& part, T* to) {
    finish(part, to, dim);
    if (all.format == kInt4) {
      float* turned = (float*)packed;
      widen(to, turned, dim);
      turn(turned, dim);
      for (int64_t i = 0; i < dim; i += W) store1(to + i, load1(turned + i));
    }
  }

  void write(const Tile& tile) {
    for (int64_t r = 0; r < tile.queries * group; r++)
      give(Part{tops[r], totals[r], merged + r * dim}, out(tile, tile.rows[0], r / group) + r % group * dim);
  }

  // chunk: counted from the first that the row sees.
  float* partial(const Tile& tile, int64_t row, int64_t chunk) const {
    return all.partials + ((all.partials_at[row] + chunk) * all.num_kv_heads + tile.head) * group * (dim + 2);
  }

  // Saves a chunk of a row with one query. Whoever ends the last chunk merges all of them.
  void settle(const Tile& tile, int64_t member) {
    int64_t row = tile.rows[member], first = first_seen(all, all.start[row]) / kChunk;
    int64_t chunks = all.start[row] / kChunk - first + 1;
    if (chunks > 1) {
      float* to = partial(tile, row, tile.chunk - first);
      for (int64_t g = 0; g < group; g++, to += dim + 2) {
        Part part = fresh_part(member * group + g);
        to[0] = part.top;
        to[1] = part.total;
        memcpy(to + 2, part.values, dim * sizeof(float));
      }
      int32_t* done = all.pending + row * all.num_kv_heads + tile.head;
      if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) < chunks) return;
      *done = 0;
    }
    for (int64_t g = 0; g < group; g++) {
      Part into = chunks > 1 ? Part{0, 0, merged} : fresh_part(member * group + g);
      for (int64_t c = 0; c < chunks && chunks > 1; c++) {
        float* from = partial(tile, row, c) + g * (dim + 2);
        Part next = {from[0], from[1], from + 2};
        if (c == 0) {
          replace(into, next, dim);
        } else {
          Merge(splat(into.top), splat(next.top), scale).apply(0, into, next, dim);
        }
      }
      give(into, out(tile, row, 0) + g * dim);
    }
  }
};

template <class T>
void attend(void* arg) {
  Attend* job = (Attend*)arg;
  Worker<T>(*job, take(&job->joined, 1)).run(&job->next);
}

}  // namespace
