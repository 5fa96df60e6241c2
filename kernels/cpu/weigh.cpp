// Where a request costs least: each group's costs, and the cheapest of them. Twin: cluster/costs.py, which explains them.
// Both round alike: build.py keeps the compiler from fusing products with sums.
#include <math.h>
#include <stdint.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum : int64_t { kPrefills = 1, kDecodes = 2, kNobody = -1 };

// As `Rows` of cluster/prices.py writes it; the last three are a call's own.
struct Group {
  double queue_s, token_s, step_s, join_s, block_s;
  int64_t max_held, beside_held, beside_bytes, block_bytes, roles, holder, picked, rank;
  double whole_s, first_s, second_s;
};

// As cluster/native_costs.py writes it. There follow the levels, deepest first: a depth, and the set of those who have
// so many blocks in `words` words; then, if `masked`, a byte for each group: whether it may be chosen.
struct Request {
  int64_t num_groups, num_levels, words, masked, anywhere;
  int64_t num_tokens, size, num_blocks, usable, most_fetched;
  double num_sequences, num_steps, least_gain_s, latency_s, grain_s;
};

struct Found {
  double whole_s, first_s, second_s;
  int64_t whole, first, second;
};

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t depth_of(const Request& r, int64_t holder) {
  const uint64_t* level = (const uint64_t*)(&r + 1);
  if (holder < 0 || holder >= 64 * r.words) return 0;
  for (int64_t i = 0; i < r.num_levels; i++, level += 1 + r.words)
    if (level[1 + holder / 64] >> holder % 64 & 1) return (int64_t)level[0];
  return 0;
}

double ferry_s(const Group& g, int64_t num_blocks) {
  double num_sent = (double)least(num_blocks, g.max_held);
  if (g.beside_held) num_sent += (double)(least(num_blocks, g.beside_held) * g.beside_bytes) / (double)g.block_bytes;
  return num_sent * g.block_s;
}

double first_s(const Request& r, const Group& g, int64_t num_hits) {
  num_hits = least(num_hits, r.usable);
  double computed_s = g.queue_s + (double)(r.num_tokens - num_hits * r.size) * g.token_s;
  if (num_hits >= r.most_fetched) return computed_s;
  double fetch_s = r.latency_s + ferry_s(g, r.most_fetched - num_hits);
  double fetched_s = fmax(fetch_s, g.queue_s) + (double)(r.num_tokens - r.most_fetched * r.size) * g.token_s;
  return computed_s - fetched_s > r.least_gain_s ? fetched_s : computed_s;
}

void weigh(const Request& r, Group& g, bool open) {
  g.whole_s = g.first_s = g.second_s = INFINITY;
  if (!open) return;
  int64_t num_hits = depth_of(r, g.holder);
  double decode_s = r.num_steps * (g.step_s + r.num_sequences * g.join_s);
  double prefill_s = first_s(r, g, num_hits);
  if (g.roles & kPrefills) g.first_s = prefill_s;
  if (g.roles & kDecodes || r.anywhere) g.whole_s = prefill_s + decode_s;
  if (g.roles & kDecodes && num_hits < r.num_blocks)
    g.second_s = r.latency_s + ferry_s(g, r.num_blocks - num_hits) + decode_s;
}

// The cheapest besides `but`; among ties who was chosen least recently.
int64_t cheapest(const Request& r, const Group* groups, double Group::*cost, int64_t but) {
  double least_s = INFINITY;
  for (int64_t i = 0; i < r.num_groups; i++)
    if (i != but && groups[i].*cost < least_s) least_s = groups[i].*cost;
  if (least_s == INFINITY) return kNobody;
  int64_t best = kNobody;
  for (int64_t i = 0; i < r.num_groups; i++) {
    const Group &g = groups[i], &b = groups[best < 0 ? i : best];
    if (i == but || g.*cost > least_s + r.grain_s) continue;
    if (best < 0 || g.picked < b.picked || (g.picked == b.picked && g.rank < b.rank)) best = i;
  }
  return best;
}

}  // namespace

// groups: [num_groups]. In `found`, kNobody: nobody can.
EXPORT void kvferry_weigh(Group* groups, const Request* request, Found* found) {
  const Request& r = *request;
  const uint8_t* open = (const uint8_t*)((const uint64_t*)(request + 1) + r.num_levels * (1 + r.words));
  for (int64_t i = 0; i < r.num_groups; i++) weigh(r, groups[i], !r.masked || open[i]);
  int64_t whole = cheapest(r, groups, &Group::whole_s, kNobody);
  int64_t first = cheapest(r, groups, &Group::first_s, kNobody);
  int64_t second = cheapest(r, groups, &Group::second_s, kNobody);
  if (first == second && first != kNobody) {  // one of the two goes elsewhere
    int64_t first2 = cheapest(r, groups, &Group::first_s, first), second2 = cheapest(r, groups, &Group::second_s, second);
    double stays_s = first2 < 0 ? INFINITY : groups[first2].first_s + groups[second].second_s;
    double goes_s = second2 < 0 ? INFINITY : groups[first].first_s + groups[second2].second_s;
    bool stays = stays_s < goes_s || (stays_s == goes_s && first2 < first);
    if (stays) first = first2;
    else second = second2;
  }
  bool apart = first >= 0 && second >= 0;
  *found = {whole < 0 ? 0 : groups[whole].whole_s, apart ? groups[first].first_s : 0,
            apart ? groups[second].second_s : 0, whole, apart ? first : kNobody, apart ? second : kNobody};
}
