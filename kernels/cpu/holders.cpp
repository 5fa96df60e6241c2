// Who holds a block: a hash table from a block's 16 bytes to a set of holders, one bit each. Twin: cluster/holders.py.
//
// 256 shards by the name's first byte, so that growing copies a small part. A slot is the name and its set in as many
// words as the shard's highest holder needs; a set of nobody marks an empty slot. Collisions go to the next slot. Names
// are digests, so a part of one is as good as a hash of it.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum : uint32_t { kShards = 256, kName = 2, kAhead = 16, kLeast = 8 };  // kName: words; kAhead: slots asked for ahead

struct Shard {
  uint64_t* slots;  // [capacity, kName + words]
  uint32_t capacity, count, words;
};

struct Table {
  Shard shards[kShards];
};

struct Name {
  uint64_t word[kName];
};

Name name_at(const uint8_t* names, int64_t i) {
  Name name;
  memcpy(&name, names + i * sizeof(Name), sizeof(Name));
  return name;
}

uint64_t* slot_at(const Shard& s, uint32_t i) { return s.slots + (uint64_t)i * (kName + s.words); }

uint32_t home(const Shard& s, const uint64_t* name) { return (uint32_t)((name[1] & 0xffffffff) * s.capacity >> 32); }

uint32_t next(const Shard& s, uint32_t i) { return i + 1 == s.capacity ? 0 : i + 1; }

// Whether somebody holds it, besides `gone` [words].
bool left_of(const Shard& s, const uint64_t* slot, const uint64_t* gone) {
  for (uint32_t w = 0; w < s.words; w++)
    if (slot[kName + w] & ~(gone ? gone[w] : 0)) return true;
  return false;
}

bool empty(const Shard& s, const uint64_t* slot) { return !left_of(s, slot, nullptr); }

// Where the name stands, or the empty slot where it would. There always is an empty one.
uint32_t find(const Shard& s, const uint64_t* name) {
  for (uint32_t i = home(s, name);; i = next(s, i)) {
    const uint64_t* slot = slot_at(s, i);
    if ((slot[0] == name[0] && slot[1] == name[1]) || empty(s, slot)) return i;
  }
}

void ask_for(const Table* t, const uint8_t* names, int64_t i) {
  Name name = name_at(names, i);
  const Shard& s = t->shards[names[i * sizeof(Name)]];
  if (!s.capacity) return;
  const uint64_t* slot = slot_at(s, home(s, name.word));
  __builtin_prefetch(slot);
  __builtin_prefetch(slot + 8);
}

// Copies all slots, without those holders in `gone` [words], and without whom nobody else holds. `count`: how many will
// be left. False: there is no memory, and nothing has changed.
bool rebuild(Shard* s, uint32_t capacity, uint32_t count, uint32_t words, const uint64_t* gone = nullptr) {
  Shard fresh = {(uint64_t*)calloc(capacity, (kName + words) * sizeof(uint64_t)), capacity, count, words};
  if (!fresh.slots) return false;
  for (uint32_t i = 0; i < s->capacity; i++) {
    const uint64_t* slot = slot_at(*s, i);
    if (!left_of(*s, slot, gone)) continue;
    uint64_t* copy = slot_at(fresh, find(fresh, slot));
    memcpy(copy, slot, (kName + s->words) * sizeof(uint64_t));
    for (uint32_t w = 0; w < s->words && gone; w++) copy[kName + w] &= ~gone[w];
  }
  free(s->slots);
  *s = fresh;
  return true;
}

// Moves up whom the slot had pushed further down, so that no search ends too early.
void vacate(Shard* s, uint32_t hole) {
  for (uint32_t i = next(*s, hole); !empty(*s, slot_at(*s, i)); i = next(*s, i)) {
    uint32_t from = home(*s, slot_at(*s, i));
    uint32_t far = i >= from ? i - from : i + s->capacity - from;
    uint32_t gap = i >= hole ? i - hole : i + s->capacity - hole;
    if (far < gap) continue;
    memcpy(slot_at(*s, hole), slot_at(*s, i), (kName + s->words) * sizeof(uint64_t));
    hole = i;
  }
  memset(slot_at(*s, hole), 0, (kName + s->words) * sizeof(uint64_t));
  s->count--;
}

// 1: it was not held before; 0: it was; -1: there is no memory.
int hold(Shard* s, const Name& name, uint32_t word, uint64_t bit) {
  uint32_t words = word < s->words ? s->words : word + 1;
  bool full = (uint64_t)(s->count + 1) * 4 > (uint64_t)s->capacity * 3;
  if (full || words > s->words) {
    uint32_t capacity = !full ? s->capacity : s->capacity < kLeast ? kLeast : s->capacity + s->capacity / 2;
    if (!rebuild(s, capacity, s->count, words)) return -1;
  }
  uint64_t* slot = slot_at(*s, find(*s, name.word));
  if (slot[kName + word] & bit) return 0;
  if (empty(*s, slot)) {
    memcpy(slot, &name, sizeof(Name));
    s->count++;
  }
  slot[kName + word] |= bit;
  return 1;
}

int drop(Shard* s, const Name& name, uint32_t word, uint64_t bit) {
  if (word >= s->words) return 0;
  uint32_t i = find(*s, name.word);
  uint64_t* slot = slot_at(*s, i);
  if (!(slot[kName + word] & bit)) return 0;
  slot[kName + word] ^= bit;
  if (empty(*s, slot)) vacate(s, i);
  return 1;
}

}  // namespace

