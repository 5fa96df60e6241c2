// Vectors of float32 lanes in the compiler's own notation, and what is loaded into them.
//
// bfloat16 comes in pairs: one 32-bit lane holds two neighbours, and a vector of pairs splits into the even and the odd
// ones by a shift and a mask. Sums do not care for the order, and writing joins them again.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
enum { W = 16, kRows = 6, kCols = 4 };  // lanes; what the registers hold of a small matrix product
#elif defined(__AVX2__)
enum { W = 8, kRows = 4, kCols = 2 };
#elif defined(__aarch64__)
enum { W = 4, kRows = 6, kCols = 4 };
#else
enum { W = 4, kRows = 4, kCols = 2 };
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 {
  uint16_t bits;
};

#define INLINE static inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

template <class V>
INLINE V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
INLINE void store(void* p, V v) {
  memcpy(p, &v, sizeof v);
}

INLINE vf splat(float x) { return x - (vf){}; }
INLINE vu splat(uint32_t x) { return x - (vu){}; }
INLINE float as_float(uint32_t bits) { return load<float>(&bits); }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

// Lanes of a and b by turns: the lower half of each, then the upper half.
INLINE void interleave(vu& a, vu& b) {
#if defined(__AVX512F__)
  vu low = SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  b = SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  vu low = SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  b = SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  vu low = SHUFFLE(a, b, 0, 4, 1, 5);
  b = SHUFFLE(a, b, 2, 6, 3, 7);
#endif
  a = low;
}

// Turns W rows of W lanes into columns.
INLINE void transpose(vu (&v)[W]) {
#pragma GCC unroll 4
  for (int step = 1; step < W; step *= 2) {
    vu t[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; i++) {
      t[2 * i] = v[i];
      t[2 * i + 1] = v[i + W / 2];
      interleave(t[2 * i], t[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) v[i] = t[i];
  }
}

INLINE float sum(vf v) {
  float s = 0;
  for (int i = 0; i < W; i++) s += v[i];
  return s;
}

INLINE vf max(vf a, vf b) { return a > b ? a : b; }

// Of lanes none of which is NaN.
INLINE float largest(vf v) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// bfloat16 bits in the upper half of each lane, rounded to nearest even; NaN stays NaN.
INLINE vu rounded(vf v) {
  vu bits = (vu)v;
  vu up = bits + 0x7fff + ((bits >> 16) & 1);
  return (vu)(v == v ? (vi)up : (vi)(bits | 0x400000));
}

// W elements in order.
INLINE vf load1(const float* p) { return load<vf>(p); }
INLINE vf load1(const bf16* p) { return (vf)(__builtin_convertvector(load<vh>(p), vu) << 16); }
INLINE void store1(float* p, vf v) { store(p, v); }
INLINE void store1(bf16* p, vf v) { store(p, __builtin_convertvector(rounded(v) >> 16, vh)); }

// 2W elements, in the order that is cheapest; store2 undoes it.
INLINE void load2(const float* p, vf& a, vf& b) {
  a = load<vf>(p);
  b = load<vf>(p + W);
}
INLINE void load2(const bf16* p, vf& a, vf& b) {
  vu pairs = load<vu>(p);
  a = (vf)(pairs << 16);
  b = (vf)(pairs & 0xffff0000u);
}
INLINE void store2(float* p, vf a, vf b) {
  store(p, a);
  store(p + W, b);
}
INLINE void store2(bf16* p, vf a, vf b) { store(p, (rounded(a) >> 16) | (rounded(b) & 0xffff0000u)); }

// 2^x of what is at most 127, within 2 units of the last place; exactly 0 below -150; NaN stays NaN.
INLINE vf exp2(vf x) {
#ifdef __AVX512F__
  x = (vf)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // the infinite has no fraction; x if it is NaN
  vf n = (vf)_mm512_roundscale_ps((__m512)x, 0);
#else
  vf shifted = x + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, found in the lowest bits
  vf n = shifted - 12582912.0f;
#endif
  vf r = x - n;
  vf p = 1.3264727e-3f * r + 9.6715130e-3f;
  p = p * r + 5.5507336e-2f;
  p = p * r + 2.4022242e-1f;
  p = p * r + 6.9314700e-1f;
  p = p * r + 1.0f;
#ifdef __AVX512F__
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  vf y = p * (vf)(((vi)shifted << 23) + 0x3f800000);
  return x < splat(-126.0f) ? (vf){} : y;
#endif
}

// e^x within 2 units of the last place; exactly 0 below -87, infinite above 88.37; NaN stays NaN.
INLINE vf exp(vf x) {
  vf shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, found in the lowest bits
  vf n = shifted - 12582912.0f;
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vf y = p * (vf)(((vi)shifted << 23) + 0x3f800000);
  y = x < splat(-87.0f) ? (vf){} : y;
  return x > splat(88.37f) ? splat(__builtin_inff()) : y;
}

}  // namespace
