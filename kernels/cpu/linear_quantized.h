// Linear maps whose weights have 8 or 4 bits, of rows that `quantize.h` made integers.
//
// int8: an output's units are its scale, -128 times the sum of its integers, then four signed bytes each.
// int4: each group of kGroupInputs is a unit with its scale (lower half, bfloat16) and its middle (upper half), then
// units of eight inputs each: byte i holds input i and, in its upper half, input i + 4, both 0 … 15 for -8 … 7 scales
// off the middle.
#pragma once
#include "linear.h"
#include "quantize.h"

namespace {

#if defined(__SSE2__)
typedef int16_t vs __attribute__((vector_size(W * 4)));

INLINE vi products16(vs a, vs b) {  // sums of neighbours
#if defined(__AVX512BW__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
#endif

// sum + the products of four unsigned bytes with four signed ones
INLINE vi dot4(vi sum, vu a, vu b) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__SSE2__)
  sum += products16((vs)(a & 0x00ff00ffu), (vs)b << 8 >> 8);
  return sum + products16((vs)(a >> 8 & 0x00ff00ffu), (vs)b >> 8);
#else
  vi u = (vi)a, s = (vi)b;
  sum += (u & 255) * (s << 24 >> 24) + (u >> 8 & 255) * (s << 16 >> 24);
  return sum + (u >> 16 & 255) * (s << 8 >> 24) + (vi)(a >> 24) * (s >> 24);
#endif
}

INLINE vf as_floats(vi v) { return __builtin_convertvector(v, vf); }

struct Dot4 {
  typedef vi Sum;
  INLINE vi add(vi sum, vu a, vu b) { return dot4(sum, a, b); }
};

// kParts: rows of integers for each row of the result.
template <class T, int kParts>
struct Bytes {
  enum { kRows = kTall / kParts, kStretchUnits = kStretch };
  static int64_t units(int64_t in) { return 2 + (in + 3) / 4; }

  template <int R>
  static void strip(const LinearRows& job, int64_t row, int64_t output, Strip strip) {
    const uint32_t* x = (const uint32_t*)job.x + row * kParts * job.x_stride;
    const uint32_t* w = strip.weight;
    vi sums[R * kParts][2];
#pragma GCC unroll 12
    for (int r = 0; r < R * kParts; r++) {
      sums[r][0] = load<vi>(w + kPanel);
      sums[r][1] = load<vi>(w + kPanel + W);
    }
    strip.weight += 2 * kPanel;
    strip.units -= 2;
    multiply<Dot4, R * kParts>(x + 1, job.x_stride, strip, sums);
    vf results[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const uint32_t* scales = x + r * kParts * job.x_stride;
      for (int c = 0; c < 2; c++) {
        vf y = as_floats(sums[r * kParts][c]) * splat(as_float(scales[0]));
        if (kParts == 2) y += as_floats(sums[r * kParts + 1][c]) * splat(as_float(scales[job.x_stride]));
        results[r][c] = y * load<vf>(w + c * W);
      }
    }
    write_strip<T, R>(job, row, output, results);
  }
};

template <class T>
struct Nibbles {
  enum { kRows = 2 * kTall / 3, kStretchUnits = 1 + kGroupInputs / 8 };  // a group's weights take registers, too
  static int64_t units(int64_t in) { return in / kGroupInputs * kStretchUnits; }

  template <int R>
  static void strip(const LinearRows& job, int64_t row, int64_t output, Strip strip) {
    vf sums[R][2] = {};
    const uint32_t *x = (const uint32_t*)job.x + row * job.x_stride, *group = strip.weight;
    for (int64_t left = strip.units; left > 0; left -= kStretchUnits) {
      strip.prefetch();
      add_group<R>(x, job.x_stride, group, sums, 0);
      asm volatile("" ::: "memory");  // the compiler would keep the units of x, for which there are no registers
      add_group<R>(x, job.x_stride, group + W, sums, 1);
      x += kGroupUnits;
      group += kStretchUnits * kPanel;
    }
    write_strip<T, R>(job, row, output, sums);
  }

  template <int R>
  INLINE void add_group(const uint32_t* x, int64_t stride, const uint32_t* w, vf (&sums)[R][2], int c) {
    enum { kUnits = kGroupInputs / 4 };
    vu head = load<vu>(w), steps[kUnits];
    vf scale = (vf)(head << 16), least = (vf)(head & 0xffff0000u) - 8.0f * scale;
#pragma GCC unroll 4
    for (int u = 0; u < kUnits / 2; u++) {
      vu both = load<vu>(w + (1 + u) * kPanel);
      steps[2 * u] = both & 0x0f0f0f0fu;
      steps[2 * u + 1] = both >> 4 & 0x0f0f0f0fu;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const uint32_t* of_row = x + r * stride;
      vi dots = {};
#pragma GCC unroll 8
      for (int u = 0; u < kUnits; u++) dots = dot4(dots, steps[u], splat(of_row[2 + u]));
      sums[r][c] += as_floats(dots) * (scale * splat(as_float(of_row[0])));
      sums[r][c] += least * splat(as_float(of_row[1]));
    }
  }
};

template <class T, int kParts>
void linear_bytes(void* arg) {
  linear_of<Bytes<T, kParts>>((LinearRows*)arg);
}

template <class T>
void linear_nibbles(void* arg) {
  linear_of<Nibbles<T>>((LinearRows*)arg);
}

}  // namespace
