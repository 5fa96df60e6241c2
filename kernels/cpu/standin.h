// A plain linear, until the packed one is here.
#pragma once
#include "api.h"
#include "vec.h"

namespace {

template <class T>
void linear_rows(void* arg) {
  LinearRows* job = (LinearRows*)arg;
  const int64_t kGrain = 16;
  for (int64_t first; (first = take(&job->next, kGrain)) < job->width;) {
    int64_t stop = first + kGrain < job->width ? first + kGrain : job->width;
    for (int64_t row = 0; row < job->rows; row++) {
      const T* x = (const T*)job->x + row * job->in;
      for (int64_t o = first; o < stop; o++) {
        const T* w = (const T*)job->weight + o * job->in;
        vf sa = {}, sb = {}, a, b, wa, wb;
        for (int64_t i = 0; i < job->in; i += 2 * W) {
          load2(x + i, a, b);
          load2(w + i, wa, wb);
          sa += a * wa;
          sb += b * wb;
        }
        float bias = 0, y = sum(sa + sb);
        if (job->bias) {
          const T* at = (const T*)job->bias + o;
          bias = sizeof(T) == 4 ? load<float>(at) : as_float((uint32_t)load<uint16_t>(at) << 16);
        }
        vf v = splat(y + bias);
        T tmp[W];
        store1(tmp, v);
        ((T*)job->out)[row * job->width + o] = tmp[0];
      }
    }
  }
}

}  // namespace
