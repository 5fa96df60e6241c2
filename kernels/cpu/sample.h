// Draws a token for each row: temperature, min_p, top_k, top_p, then a race of noisy sums. A thread takes whole rows.
//
// What is to be computed stands in runtime/model/sampler.py, which does the same with torch where there are no kernels.
#pragma once
#include <math.h>

#include "api.h"
#include "small.h"
#include "vec.h"

namespace {

enum { kBuckets = 2048 };

// Philox 4x32-10. Source: Salmon et al. 2011.
inline void philox(uint32_t (&c)[4], uint64_t seed) {
  uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++, low += 0x9E3779B9u, high += 0xBB67AE85u) {
    uint64_t first = (uint64_t)c[0] * 0xD2511F53u, second = (uint64_t)c[2] * 0xCD9E8D57u;
    c[0] = (uint32_t)(second >> 32) ^ c[1] ^ low;
    c[1] = (uint32_t)second;
    c[2] = (uint32_t)(first >> 32) ^ c[3] ^ high;
    c[3] = (uint32_t)first;
  }
}

// The number of `philox.gumbel`.
inline double gumbel(const DrawRow& row, int64_t item, int kind) {
  uint32_t words[4] = {row.position, row.sequence, (uint32_t)item, (uint32_t)kind};
  philox(words, row.seed);
  uint64_t bits = ((uint64_t)words[0] << 32 | words[1]) >> 12;
  return -::log(-::log((double)bits * 0x1p-52 + 0x1p-53));
}

// The first of the largest of log(weights) + noise; items are numbered from `first`.
template <class Weight>
int64_t race(const DrawRow& row, const Weight* weights, int64_t count, int64_t first, int kind) {
  int64_t winner = 0;
  double most = -__builtin_inf();
  for (int64_t i = 0; i < count; i++) {
    if (!(weights[i] > 0)) continue;
    double noisy = ::log((double)weights[i]) + gumbel(row, first + i, kind);
    if (noisy > most) {
      most = noisy;
      winner = i;
    }
  }
  return first + winner;
}

// Of keys of 31 bits: the least one up to which they together weigh `goal`, or the last that weighs anything.
struct Border {
  uint32_t key;
  double before;  // what keys below it weigh
};

template <class Key, class Mass>
Border find_border(const float* x, int64_t width, double goal, Key key, Mass mass) {
  Border border = {0, 0};
  const int shifts[] = {20, 10, 0}, bits[] = {11, 10, 10};
  for (int level = 0; level < 3; level++) {
    double masses[kBuckets] = {};
    uint32_t mask = (1u << bits[level]) - 1;
    for (int64_t i = 0; i < width; i++) {
      uint32_t k = key(x[i]) >> shifts[level];
      if (k >> bits[level] == border.key) masses[k & mask] += mass(x[i]);
    }
    int64_t found = -1;
    for (int64_t bucket = 0; bucket <= mask; bucket++) {
      if (!(masses[bucket] > 0)) continue;
      if (found >= 0) border.before += masses[found];
      found = bucket;
      if (border.before + masses[bucket] >= goal) break;
    }
    border.key = border.key << bits[level] | (uint32_t)(found < 0 ? 0 : found);
  }
  return border;
}

inline uint32_t float_bits(float x) { return load<uint32_t>(&x); }

// Copies what is not less; returns how many.
inline int64_t choose_from(const float* x, int64_t width, float least, float* candidates) {
  int64_t count = 0;
  for (int64_t i = 0; i < width; i++) {
    candidates[count] = x[i];
    count += x[i] >= least;
  }
  return count;
}

// x: 0 or less. Leaves the k largest, with all that equal the last of them. candidates: room for all.
inline void keep_largest(float* x, float* candidates, int64_t width, int64_t k) {
  auto key = [](float v) { return float_bits(v) & 0x7fffffffu; };
  int64_t count = choose_from(x, width, -__FLT_MAX__, candidates);
  uint32_t last = find_border(candidates, count, (double)k, key, [](float) { return 1.0; }).key;
  for (int64_t i = 0; i < width; i++) x[i] = key(x[i]) > last ? -__builtin_inff() : x[i];
}

