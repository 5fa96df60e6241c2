// Linear maps over packed weights, for any number of rows.
//
// A weight [out, in] lies in panels of kPanel outputs: [panel][unit][kPanel], where a unit is 32 bits of one output's
// consecutive inputs (a float, a pair of bfloat16), as it lies in a row of x. So a unit of x is multiplied with a
// vector of units, one row streams every panel once from its beginning to its end, and many rows find it in the
// second-level cache. Each output is one sum over the inputs in their order, in one lane: it depends on its row alone,
// whatever the number of rows and of threads.
//
// The kinds of weights differ in what their units hold (quantised ones: linear_quantized.h).
#pragma once
#include <utility>

#include "api.h"
#include "vec.h"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
enum { kTall = 12 };  // rows x 2 vectors of sums that the registers hold beside one unit of a panel
#else
enum { kTall = 6 };
#endif
enum { kWide = 2 * W };    // outputs computed at once; divides kPanel
enum { kBlockRows = 96 };  // rows that a thread takes at once
enum { kStretch = 8 };     // units between two looks at what to prefetch
enum { kFew = 6 };         // such rows wait for memory alone; panels in order are prefetched by the processor, better

// sum += a unit of x, in all lanes, times units of weights
template <class T>
struct Unit;

template <>
struct Unit<float> {
  typedef vf Sum;
  INLINE vf add(vf sum, vu a, vu b) { return sum + (vf)a * (vf)b; }
};

