// The small operations between linears. Each row is computed in one fixed order, whoever computes it.
#pragma once
#include "api.h"
#include "formats.h"
#include "vec.h"

namespace {

template <class T>
void normalise(const T* x, const T* weight, T* out, int64_t width, float eps) {
  vf squares_a = {}, squares_b = {}, a, b, wa, wb;
  for (int64_t i = 0; i < width; i += 2 * W) {
    load2(x + i, a, b);
    squares_a += a * a;
    squares_b += b * b;
  }
  float scale = 1.0f / __builtin_sqrtf(sum(squares_a + squares_b) / (float)width + eps);
  for (int64_t i = 0; i < width; i += 2 * W) {
    load2(x + i, a, b);
    load2(weight + i, wa, wb);
    store2(out + i, a * scale * wa, b * scale * wb);
  }
}

template <class T>
void add_norm(void* arg) {
  AddNorm* job = (AddNorm*)arg;
  const T* weight = (const T*)job->weight;
  for (int64_t first; (first = take(&job->next, job->grain)) < job->rows;) {
    int64_t stop = first + job->grain < job->rows ? first + job->grain : job->rows;
    for (int64_t row = first; row < stop; row++) {
      T* x = (T*)job->x + row * job->width;
      if (job->delta) {
        const T* delta = (const T*)job->delta + row * job->width;
        for (int64_t i = 0; i < job->width; i += 2 * W) {
          vf a, b, da, db;
          load2(x + i, a, b);
          load2(delta + i, da, db);
          store2(x + i, a + da, b + db);
        }
      }
      normalise(x, weight, (T*)job->out + row * job->width, job->width, job->eps);
    }
  }
}

// Both activations are x * sigmoid(something): tanh(u) = 2 * sigmoid(2u) - 1.
template <Activation A>
INLINE vf activate(vf x) {
  vf u = A == kSilu ? x : x * (1.59576912f + 0.0713548163f * x * x);  // 2 sqrt(2 / pi) (x + 0.044715 x^3)
  return x / (1.0f + exp(-u));
}

template <class T, Activation A>
INLINE void gate(const T* gates, const T* ups, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += 2 * W) {
    vf a, b, ua, ub;
    load2(gates + i, a, b);
    load2(ups + i, ua, ub);
    store2(out + i, activate<A>(a) * ua, activate<A>(b) * ub);
  }
}

template <class T>
void gated(void* arg) {
  Gated* job = (Gated*)arg;
  for (int64_t first; (first = take(&job->next, job->grain)) < job->rows;) {
    int64_t stop = first + job->grain < job->rows ? first + job->grain : job->rows;
    for (int64_t row = first; row < stop; row++) {
      const T *gates = (const T*)job->gate_up + row * 2 * job->width, *ups = gates + job->width;
      T* out = (T*)job->out + row * job->width;
      if (job->activation == kSilu) {
        gate<T, kSilu>(gates, ups, out, job->width);
      } else {
        gate<T, kGeluTanh>(gates, ups, out, job->width);
      }
    }
  }
}

// Turns the pair (i, i + D/2) of one head by its token's angle.
template <class T, class Out>
INLINE void rotate(const T* x, Out* out, const T* cos, const T* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += W) {
    vf left = load1(x + i), right = load1(x + half + i), c = load1(cos + i), s = load1(sin + i);
    store1(out + i, left * c - right * s);
    store1(out + half + i, right * c + left * s);
  }
}

// Norms (if any) and rotates queries in place; norms and rotates keys into the cache, copies values there.
template <class T>
void rotate_and_write(void* arg) {
  Attend* job = (Attend*)arg;
  const Contexts* all = job->contexts;
  int64_t heads = all->num_heads, kv_heads = all->num_kv_heads, dim = all->head_dim, half = dim / 2;
  bool native = all->format == Native<T>::kFormat;
  float* row = all->scratch + take(&job->joined, 1) * all->scratch_floats;
  const T *cosines = (const T*)job->angles, *sines = cosines + all->num_tokens * half;
  for (int64_t token; (token = take(&job->next, 1)) < all->num_tokens;) {
    T* x = (T*)job->qkv + token * (heads + 2 * kv_heads) * dim;
    uint8_t* slot = (uint8_t*)job->cache + all->slots[token] * all->slot_bytes;
    const T *cos = cosines + token * half, *sin = sines + token * half;
    for (int64_t head = 0; head < heads; head++, x += dim) {
      if (job->q_norm) normalise(x, (const T*)job->q_norm, x, dim, job->eps);
      if (all->format == kInt4) {
        rotate(x, row, cos, sin, half);
        turn(row, dim);
        for (int64_t i = 0; i < dim; i += W) store1(x + i, load1(row + i));
      } else {
        rotate(x, x, cos, sin, half);
      }
    }
    for (int64_t head = 0; head < 2 * kv_heads; head++, x += dim, slot += all->block_size * all->slot_bytes) {
      bool key = head < kv_heads;
      if (key && job->k_norm) normalise(x, (const T*)job->k_norm, x, dim, job->eps);
      if (native && key) {
        rotate(x, (T*)slot, cos, sin, half);
      } else if (native) {
        memcpy(slot, x, dim * sizeof(T));
      } else {
        if (key) {
          rotate(x, row, cos, sin, half);
          if (all->format == kInt4) turn(row, dim);
        } else {
          for (int64_t i = 0; i < dim; i += W) store1(row + i, load1(x + i));
        }
        pack_slot(all->format, row, slot, dim);
      }
    }
  }
}

}  // namespace