EXPORT Table* kvferry_holders_new() { return (Table*)calloc(1, sizeof(Table)); }

EXPORT void kvferry_holders_free(Table* t) {
  for (Shard& s : t->shards) free(s.slots);
  free(t);
}

// Whether a holder holds each of n names from now on. changed: [n], whether that is new. Returns how many are, or -1
// when memory was refused on the way.
EXPORT int64_t kvferry_holders_put(Table* t, int64_t holder, int held, const uint8_t* names, int64_t n, uint8_t* changed) {
  int64_t num_changed = 0;
  for (int64_t i = 0; i < n && i < kAhead; i++) ask_for(t, names, i);
  for (int64_t i = 0; i < n; i++) {
    if (i + kAhead < n) ask_for(t, names, i + kAhead);
    Shard* s = &t->shards[names[i * sizeof(Name)]];
    int did = (held ? hold : drop)(s, name_at(names, i), (uint32_t)(holder / 64), 1ull << holder % 64);
    if (did < 0) return -1;
    changed[i] = (uint8_t)did;
    num_changed += did;
  }
  return num_changed;
}

// Runs of names that the same holders hold: where each ends, counted from the name `first`, and the sets [words, n], word
// by word. Returns how many.
EXPORT int64_t kvferry_holders_runs(const Table* t, const uint8_t* names, int64_t n, int64_t first, int64_t words,
                                    int64_t* ends, uint64_t* sets) {
  int64_t run = -1;
  for (int64_t i = 0; i < n && i < kAhead; i++) ask_for(t, names, i);
  for (int64_t i = 0; i < n; i++) {
    if (i + kAhead < n) ask_for(t, names, i + kAhead);
    const Shard& s = t->shards[names[i * sizeof(Name)]];
    Name name = name_at(names, i);
    const uint64_t* slot = s.capacity ? slot_at(s, find(s, name.word)) : nullptr;
    bool same = run >= 0;
    for (int64_t w = 0; w < words && same; w++)
      same = sets[w * n + run] == (slot && w < s.words ? slot[kName + w] : 0);
    if (!same) {
      run++;
      for (int64_t w = 0; w < words; w++) sets[w * n + run] = slot && w < s.words ? slot[kName + w] : 0;
    }
    ends[run] = first + i + 1;
  }
  return run + 1;
}

// How the holders in `live` [words] who have all names so far become fewer. levels: [n + 2, 1 + words], a depth and the
// set of who has so many names; some of them lack the next one, or there is none. Returns how many levels.
EXPORT int64_t kvferry_holders_narrow(const Table* t, const uint8_t* names, int64_t n, const uint64_t* live, int64_t words,
                                      uint64_t* levels) {
  uint64_t *level = levels, any = 0;
  for (int64_t w = 0; w < words; w++) any |= level[1 + w] = live[w];
  for (int64_t i = 0; i < n && i < kAhead; i++) ask_for(t, names, i);
  for (int64_t i = 0; i < n && any; i++) {
    if (i + kAhead < n) ask_for(t, names, i + kAhead);
    const Shard& s = t->shards[names[i * sizeof(Name)]];
    Name name = name_at(names, i);
    const uint64_t* slot = s.capacity ? slot_at(s, find(s, name.word)) : nullptr;
    uint64_t *left = level + 1, *next = left + words + 1, fewer = any = 0;
    for (int64_t w = 0; w < words; w++) {
      next[w] = left[w] & (slot && w < s.words ? slot[kName + w] : 0);
      fewer |= next[w] ^ left[w];
      any |= next[w];
    }
    if (!fewer) continue;
    level[0] = (uint64_t)i;
    level += 1 + words;
  }
  level[0] = (uint64_t)n;
  return (level - levels) / (1 + words) + (any != 0);
}

// Takes holders [words, at least as many as any shard has] out of all sets of a shard. Returns how many names it had, or
// -1 when memory was refused.
EXPORT int64_t kvferry_holders_sweep(Table* t, int64_t shard, const uint64_t* gone) {
  Shard* s = &t->shards[shard];
  uint32_t had = s->count, left = 0;
  bool any = false;
  for (uint32_t i = 0; i < s->capacity; i++) {
    const uint64_t* slot = slot_at(*s, i);
    for (uint32_t w = 0; w < s->words; w++) any |= (slot[kName + w] & gone[w]) != 0;
    left += left_of(*s, slot, gone);
  }
  if (any && !rebuild(s, left < kLeast ? 2 * kLeast : left + left / 2, left, s->words, gone)) return -1;
  return had;
}

// The names that a holder holds in a shard; -1: those of all holders. Returns how many; null: only counts.
EXPORT int64_t kvferry_holders_names(const Table* t, int64_t shard, int64_t holder, uint8_t* names) {
  const Shard& s = t->shards[shard];
  int64_t num = 0;
  for (uint32_t i = 0; i < s.capacity; i++) {
    const uint64_t* slot = slot_at(s, i);
    bool held = holder < 0 ? !empty(s, slot) : holder / 64 < s.words && slot[kName + holder / 64] >> holder % 64 & 1;
    if (!held) continue;
    if (names) memcpy(names + num * sizeof(Name), slot, sizeof(Name));
    num++;
  }
  return num;
}
