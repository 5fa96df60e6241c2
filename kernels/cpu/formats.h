// How a key or a value lies in a slot of the cache: the twin of formats.py, which says it in words. int4: see int4.h.
#pragma once
#include "vec.h"

namespace {

enum Format { kFloat32, kBfloat16, kInt8, kInt4, kFp8 };

template <class T>
struct Native;
template <>
struct Native<float> {
  enum { kFormat = kFloat32 };
};
template <>
struct Native<bf16> {
  enum { kFormat = kBfloat16 };
};

typedef int8_t vc __attribute__((vector_size(W)));
typedef uint8_t vuc __attribute__((vector_size(W)));

INLINE float load_bf16(const uint8_t* p) { return as_float((uint32_t)load<uint16_t>(p) << 16); }

// e4m3 without an infinity; all bits set but the sign is NaN.
INLINE vf from_fp8(vu x) {
  vu magnitude = x & 127;
  vf normal = (vf)((magnitude << 20) + (120u << 23)), small = __builtin_convertvector((vi)magnitude, vf) * 0x1p-9f;
  vu bits = (vi)magnitude < 8 ? (vu)small : (vu)normal;
  bits = (vi)magnitude == 127 ? splat(0x7fc00000u) : bits;
  return (vf)(bits | ((x & 128) << 24));
}

template <class T>
INLINE void unpack_slot(int64_t format, const uint8_t* slot, T* out, int64_t dim) {
  switch (format) {
    case kFloat32:
      for (int64_t i = 0; i < dim; i += W) store1(out + i, load<vf>(slot + i * 4));
      return;
    case kBfloat16:
      for (int64_t i = 0; i < dim; i += W) store1(out + i, load1((const bf16*)slot + i));
      return;
    case kInt8: {
      float scale = load_bf16(slot + dim);
      for (int64_t i = 0; i < dim; i += W)
        store1(out + i, __builtin_convertvector(__builtin_convertvector(load<vc>(slot + i), vi), vf) * scale);
      return;
    }
    case kFp8:
      for (int64_t i = 0; i < dim; i += W)
        store1(out + i, from_fp8(__builtin_convertvector(load<vuc>(slot + i), vu)));
  }
}

// The smallest bfloat16 that is not below; NaN stays NaN.
INLINE uint16_t up(float x) {
  uint32_t bits = load<uint32_t>(&x);
  if (x != x) return (uint16_t)(bits >> 16) | 0x40;
  return (uint16_t)(bits >> 16) + (x > 0 && (bits & 0xffff) ? 1 : 0);
}

INLINE float widened(uint16_t bits) { return as_float((uint32_t)bits << 16); }

INLINE uint32_t rounded_integer(float x) {  // to nearest even; for -2^22 … 2^22
  float shifted = x + 12582912.0f;
  return load<uint32_t>(&shifted);
}

INLINE void pack_int8(const float* x, uint8_t* slot, int64_t dim) {
  float most = 0;
  for (int64_t i = 0; i < dim; i++) {
    float a = __builtin_fabsf(x[i]);
    most = a > most || a != a ? a : most;  // once NaN, it stays
  }
  uint16_t scale = up(most / 127.0f);
  float divisor = scale ? widened(scale) : 1.0f;
  for (int64_t i = 0; i < dim; i++) slot[i] = (uint8_t)rounded_integer(x[i] / divisor);
  store(slot + dim, scale);
}

INLINE uint8_t to_fp8(float x) {
  uint32_t bits = load<uint32_t>(&x), sign = bits >> 24 & 128;
  float a = __builtin_fabsf(x);
  if (x != x) return 127;
  if (a > 448.0f) a = 448.0f;
  float shifted = a + 16384.0f;  // whose last digit is 2^-9
  uint32_t small = load<uint32_t>(&shifted) - 0x46800000u, b = load<uint32_t>(&a);
  uint32_t normal = ((b + 0x7ffff + (b >> 20 & 1)) >> 20) - (120 << 3);
  return (uint8_t)((a < 0x1p-6f ? small : normal) | sign);
}

INLINE void pack_slot(int64_t format, const float* x, uint8_t* slot, int64_t dim) {
  switch (format) {
    case kFloat32: memcpy(slot, x, dim * sizeof(float)); return;
    case kBfloat16:
      for (int64_t i = 0; i < dim; i += W) store1((bf16*)slot + i, load1(x + i));
      return;
    case kInt8: return pack_int8(x, slot, dim);
    case kFp8:
      for (int64_t i = 0; i < dim; i++) slot[i] = to_fp8(x[i]);
  }
}

}  // namespace