// Weights from 0 to 1. Leaves the fewest that together reach `share` of all; of equal ones the first. What all together
// cannot weigh more than the rest is not looked at; half of it leaves room for rounding.
inline void keep_nucleus(float* weights, float* candidates, int64_t width, double share) {
  auto key = [](float v) { return 0x3f800000u - float_bits(v); };
  double total = 0;
  for (int64_t i = 0; i < width; i++) total += weights[i];
  float least = (float)(0.5 * (1 - share) * total / (double)width);
  int64_t count = choose_from(weights, width, least, candidates);
  Border border = find_border(candidates, count, share * total, key, [](float v) { return (double)v; });
  double reached = border.before;
  for (int64_t i = 0; i < width; i++) {
    uint32_t k = key(weights[i]);
    if (k < border.key) continue;
    if (k > border.key || (reached >= share * total && reached > border.before)) {
      weights[i] = 0;
    } else {
      reached += weights[i];
    }
  }
}

// e^((x - largest) / temperature), filtered; zeros behind the last up to `padded`. candidates: room for a row.
template <class T>
void weigh(const DrawRow& row, const T* x, float* weights, float* candidates, int64_t width, int64_t padded) {
  vf most = splat(-__builtin_inff());
  int64_t whole = width / W * W;
  for (int64_t i = 0; i < whole; i += W) most = max(load1(x + i), most);
  float top = -__builtin_inff();
  for (int l = 0; l < W; l++) top = most[l] > top ? most[l] : top;
  for (int64_t i = whole; i < width; i++) top = value(x[i]) > top ? value(x[i]) : top;
  float least = row.min_p > 0 ? (float)::log(row.min_p) : -__builtin_inff();
  for (int64_t i = 0; i < padded; i += W) {
    vf v = splat(-__builtin_inff());
    if (i < whole) {
      v = load1(x + i);
    } else {
      for (int64_t l = 0; i + l < width && l < W; l++) v[l] = value(x[i + l]);
    }
    v = (v - top) / row.temperature;
    store(weights + i, v < splat(least) ? splat(-__builtin_inff()) : v);
  }
  if (row.top_k > 0 && row.top_k < width) keep_largest(weights, candidates, width, row.top_k);
  for (int64_t i = 0; i < padded; i += W) store(weights + i, exp(load<vf>(weights + i)));
  if (row.top_p < 1) keep_nucleus(weights, candidates, width, row.top_p);
}

// Runs of runs compete first, then runs within the winner, then its tokens. sums: room for a number per run.
inline int64_t draw_one(const DrawRow& row, const float* weights, int64_t padded, double* sums) {
  int64_t runs = padded / kRace, groups = runs / kRace;
  double* of_groups = sums + runs;
  for (int64_t run = 0; run < runs; run++) {
    double sum = 0;
    for (int64_t i = 0; i < kRace; i++) sum += weights[run * kRace + i];
    sums[run] = sum;
  }
  for (int64_t group = 0; group < groups; group++) {
    of_groups[group] = 0;
    for (int64_t i = 0; i < kRace; i++) of_groups[group] += sums[group * kRace + i];
  }
  int64_t group = race(row, of_groups, groups, 0, 0);
  int64_t run = race(row, sums + group * kRace, kRace, group * kRace, 1);
  return race(row, weights + run * kRace, kRace, run * kRace, 2);
}

template <class T>
void draw(void* arg) {
  Draw* job = (Draw*)arg;
  uint8_t* scratch = job->scratch + take(&job->joined, 1) * job->scratch_bytes;
  float *weights = (float*)scratch, *candidates = weights + job->padded;
  double* sums = (double*)(candidates + job->padded);
  for (int64_t i; (i = take(&job->next, 1)) < job->num_draws;) {
    const DrawRow& row = job->draws[i];
    weigh(row, (const T*)job->x + row.row * job->width, weights, candidates, job->width, job->padded);
    job->ids[i] = draw_one(row, weights, job->padded, sums);
  }
}

}  // namespace