template <>
struct Unit<bf16> {
  typedef vf Sum;
#ifdef __AVX512BF16__
  INLINE vf add(vf sum, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#else
  INLINE vf add(vf sum, vu a, vu b) {
    sum = sum + (vf)(a << 16) * (vf)(b << 16);
    return sum + (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
  }
#endif
};

// Outputs behind the last are zero.
static void pack_linear(void* arg) {
  PackLinear* job = (PackLinear*)arg;
  int64_t units = job->units;
  for (int64_t first; (first = take(&job->next, 1) * kPanel) < job->out_width;) {
    uint32_t* to = job->packed + first * units;
    int64_t outputs = job->out_width - first < kPanel ? job->out_width - first : kPanel;
    if (outputs < kPanel) memset(to, 0, kPanel * units * sizeof(uint32_t));
    const uint32_t* from = job->weight + first * units;
    for (int64_t start = 0; start < units; start += 16) {  // a cache line of each output
      int64_t stop = start + 16 < units ? start + 16 : units;
      for (int64_t output = 0; output < outputs; output++)
        for (int64_t unit = start; unit < stop; unit++) to[unit * kPanel + output] = from[output * units + unit];
    }
  }
}

// 2W results as they are to be written.
INLINE void write_wide(float* to, vf a, vf b) {
  store(to, a);
  store(to + W, b);
}
INLINE void write_wide(bf16* to, vf a, vf b) {
#ifdef __AVX512BF16__
  store(to, _mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
  store1(to, a);
  store1(to + W, b);
#endif
}

// What a thread works on: `kWide` outputs of a panel, and what it prefetches meanwhile.
struct Strip {
  const uint32_t* weight;
  int64_t units;
  const char* ahead;  // or null
  int64_t lines;      // to prefetch after each stretch

  inline __attribute__((always_inline)) void prefetch() {
    if (!ahead) return;
    for (int64_t i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
  }
};

// sums[R, kWide] of R rows of x, `stride` units apart.
template <class U, int R>
INLINE void multiply(const uint32_t* x, int64_t stride, Strip strip, typename U::Sum (&sums)[R][2]) {
  const uint32_t* b = strip.weight;
  for (int64_t left = strip.units; left > 0; left -= kStretch) {
    strip.prefetch();
    for (const uint32_t* stop = x + (left < kStretch ? left : kStretch); x < stop; x++, b += kPanel) {
      vu b0 = load<vu>(b), b1 = load<vu>(b + W);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        vu a = splat(x[r * stride]);
        sums[r][0] = U::add(sums[r][0], a, b0);
        sums[r][1] = U::add(sums[r][1], a, b1);
      }
    }
  }
}

// out[R, outputs] = sums + bias
template <class T, int R>
INLINE void write_strip(const LinearRows& job, int64_t row, int64_t output, vf (&sums)[R][2]) {
  int64_t outputs = job.out_width - output;
  T edge[kWide] = {};
  if (job.bias) {
    const T* bias = (const T*)job.bias + output;
    if (outputs < kWide) bias = (const T*)memcpy(edge, bias, outputs * sizeof(T));
    vf a = load1(bias), b = load1(bias + W);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      sums[r][0] += a;
      sums[r][1] += b;
    }
  }
  T* out = (T*)job.out + row * job.out_stride + output;
#pragma GCC unroll 12
  for (int r = 0; r < R; r++, out += job.out_stride) {
    if (outputs >= kWide) {
      write_wide(out, sums[r][0], sums[r][1]);
    } else {
      write_wide(edge, sums[r][0], sums[r][1]);
      memcpy(out, edge, outputs * sizeof(T));
    }
  }
}

template <class T>
struct Plain {
  enum { kRows = kTall, kStretchUnits = kStretch };
  static int64_t units(int64_t in) { return in * (int64_t)sizeof(T) / 4; }

  // R rows times a strip
  template <int R>
  static void strip(const LinearRows& job, int64_t row, int64_t output, Strip strip) {
    vf sums[R][2] = {};
    const T* x = (const T*)job.x + row * job.x_stride;
    multiply<Unit<T>, R>((const uint32_t*)x, units(job.x_stride), strip, sums);
    write_strip<T, R>(job, row, output, sums);
  }
};

typedef void (*StripKernel)(const LinearRows&, int64_t, int64_t, Strip);

template <class Kind, class = std::make_integer_sequence<int, Kind::kRows>>
struct Strips;
template <class Kind, int... R>
struct Strips<Kind, std::integer_sequence<int, R...>> {
  static constexpr StripKernel of[] = {Kind::template strip<R + 1>...};  // by the number of rows - 1
};

// A panel and a block of rows.
struct LinearWork {
  int64_t panel, row, stop;

  LinearWork(const LinearRows& job, int64_t work) {
    int64_t blocks = (job.rows + kBlockRows - 1) / kBlockRows, block = work % blocks;
    panel = work / blocks;
    row = job.rows * block / blocks;
    stop = job.rows * (block + 1) / blocks;
  }
};

template <class Kind>
void linear_of(LinearRows* job) {
  int64_t units = Kind::units(job->in), panels = (job->out_width + kPanel - 1) / kPanel;
  int64_t num_work = panels * ((job->rows + kBlockRows - 1) / kBlockRows);
  int64_t stretches = (units + Kind::kStretchUnits - 1) / Kind::kStretchUnits;
  auto panel_at = [&](int64_t panel) { return (const uint32_t*)job->weight + panel * units * kPanel; };
  for (int64_t ticket = take(&job->next, 1), following; ticket < num_work; ticket = following) {
    following = take(&job->next, 1);  // known early, so that its panel is on its way
    LinearWork work(*job, ticket);
    const char* ahead = nullptr;
    if (following < num_work) {
      int64_t panel = LinearWork(*job, following).panel;
      bool in_order = panel == work.panel + 1 && job->rows <= kFew;
      if (panel != work.panel && !in_order) ahead = (const char*)panel_at(panel);
    } else if (job->after) {
      ahead = (const char*)job->after + (following - num_work) * units * kPanel * 4;
    }
    int64_t rows = work.stop - work.row, tiles = (rows + Kind::kRows - 1) / Kind::kRows;
    int64_t lines = (Kind::kStretchUnits * kPanel * 4 / 64 + tiles - 1) / tiles;
    for (int64_t tile = 0; tile < tiles; tile++) {
      int64_t row = work.row + rows * tile / tiles, stop = work.row + rows * (tile + 1) / tiles;
      for (int64_t at = 0; at < kPanel; at += kWide) {
        int64_t output = work.panel * kPanel + at;
        if (output >= job->out_width) break;
        Strip strip = {panel_at(work.panel) + at, units, at ? nullptr : ahead, lines};
        Strips<Kind>::of[stop - row - 1](*job, row, output, strip);
      }
      if (ahead) ahead += stretches * lines * 64;
    }
  }
}

template <class T>
void linear(void* arg) {
  linear_of<Plain<T>>((LinearRows*)arg);
}

}  // namespace
