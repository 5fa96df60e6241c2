// Rows of a linear's input as integers of 8 bits, in units of 32 bits; how many a row takes: `row_units` in api.h.
//
// int8: a row's scale (float32), then unsigned bytes: x ≈ (byte - 128) * scale, where scale is the largest magnitude / 127.
// kFineBytes has two such rows for each, the second of what the first leaves.
// int4: each group of kGroupInputs is its scale, the sum of its integers times the scale, then its signed bytes.
// What is not finite gives a scale that is NaN.
#pragma once
#include "api.h"
#include "vec.h"

namespace {

typedef uint8_t vb __attribute__((vector_size(W)));

INLINE vi nearest(vf x) { return (vi)(x + 12582912.0f) - 0x4b400000; }  // to even, for -2^22 … 2^22

INLINE float largest_of(vf v) {
  float most = 0;
  for (int i = 0; i < W; i++) most = v[i] > most ? v[i] : most;
  return most;
}

INLINE float inverse_of(float largest) { return largest > 1e-30f ? 127.0f / largest : 0.0f; }

// For each vector of a row: what(position, numbers), the last filled up with zeros.
template <class T, class F>
INLINE void each_vector(const T* x, int64_t width, F what) {
  int64_t i = 0;
  for (; i + W <= width; i += W) what(i, load1(x + i));
  if (i == width) return;
  T rest[W] = {};
  memcpy(rest, x + i, (width - i) * sizeof(T));
  what(i, load1(rest));
}

template <class T, int kParts>
INLINE void quantize_row(const T* x, uint32_t* out, int64_t width, int64_t units) {
  vf most = {}, unsound = {};
  each_vector(x, width, [&](int64_t, vf a) INLINE_LAMBDA {
    most = max(most, (vf)((vu)a & 0x7fffffffu));
    unsound += a - a;
  });
  float largest = largest_of(most), inverse = inverse_of(largest), scale = largest / 127.0f;
  float broken = sum(unsound), fine = scale / 254.0f, per_fine = inverse * 254.0f;
  float scales[] = {scale + broken, fine + broken};
  uint8_t *coarse_bytes = (uint8_t*)(out + 1), *fine_bytes = (uint8_t*)(out + units + 1), last[2][W];
  int64_t whole = width / W * W, tail = (units - 1) * 4 - whole;
  each_vector(x, width, [&](int64_t i, vf a) INLINE_LAMBDA {
    vi steps = nearest(a * inverse);
    store(i < whole ? coarse_bytes + i : last[0], __builtin_convertvector(steps + 128, vb));
    if (kParts == 2) {
      vf rest = a - __builtin_convertvector(steps, vf) * scale;
      store(i < whole ? fine_bytes + i : last[1], __builtin_convertvector(nearest(rest * per_fine) + 128, vb));
    }
  });
  for (int part = 0; part < kParts; part++) {
    memcpy(out + part * units, &scales[part], sizeof(float));
    memcpy((part ? fine_bytes : coarse_bytes) + whole, last[part], tail);
  }
}

template <class T>
INLINE void quantize_groups(const T* x, uint32_t* out, int64_t width) {
  for (int64_t first = 0; first < width; first += kGroupInputs, out += kGroupUnits) {
    vf most = {}, unsound = {}, steps = {};
    for (int64_t i = first; i < first + kGroupInputs; i += W) {
      vf a = load1(x + i);
      most = max(most, (vf)((vu)a & 0x7fffffffu));
      unsound += a - a;
    }
    float largest = largest_of(most), inverse = inverse_of(largest);
    for (int64_t i = 0; i < kGroupInputs; i += W) {
      vi n = nearest(load1(x + first + i) * inverse);
      steps += __builtin_convertvector(n, vf);
      store((uint8_t*)(out + 2) + i, __builtin_convertvector(n, vb));
    }
    float heads[2] = {largest / 127.0f + sum(unsound)};
    heads[1] = heads[0] * sum(steps);
    memcpy(out, heads, sizeof heads);
  }
}

template <class T, int kForm>
void quantize(void* arg) {
  QuantizeRows* job = (QuantizeRows*)arg;
  int64_t units = row_units(kForm, job->width), each = kForm == kFineBytes ? 2 * units : units;
  for (int64_t first; (first = take(&job->next, job->grain)) < job->rows;) {
    int64_t stop = first + job->grain < job->rows ? first + job->grain : job->rows;
    for (int64_t row = first; row < stop; row++) {
      const T* x = (const T*)job->x + row * job->x_stride;
      uint32_t* out = job->out + row * each;
      if (kForm == kNibbles) {
        quantize_groups(x, out, job->width);
      } else {
        quantize_row<T, kForm == kFineBytes ? 2 : 1>(x, out, job->width, units);
      }
    }
  }
}

}  // namespace
