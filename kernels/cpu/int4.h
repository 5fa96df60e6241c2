// int4: a key and its value in two slots, see formats.py.
#pragma once
#include "formats.h"

namespace {

// Levels n in 0 ... kCount - 1 lie at t (kBend + t^2): whole numbers, which floats hold exactly; kTop is the largest.
struct KeyLevels {
  enum { kCount = 32, kBend = 2400, kFirst = 31, kStep = 2 };  // t = kStep n - kFirst
};
struct ValueLevels {
  enum { kCount = 11, kBend = 60, kFirst = 5, kStep = 1 };
};

template <class L>
constexpr float level_at(int t) {
  return (float)(t * (L::kBend + t * t));
}

// A byte's number, for levels in whole numbers; all bits set is NaN.
template <class L>
INLINE float level_scale(uint8_t byte) {
  float value = byte < 8 ? byte * 0x1p-17f : as_float(((uint32_t)byte << 20) + (112u << 23));
  return (byte == 255 ? __builtin_nanf("") : value) * (1.0f / level_at<L>(L::kFirst));
}

INLINE uint8_t to_scale_byte(float x) {  // of x >= 0: the nearest there is
  if (!(x < __builtin_inff())) return 255;
  float shifted = x + 64.0f;  // whose last digit is 2^-17
  uint32_t small = load<uint32_t>(&shifted) - 0x42800000u, b = load<uint32_t>(&x);
  uint32_t byte = x < 0x1p-14f ? small : ((b + 0x7ffff + (b >> 20 & 1)) >> 20) - (112 << 3);
  return (uint8_t)(byte < 254 ? byte : 254);
}

template <class L>
INLINE vf read_levels(vu n, float scale) {
  vf t = __builtin_convertvector((vi)n * (int)L::kStep - (int)L::kFirst, vf);
  return t * (t * t + (float)L::kBend) * scale;
}

// Bytes of a slot behind its scale.
INLINE int64_t more_bytes(int64_t dim) { return (dim + 31) / 32; }

// 16 in each lane whose bit is set, of the W bits from `first` on; first: a multiple of W. They begin in one slot and go on in the other.
INLINE vu fifth_bits(const uint8_t* key, const uint8_t* value, int64_t bytes, int64_t first) {
  int64_t at = first / 8;
  uint32_t bits = at < bytes ? key[at] : value[at - bytes];
  if (W > 8) bits |= (uint32_t)(at + 1 < bytes ? key[at + 1] : value[at + 1 - bytes]) << 8;
  if (W < 8) bits >>= first % 8;
  vu lane;
  for (int i = 0; i < W; i++) lane[i] = 1u << i;
  return (vu)((splat(bits) & lane) != 0) & 16;
}

template <class T>
INLINE void unpack_int4_key(const uint8_t* key, const uint8_t* value, T* out, int64_t dim) {
  int64_t half = dim / 2;
  float scale = level_scale<KeyLevels>(key[half]);
  for (int64_t i = 0; i < half; i += W) {
    vu pairs = __builtin_convertvector(load<vuc>(key + i), vu), tops = __builtin_convertvector(load<vuc>(value + i), vu);
    vu fifth = fifth_bits(key + half + 1, value + half + 1, more_bytes(dim), i);
    store1(out + i, read_levels<KeyLevels>((pairs & 15) | (tops >> 7 << 4), scale));
    store1(out + half + i, read_levels<KeyLevels>(pairs >> 4 | fifth, scale));
  }
}

template <class T>
INLINE void unpack_int4_value(const uint8_t* value, T* out, int64_t dim) {
  int64_t half = dim / 2;
  float scale = level_scale<ValueLevels>(value[half]);
  for (int64_t i = 0; i < half; i += W) {
    vh pairs = __builtin_convertvector(load<vuc>(value + i) & 127, vh), high = pairs * 187 >> 11;  // pairs / 11
    vh low = pairs - high * (uint16_t)ValueLevels::kCount;
    store1(out + i, read_levels<ValueLevels>(__builtin_convertvector(low, vu), scale));
    store1(out + half + i, read_levels<ValueLevels>(__builtin_convertvector(high, vu), scale));
  }
}

// Levels of x, in units of `scale`; returns the sum of squared errors.
template <class L>
INLINE float to_levels(const float* x, float scale, int32_t* n, int64_t dim) {
  enum { kLow = (L::kCount - 1) / 2, kHigh = L::kCount / 2 };  // the two that are nearest to 0, or the one
  float divisor = scale != 0 ? scale : 1.0f;
  vf errors = {};
  for (int64_t i = 0; i < dim; i += W) {
    vf v = load<vf>(x + i), z = v / divisor, magnitude = z < 0 ? -z : z;
    vi away = {};
#pragma GCC unroll 16
    for (int j = 0; j < kLow; j++) {
      int t = (j + kHigh) * L::kStep - L::kFirst;
      away -= magnitude > (level_at<L>(t) + level_at<L>(t + L::kStep)) / 2;
    }
    vi level = z < 0 ? (int)kLow - away : (int)kHigh + away;
    store(n + i, level);
    vf error = read_levels<L>((vu)level, scale) - v;
    errors += error * error;
  }
  return sum(errors);
}

INLINE float largest(const float* x, int64_t dim) {
  float most = 0;
  for (int64_t i = 0; i < dim; i++) {
    float a = __builtin_fabsf(x[i]);
    most = a > most || a != a ? a : most;  // once NaN, it stays
  }
  return most;
}

// levels: [2, dim], to work in.
INLINE void pack_int4(const float* k, const float* v, uint8_t* key, uint8_t* value, int32_t* levels, int64_t dim) {
  static const float tries[] = {1.0f, 0.9f, 0.8f};
  int64_t half = dim / 2, more = more_bytes(dim);
  int32_t *of_key = levels, *of_value = levels + dim;
  key[half] = to_scale_byte(largest(k, dim));
  to_levels<KeyLevels>(k, level_scale<KeyLevels>(key[half]), of_key, dim);
  float most = largest(v, dim), least = 0, error = 0;
  for (float part : tries) {
    uint8_t byte = to_scale_byte(most * part);
    error = to_levels<ValueLevels>(v, level_scale<ValueLevels>(byte), of_value, dim);
    if (part == 1.0f || error < least) {
      least = error;
      value[half] = byte;
    }
  }
  if (error != least) to_levels<ValueLevels>(v, level_scale<ValueLevels>(value[half]), of_value, dim);
  memset(key + half + 1, 0, more);
  memset(value + half + 1, 0, more);
  for (int64_t i = 0; i < half; i++) {
    key[i] = (uint8_t)((of_key[i] & 15) | of_key[half + i] << 4);
    value[i] = (uint8_t)(of_value[i] + ValueLevels::kCount * of_value[half + i] + (of_key[i] >> 4 << 7));
    uint8_t* fifth = i / 8 < more ? key + half + 1 + i / 8 : value + half + 1 + i / 8 - more;
    *fifth |= of_key[half + i] >> 4 << i % 8;
  }
}

// Multiplied with a Hadamard matrix, block by block: of the largest power of two that divides dim.
INLINE void turn(float* x, int64_t dim) {
  int64_t size = dim & -dim;
  for (int64_t h = 1; h < size; h *= 2)
    for (int64_t i = 0; i < dim; i += 2 * h)
      for (int64_t j = i; j < i + h; j++) {
        float a = x[j], b = x[j + h];
        x[j] = a + b;
        x[j + h] = a - b;
      }
  float factor = 1.0f / __builtin_sqrtf((float)size);
  for (int64_t i = 0; i < dim; i++) x[i] *= factor;
}

}  // namespace
