// The small operations between linears. Each row is computed in one fixed order, whoever computes it.
#pragma once
#include "api.h"
#include "formats.h"
#include "int4.h"
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

template <class T>
void silu_mul(void* arg) {
  SiluMul* job = (SiluMul*)arg;
  for (int64_t first; (first = take(&job->next, job->grain)) < job->rows;) {
    int64_t stop = first + job->grain < job->rows ? first + job->grain : job->rows;
    for (int64_t row = first; row < stop; row++) {
      const T *gate = (const T*)job->gate_up + row * 2 * job->width, *up = gate + job->width;
      T* out = (T*)job->out + row * job->width;
      for (int64_t i = 0; i < job->width; i += 2 * W) {
        vf a, b, ua, ub;
        load2(gate + i, a, b);
        load2(up + i, ua, ub);
        store2(out + i, a / (1.0f + exp(-a)) * ua, b / (1.0f + exp(-b)) * ub);
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

template <class T>
INLINE void widen(const T* x, float* out, int64_t dim) {
  for (int64_t i = 0; i < dim; i += W) store1(out + i, load1(x + i));
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
    int64_t stride = all->block_size * all->slot_bytes;  // from a head to the next
    for (int64_t head = 0; head < 2 * kv_heads; head++, x += dim, slot += stride) {
      bool key = head < kv_heads;
      if (key && job->k_norm) normalise(x, (const T*)job->k_norm, x, dim, job->eps);
      if (native && key) {
        rotate(x, (T*)slot, cos, sin, half);
      } else if (native) {
        memcpy(slot, x, dim * sizeof(T));
      } else if (all->format == kInt4) {
        if (key) {  // its value with it
          rotate(x, row, cos, sin, half);
          widen(x + kv_heads * dim, row + dim, dim);
          turn(row, dim);
          turn(row + dim, dim);
          pack_int4(row, row + dim, slot, slot + kv_heads * stride, (int32_t*)(row + 2 * dim), dim);
        }
      } else {
        if (key) {
          rotate(x, row, cos, sin, half);
        } else {
          widen(x, row, dim);
        }
        pack_slot(all->format, row, slot, dim);
      }
    }
  }
}

}  // namespace
