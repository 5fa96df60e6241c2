// What a worker takes at a time.
#pragma once
#include "api.h"

namespace {

// The first position that a query sees.
static inline int64_t first_seen(const Contexts& all, int64_t position) {
  return position < all.window ? 0 : position - all.window + 1;
}

// One tile of one KV head: queries of one row, or several rows with one query each.
struct Tile {
  const int64_t* rows;
  int64_t num_rows, head;
  int64_t first, queries;     // of each row: [first, first + queries)
  int64_t chunk, last_chunk;  // to be attended to
  int64_t position;           // of the first row's first query
  int64_t seen;               // the first position that it sees
  int64_t shared;             // of several rows: the positions of the chunk that all of them read from the same blocks
  bool single;                // one query a row: its chunks are merged elsewhere

  Tile(const Contexts& all, int64_t work) {
    const Cut& cut = all.cuts[work / all.num_kv_heads];
    head = work % all.num_kv_heads;
    rows = all.cut_rows + cut.rows_at;
    num_rows = cut.num_rows;
    int64_t count = all.num_queries[rows[0]];
    single = count == 1;
    first = single ? 0 : cut.first;
    queries = count - first < all.tile_queries ? count - first : all.tile_queries;
    position = all.start[rows[0]] + first;
    seen = first_seen(all, position);
    chunk = single ? cut.first : seen / kChunk;
    last_chunk = single ? cut.first : (position + queries - 1) / kChunk;
    shared = cut.shared;
  }

  // Positions of a chunk that all queries attend to at once: up to the last that some query sees, or what rows share.
  int64_t common(int64_t c) const {
    if (num_rows > 1) return shared;
    int64_t rest = position + queries - c * kChunk;
    return rest < kChunk ? rest : kChunk;
  }

  int64_t hidden(int64_t c) const {  // of these, how many come before the first that some query sees
    int64_t before = seen - c * kChunk;
    return before > 0 ? before : 0;
  }

  int64_t length(const Contexts& all, int64_t member) const {  // positions of the one chunk that this row sees
    int64_t rest = all.start[rows[member]] + 1 - chunk * kChunk;
    return rest < kChunk ? rest : kChunk;
  }

  int64_t position_of(const Contexts& all, int64_t query) const {
    return single ? all.start[rows[query]] : position + query;
  }

  // Where the keys [begin, end) of a chunk are stored.
  template <class T>
  void find_keys(const Contexts& all, const void* cache, int64_t member, int64_t c, int64_t begin, int64_t end,
                 const T** keys) const {
    int64_t at = c * kChunk + begin, block = at / all.block_size, slot = at % all.block_size;
    const int64_t* table = all.tables + all.table_at[rows[member]];
    const uint8_t* base = (const uint8_t*)cache + head * all.block_size * all.slot_bytes;
    for (int64_t i = begin; i < end; block++, slot = 0)
      for (const uint8_t* span = base + table[block] * all.block_bytes; slot < all.block_size && i < end; slot++, i++)
        keys[i] = (const T*)(span + slot * all.slot_bytes);
  }
};

// Positions [begin, end) of a chunk and rows [from, to) of a tile's matrices.
struct Span {
  int64_t begin, end, from, to;
};

}  // namespace
