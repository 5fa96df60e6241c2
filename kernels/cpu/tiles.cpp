// Cuts a step's rows into the tiles that attention computes, once for all layers.
//
// A row with several queries is cut by them, a row with one by chunks. Of a chunk, rows that begin with the same blocks
// become one tile, so that what they share is read once. Only blocks are compared: why they are the same nobody asks. A
// block is what its whole prefix makes it, so rows that share nothing of a chunk share nothing of later ones, and are
// compared no more.
#include "api.h"

namespace {

const int64_t kShares = kChunk / kShareStep;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct Cutter {
  const Contexts& all;
  int64_t* cut_rows;
  Cut* cuts;
  int64_t* shares;  // [R] of each row that waits: what it shares with the first, in steps
  int64_t num_rows, num_cuts;

  int64_t first_chunk(int64_t row) const {
    int64_t before = all.start[row] - all.window + 1;
    return before > 0 ? before / kChunk : 0;
  }

  int64_t last_chunk(int64_t row) const { return (all.start[row] + all.num_queries[row] - 1) / kChunk; }

  // Whether the row's window begins no later than the chunk.
  bool sees_all(int64_t row, int64_t chunk) const { return all.start[row] - all.window < chunk * kChunk; }

  void add(int64_t row, int64_t first) {
    cuts[num_cuts++] = {num_rows, 1, first, 0};
    cut_rows[num_rows++] = row;
  }

  void cut_queries(int64_t row) {
    int64_t tiles = (all.num_queries[row] + all.tile_queries - 1) / all.tile_queries;
    for (int64_t i = tiles - 1; i >= 0; i--) add(row, i * all.tile_queries);  // the longest first
  }

  // waiting: rows with one query; later: room for as many.
  void cut_chunks(int64_t* waiting, int64_t count, int64_t* later) {
    for (int64_t chunk = 0; count > 0; chunk++) {
      int64_t kept = 0;
      while (count > 0) {
        int64_t row = waiting[0], from = num_rows;
        bool whole = sees_all(row, chunk);
        int64_t steps = whole ? compare(waiting, count, chunk) : 0;
        if (!steps && chunk >= first_chunk(row)) add(row, chunk);
        if (!steps && whole)
          for (int64_t c = chunk + 1; c <= last_chunk(row); c++) add(row, c);
        count = steps ? add_sharing(waiting, count, chunk, steps) : drop_first(waiting, count);
        if (!steps && !whole && chunk < last_chunk(row)) later[kept++] = row;
        for (int64_t i = from; steps && i < num_rows; i++)
          if (chunk < last_chunk(cut_rows[i])) later[kept++] = cut_rows[i];
      }
      int64_t* used = waiting;
      waiting = later;
      later = used;
      count = kept;
    }
  }

  static int64_t drop_first(int64_t* waiting, int64_t count) {
    for (int64_t i = 1; i < count; i++) waiting[i - 1] = waiting[i];
    return count - 1;
  }

  // Positions from a chunk's first on that both rows see and read from the same blocks, in steps.
  int64_t share(int64_t a, int64_t b, int64_t chunk) const {
    if (!sees_all(b, chunk)) return 0;
    const int64_t *blocks = all.tables + all.table_at[a], *others = all.tables + all.table_at[b];
    int64_t from = chunk * kChunk, at = from, end = least(least(all.start[a], all.start[b]) + 1, from + kChunk);
    for (int64_t block = at / all.block_size; at < end && blocks[block] == others[block]; block++)
      at = (block + 1) * all.block_size;
    return (least(at, end) - from) / kShareStep;
  }

  // Fills `shares`; returns how much the first row best shares with those that share so much; 0: nothing with any.
  int64_t compare(const int64_t* waiting, int64_t count, int64_t chunk) {
    int64_t sharing[kShares + 1] = {}, most = 0, best = 0;
    for (int64_t i = 1; i < count; i++) sharing[shares[i] = share(waiting[0], waiting[i], chunk)]++;
    for (int64_t steps = kShares, others = 0; steps > 0; steps--) {
      others += sharing[steps];
      if (steps * others <= most) continue;
      most = steps * others;
      best = steps;
    }
    return best;
  }

  // Tiles of the first row and those that share so much with it; the others move up. Returns how many these are.
  int64_t add_sharing(int64_t* waiting, int64_t count, int64_t chunk, int64_t steps) {
    int64_t first = num_rows, left = 0;
    shares[0] = steps;
    for (int64_t i = 0; i < count; i++) (shares[i] < steps ? waiting[left++] : cut_rows[num_rows++]) = waiting[i];
    int64_t rows = num_rows - first, tiles = (rows + all.tile_queries - 1) / all.tile_queries;
    for (int64_t i = 0; i < tiles; i++) {
      int64_t from = rows * i / tiles, to = rows * (i + 1) / tiles;
      cuts[num_cuts++] = {first + from, to - from, chunk, steps * kShareStep};
    }
    return left;
  }
};

}  // namespace

// out: [4 R + 5 room], room being for tiles. Returns how many chunks are merged from parts.
extern "C" __attribute__((visibility("default"))) int64_t kvferry_cut_tiles(Contexts* all, int64_t rows, int64_t* out,
                                                                            int64_t room) {
  int64_t *partials_at = out, *waiting = out + rows, *later = waiting + rows, *shares = later + rows, singles = 0;
  int64_t* cut_rows = shares + rows;
  Cutter cutter = {*all, cut_rows, (Cut*)(cut_rows + room), shares, 0, 0};
  int64_t split = 0;
  all->scores = 0;
  for (int64_t row = 0; row < rows; row++) {
    int64_t count = all->num_queries[row], end = all->start[row] + count;
    int64_t chunks = cutter.last_chunk(row) - cutter.first_chunk(row) + 1;
    partials_at[row] = split;
    if (count == 1) waiting[singles++] = row;
    if (count == 1 && chunks > 1) split += chunks;
    all->scores += count * (end < all->window ? end : all->window) * all->num_kv_heads;
  }
  cutter.cut_chunks(waiting, singles, later);
  for (int64_t row = 0; row < rows; row++)
    if (all->num_queries[row] > 1) cutter.cut_queries(row);
  all->num_tiles = cutter.num_cuts;
  all->partials_at = partials_at;
  all->cuts = cutter.cuts;
  all->cut_rows = cut_rows;
  return split;
}
