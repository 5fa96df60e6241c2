// What attention computes with: small matrix products, what they take in the order that they want, and the softmax.
#pragma once
#include "api.h"
#include "vec.h"

namespace {

enum { kGroup = kCols * W };  // keys scored at once
enum { kPair = 2 * W };       // keys, or dimensions, that products and softmax take at least

// Number types inside the products. Units are 32 bits: a float, or a pair of bfloat16 where the machine multiplies them.
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

template <int R, int C>
INLINE void load_sums(vf (&sums)[R][C], const float* out, int64_t ldo) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[r][c] = load<vf>(out + r * ldo + c * W);
}

template <int R, int C>
INLINE void store_sums(const vf (&sums)[R][C], float* out, int64_t ldo) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(out + r * ldo + c * W, sums[r][c]);
}

// out[R, C * W] = a[R, depth] x b[depth, C * W], or is added to, one product after the other; strides in units.
template <class T, int R, int C>
void product_block(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* out, int64_t ldo,
                   int64_t depth, bool add) {
  vf sums[R][C] = {};
  if (add) load_sums(sums, out, ldo);
  for (int64_t k = 0; k < depth; k++) {
    vu bs[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) bs[c] = load<vu>(b + k * ldb + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = Product<T>::add(sums[r][c], a[r * lda + k], bs[c]);
  }
  store_sums(sums, out, ldo);
}

template <class T, int C>
void product_columns(int64_t rows, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* out,
                     int64_t ldo, int64_t depth, bool add) {
  for (; rows >= kRows; rows -= kRows, a += kRows * lda, out += kRows * ldo)
    product_block<T, kRows, C>(a, lda, b, ldb, out, ldo, depth, add);
  switch (rows) {
    case 1: return product_block<T, 1, C>(a, lda, b, ldb, out, ldo, depth, add);
    case 2: return product_block<T, 2, C>(a, lda, b, ldb, out, ldo, depth, add);
    case 3: return product_block<T, 3, C>(a, lda, b, ldb, out, ldo, depth, add);
    case 4: return product_block<T, 4, C>(a, lda, b, ldb, out, ldo, depth, add);
    case 5: return product_block<T, 5, C>(a, lda, b, ldb, out, ldo, depth, add);
  }
}

// columns: a multiple of kPair.
template <class T>
void product(int64_t rows, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t columns, float* out,
             int64_t ldo, int64_t depth, bool add) {
  int64_t done = 0;
  for (; done + kCols * W <= columns; done += kCols * W)
    product_columns<T, kCols>(rows, a, lda, b + done, ldb, out + done, ldo, depth, add);
  for (; done < columns; done += kPair)
    product_columns<T, 2>(rows, a, lda, b + done, ldb, out + done, ldo, depth, add);
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

// Keys, and their values `to_value` bytes behind them.
template <class T>
struct Slots {
  const T* const* keys;
  int64_t count, to_value, bytes;

  const T* value(int64_t i) const { return (const T*)((const char*)keys[i] + to_value); }
  Slots from(int64_t i) const { return {keys + i, count - i, to_value, bytes}; }
};

// Turns up to kGroup keys into `columns` of `[units of a key, kGroup]`; the missing ones are zero. Calls for `later`
// keys.
template <class T>
void pack_keys(Slots<T> slots, uint32_t* to, int64_t columns, int64_t dim, Slots<T> later) {
  int64_t units = dim * (int64_t)sizeof(T) / 4;
  for (int64_t first = 0; first < columns; first += W) {
    for (int64_t i = first; i < first + W && i < later.count; i++) prefetch(later.keys[i], later.bytes);
    for (int64_t u = 0; u < units; u += W) {
      vu v[W];
      for (int i = 0; i < W; i++)
        v[i] = first + i < slots.count ? load<vu>((const uint32_t*)slots.keys[first + i] + u) : (vu){};
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

// 2W dimensions of a unit of values, in the order of load2.
template <class T>
INLINE void pair_values(const T* value, const T* following, vu& a, vu& b) {
  if (Product<T>::kPerUnit == 2) {
    vu next = following ? load<vu>(following) : (vu){}, all = load<vu>(value);
    a = (all & 0xffffu) | (next << 16);
    b = (all >> 16) | (next & 0xffff0000u);
  } else {
    vf low, high;
    load2(value, low, high);
    a = (vu)low;
    b = (vu)high;
  }
}

// A unit of values as a row.
template <class T>
INLINE void pack_value(const T* value, const T* following, uint32_t* to, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kPair) {
    vu a, b;
    pair_values(value + i, following ? following + i : nullptr, a, b);
    store(to + i, a);
    store(to + i + W, b);
  }
}

// The product of R rows of weights, from the unit `skip` on, with C * W dimensions of the values, which for few rows are
// not worth being written down. Calls for `later` ones.
template <class T, int R, int C>
void values_block(const uint32_t* weights, int64_t ldw, Slots<T> slots, int64_t skip, int64_t at, Slots<T> later,
                  float* out, int64_t ldo, bool add) {
  enum { kStep = Product<T>::kPerUnit };
  vf sums[R][C] = {};
  if (add) load_sums(sums, out, ldo);
  for (int64_t t = skip * kStep; t < slots.count; t += kStep) {
    for (int64_t i = t; i < t + kStep && i < later.count; i++) prefetch(later.value(i), later.bytes);
    const T *value = slots.value(t) + at, *following = t + 1 < slots.count ? slots.value(t + 1) + at : nullptr;
    vu bs[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c += 2)
      pair_values(value + c * W, following ? following + c * W : nullptr, bs[c], bs[c + 1]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = Product<T>::add(sums[r][c], weights[r * ldw + t / kStep], bs[c]);
  }
  store_sums(sums, out, ldo);
}

template <class T, int R>
void few_values(const uint32_t* weights, int64_t ldw, Slots<T> slots, int64_t skip, Slots<T> later, float* out,
                int64_t dim, bool add) {
  int64_t at = 0;
  for (; at + kCols * W <= dim; at += kCols * W, later.count = 0)
    values_block<T, R, kCols>(weights, ldw, slots, skip, at, later, out + at, dim, add);
  for (; at < dim; at += kPair, later.count = 0)
    values_block<T, R, 2>(weights, ldw, slots, skip, at, later, out + at, dim, add);
}

// scores = to * tanh(scores * factor), within 2e-7 * to.
INLINE void cap(float* scores, int64_t padded, float factor, float to) {
  for (int64_t t = 0; t < padded; t += W) {
    vf e = exp(load<vf>(scores + t) * (2.0f * factor));
    store(scores + t, to - (2.0f * to) / (e + 1.0f));
  }
}

// Softmax numerators, 2^(scale * (score - largest)), of one row of raw scores, of which those in [begin, end) count; the
// rest up to `padded` becomes 0. Returns the largest score; the numerators' sum is that of the lanes of `*total`.
template <class T>
float weigh(float* scores, uint32_t* weights, int64_t begin, int64_t end, int64_t padded, float scale, vf* total) {
  vf most = splat(-__builtin_inff()), sums = {};
  for (int64_t t = 0; t < begin; t++) scores[t] = -__builtin_inff();
  for (int64_t t = end; t < padded; t++) scores[t] = -__builtin_inff();
  for (int64_t t = 0; t < padded; t += W) most = max(load<vf>(scores + t), most);
  float m = largest(most);
  for (int64_t t = 0; t < padded; t += kPair) {
    vf a = exp2((load<vf>(scores + t) - m) * scale), b = exp2((load<vf>(scores + t + W) - m) * scale);
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
  *total = sums;
  return m;
}

}  // namespace
