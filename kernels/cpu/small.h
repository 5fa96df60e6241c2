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

// An output's units, out of the panel of a packed weight that they lie in.
INLINE void unpack_row(const uint32_t* packed, int64_t output, void* out, int64_t units) {
  const uint32_t* from = packed + output / kPanel * units * kPanel + output % kPanel;
  for (int64_t unit = 0; unit < units; unit++) store((uint32_t*)out + unit, from[unit * kPanel]);
}

// A token outside of the table becomes NaN, which nobody takes for an answer.
template <class T>
void embed(void* arg) {
  Embed* job = (Embed*)arg;
  for (int64_t first; (first = take(&job->next, job->grain)) < job->rows;) {
    int64_t stop = first + job->grain < job->rows ? first + job->grain : job->rows;
    for (int64_t row = first; row < stop; row++) {
      int64_t token = job->token_ids[row];
      bool known = token >= 0 && token < job->vocab;
      float scale = known ? job->scale : __builtin_nanf("");
      T* out = (T*)job->out + row * job->width;
      const T* x = (const T*)job->table + (known ? token : 0) * job->width;
      if (job->packed) {
        unpack_row((const uint32_t*)job->table, known ? token : 0, out, job->width * (int64_t)sizeof(T) / 4);
        x = out;
      }
      for (int64_t i = 0; i < job->width; i += 2 * W) {
        vf a, b;
        load2(x + i, a, b);
        store2(out + i, a * scale, b * scale);
      }
    }
  }
}

template <class T>
void add_norm(void* arg) {
  AddNorm* job = (AddNorm*)arg;
  const T* weight = (const T*)job->weight;
  for (int64_t first; (first = take(&job->next, job->grain)) < job->rows;) {
    int64_t stop = first + job->grain < job->rows ? first + job->grain : job->rows;
    for (int64_t row = first; row < stop; row++) {
      int64_t from = job->index ? job->index[row] : row;
      T* x = (T*)job->x + from * job->width;
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

INLINE float value(float x) { return x; }
INLINE float value(bf16 x) { return as_float((uint32_t)x.bits << 16); }

template <class T>
void argmax(void* arg) {
  Argmax* job = (Argmax*)arg;
  const int64_t kRun = 32 * W;  // looked through one by one for the largest, once it is known to be there
  for (int64_t row; (row = take(&job->next, 1)) < job->rows;) {
    const T* x = (const T*)job->x + row * job->width;
    float top = -__builtin_inff();
    int64_t best = 0;
    bool unknown = false;
    for (int64_t first = 0; first < job->width; first += kRun) {
      int64_t stop = first + kRun < job->width ? first + kRun : job->width, i = first;
      vf most = splat(-__builtin_inff()), a, b;
      vi broken = {};
      for (; i + 2 * W <= stop; i += 2 * W) {
        load2(x + i, a, b);
        most = max(max(a, b), most);
        broken |= (vi)(a != a) | (vi)(b != b);
      }
      float here = -__builtin_inff();
      for (int l = 0; l < W; l++) {
        here = most[l] > here ? most[l] : here;
        unknown |= broken[l] != 0;
      }
      for (; i < stop; i++) {
        float v = value(x[i]);
        here = v > here ? v : here;
        unknown |= v != v;
      }
      if (here > top) {
        top = here;
        best = first;
      }
    }
    int64_t end = best + kRun < job->width ? best + kRun : job->width;
    while (best + 1 < end && value(x[best]) != top) best++;
    job->values[row] = unknown ? __builtin_nanf("") : top;
    job->ids[row] = best;
  }
}

// One rounding at the end, in the order of the parts.
template <class T>
void sum_parts(void* arg) {
  SumParts* job = (SumParts*)arg;
  const char* parts = (const char*)job->parts;
  for (int64_t i = 0; i < job->count; i += 2 * W) {
    vf a, b, na, nb;
    load2((const T*)parts + i, a, b);
    for (int64_t part = 1; part < job->size; part++) {
      load2((const T*)(parts + part * job->stride_bytes) + i, na, nb);
      a += na;
      b += nb;
    }
    store2((T*)job->out + i, a, b);
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
  const T *cosines = (const T*)job->angles, *sines = cosines + job->num_angles * half;
  for (int64_t token; (token = take(&job->next, 1)) < all->num_tokens;) {
    T* x = (T*)job->qkv + token * (heads + 2 * kv_heads) * dim;
    uint8_t* slot = (uint8_t*)job->cache + all->slots[token] * all->slot_bytes;
    const T *cos = cosines + all->positions[token] * half, *sin = sines + all->positions[token] * half;
    int64_t stride = all->block_size * all->slot_bytes;  // from a head to the next
    for (int64_t head = 0; head < 2 * kv_heads; head++)  // each lies elsewhere; queries are turned meanwhile
      for (int64_t i = 0; i < all->slot_bytes; i += 64) __builtin_prefetch(slot + head * stride + i, 1, 3);
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
