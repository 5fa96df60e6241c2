// Rows of a linear's input as 8-bit integers, each with a scale of its own, and what comes out of it scaled back.
#pragma once
#include "api.h"
#include "vec.h"

namespace {

typedef uint8_t vb __attribute__((vector_size(W)));

// x ≈ (out - 128) * scale, where scale is the largest magnitude / 127. A row that is not finite gets a NaN for a scale.
template <class T>
void quantize_rows(void* arg) {
  QuantizeRows* job = (QuantizeRows*)arg;
  int64_t width = job->width;
  for (int64_t first; (first = take(&job->next, job->grain)) < job->rows;) {
    int64_t stop = first + job->grain < job->rows ? first + job->grain : job->rows;
    for (int64_t row = first; row < stop; row++) {
      const T* x = (const T*)job->x + row * width;
      uint8_t* out = job->out + row * width;
      vf most = {}, unsound = {};
      for (int64_t i = 0; i < width; i += W) {
        vf a = load1(x + i);
        most = max(most, (vf)((vu)a & 0x7fffffffu));
        unsound += a - a;
      }
      float largest = 0;
      for (int i = 0; i < W; i++) largest = most[i] > largest ? most[i] : largest;
      float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
      for (int64_t i = 0; i < width; i += W) {
        vf shifted = load1(x + i) * inverse + 12582912.0f;  // rounds to an integer, found in the lowest bits
        store(out + i, __builtin_convertvector((vi)shifted - (0x4b400000 - 128), vb));
      }
      job->scales[row] = largest / 127.0f + sum(unsound);
    }
  }
}

// out = y * the row's scale + bias, if any
template <class T>
void scale_rows(void* arg) {
  ScaleRows* job = (ScaleRows*)arg;
  int64_t width = job->width;
  const T* bias = (const T*)job->bias;
  for (int64_t first; (first = take(&job->next, job->grain)) < job->rows;) {
    int64_t stop = first + job->grain < job->rows ? first + job->grain : job->rows;
    for (int64_t row = first; row < stop; row++) {
      const float* y = job->y + row * width;
      T* out = (T*)job->out + row * width;
      float scale = job->scales[row];
      for (int64_t i = 0; i < width; i += W) {
        vf a = load1(y + i) * scale;
        store1(out + i, bias ? a + load1(bias + i) : a);
      }
    }
  }
}

}  // namespace
