// Runs a step program in one parallel region: all threads run an operation's kernel, then wait for each other.
//
// Whoever leaves an operation last prepares the next while the others wait, and does by itself what is too little to
// share: so a small operation costs no barrier. Nobody waits for a thread that has not come to an operation: one that
// the system lets run late, or that stays away to leave its core to others (see `Cores`), joins at the next. Waiting
// threads spin for a moment, then sleep.
#include "program.h"

#include <sched.h>
#include <string.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "dispatch.h"

namespace {

const int64_t kSpinNs = 30000;
// Less is done sooner by one thread: elements, queries times positions.
const int64_t kShared = 8192, kSharedScores = 256;

union Job {
  Embed embed;
  QuantizeRows quantize;
  AddNorm add_norm;
  LinearRows linear;
  Gated gated;
  Attend attend;
  Argmax argmax;
};

const uint32_t kDone = 0xffffffff;

// Of one call.
struct Run {
  const Op* ops;
  int64_t count, at;
  const Step* step;
  const Cores* cores;  // or null
  int dtype, threads;
  void (*kernel)(void*);  // null: all is done
  Job job;
  const void* caller;  // of its threads' marks
  int32_t came;        // other threads
  alignas(64) uint64_t state;  // how many are at work on the operation (0: it is being prepared), and its number << 32
  int32_t asleep;              // threads that wait for the next operation
  alignas(64) int32_t wanted;  // threads
  int32_t away;                // threads that are not
};

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t number(uint64_t state) { return (uint32_t)(state >> 32); }
uint32_t at_work(uint64_t state) { return (uint32_t)state; }

// Sleeps while *word is `value`; `sleepers` counts those who do.
void sleep(void* word, int32_t value, int32_t* sleepers) {
  __atomic_add_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n((int32_t*)word, __ATOMIC_SEQ_CST) == value) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    sched_yield();
#endif
  }
  __atomic_sub_fetch(sleepers, 1, __ATOMIC_RELAXED);
}

void wake(void* word, const int32_t* sleepers) {
#ifdef __linux__
  if (__atomic_load_n(sleepers, __ATOMIC_SEQ_CST)) syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#endif
}

// The half of the state that is the operation's number, for futexes.
void* number_word(Run& run) { return (uint32_t*)&run.state + (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__); }

void wait(Run& run, uint32_t operation) {
  int64_t deadline = 0;
  for (int looks = 1; number(__atomic_load_n(&run.state, __ATOMIC_ACQUIRE)) == operation; looks++) {
    pause();
    if (looks % 64) continue;
    int64_t now = now_ns();
    if (!deadline) deadline = now + kSpinNs;
    if (now > deadline) return sleep(number_word(run), (int32_t)operation, &run.asleep);
  }
}

// How many threads the process may use now.
int32_t allowed(const Run& run) {
  const Cores* cores = run.cores;
  if (!cores) return run.threads;
  int64_t now = now_ns(), ranks = cores->group_size;
  const Note* notes = (const Note*)(cores->notes + 1);
  for (int64_t i = 0; i < *cores->notes; i++)
    if (notes[i].until > now && notes[i].group != cores->group) ranks += notes[i].ranks;
  int64_t threads = cores->count / ranks;
  if (threads == cores->count && now < cores->one_free_until) threads--;
  return threads < 1 ? 1 : threads < run.threads ? (int32_t)threads : run.threads;
}

void want(Run& run, int32_t threads) {
  if (threads == run.wanted) return;
  bool more = threads > run.wanted;
  __atomic_store_n(&run.wanted, threads, __ATOMIC_SEQ_CST);
  if (more) wake(&run.wanted, &run.away);
}

// The next operation is there, with so many at work on it.
void publish(Run& run, uint32_t operation, uint32_t at_work) {
  __atomic_store_n(&run.state, (uint64_t)operation << 32 | at_work, __ATOMIC_SEQ_CST);
  wake(number_word(run), &run.asleep);
}

int64_t rows_of(const Run& run, const Op& op) { return op.wanted ? run.step->num_wanted : run.step->rows; }

int64_t grain(const Run& run, int64_t rows) { return rows / (run.threads * 4) + 1; }

// Sets kernel and job. Returns whether several threads should run it.
bool prepare(Run& run, const Op& op) {
  const Step& step = *run.step;
  int64_t rows = rows_of(run, op);
  void *x = step.buffers[op.x], *out = step.buffers[op.out];
  switch (op.kind) {
    case kEmbedOp:
      run.kernel = choose(op.width)->embed[run.dtype];
      run.job.embed = {step.token_ids, op.weight, out, op.scale, op.packed, op.in, rows, op.width, grain(run, rows), 0};
      return rows * op.width >= kShared;
    case kAddNormOp:
      run.kernel = choose(op.width)->add_norm[run.dtype];
      run.job.add_norm = {x, op.delta < 0 ? nullptr : step.buffers[op.delta], op.of_all ? step.wanted : nullptr,
                          op.weight, out, op.eps, rows, op.width, grain(run, rows), 0};
      return rows * op.width >= kShared;
    case kQuantizeOp:
      run.kernel = choose(0)->quantize[op.form][run.dtype];
      run.job.quantize = {x, (uint32_t*)out, rows, op.in, op.in, grain(run, rows), 0};
      return rows * op.in >= kShared;
    case kLinearOp:
      run.kernel = (op.form < 0 ? choose(0)->linear : choose(0)->linear_quantized[op.form])[run.dtype];
      run.job.linear = {x, op.weight, op.bias, out, op.after, rows, op.in, op.width,
                        op.form < 0 ? op.in : row_units((int)op.form, op.in), op.width, 0};
      return rows * op.in * op.width >= kShared;
    case kGatedOp:
      run.kernel = choose(op.width)->gated[run.dtype];
      run.job.gated = {x, out, op.activation, rows, op.width, grain(run, rows), 0};
      return rows * op.width >= kShared;
    case kArgmaxOp:
      run.kernel = choose(0)->argmax[run.dtype];
      run.job.argmax = {x, step.largest, step.places, rows, op.width, 0};
      return rows > 1 && rows * op.width >= kShared * 8;
    default: {
      const Contexts* contexts = step.contexts[op.contexts];
      const Kernels* kernels = choose(contexts->head_dim);
      run.job.attend = {contexts, x, step.angles[op.angles], op.q_norm, op.k_norm, op.cache, out,
                        op.eps, op.scale, op.softcap, step.num_angles[op.angles], 0, 0,
                        op.of_all ? step.wanted : nullptr, step.num_wanted};
      run.kernel = (op.kind == kRotateOp ? kernels->rotate_and_write : kernels->attend)[run.dtype];
      return op.kind == kAttendOp ? contexts->scores >= kSharedScores : contexts->num_tokens >= 8;
    }
  }
}

// Whether all ranks have published the message in time. Spins briefly, then yields, then naps.
bool all_published(const Exchange& all) {
  int64_t deadline = 0, spun = 0;
  timespec nap = {0, 20000};
  for (int64_t rank = 0, looks = 1; rank < all.size; looks++) {
    if (__atomic_load_n(all.published + rank * 8, __ATOMIC_ACQUIRE) >= (uint64_t)all.seq) {
      rank++;
      continue;
    }
    pause();
    if (looks % 64) continue;
    int64_t now = now_ns();
    if (!deadline) {
      deadline = now + all.timeout_ns;
      spun = now + kSpinNs;
    }
    if (now > deadline) return false;
    if (now < spun) continue;
    if (now < spun + 10 * kSpinNs) {
      sched_yield();
    } else {
      nanosleep(&nap, nullptr);
      if (nap.tv_nsec < 2000000) nap.tv_nsec += nap.tv_nsec / 2;
      looks = 63;  // look once between naps
    }
  }
  return true;
}

// Sums x over the ranks, by messages as `ShmExchange.swap` sends them.
bool reduce(const Run& run, const Op& op) {
  Exchange& all = *op.exchange;
  int64_t element = run.dtype ? 2 : 4, left = rows_of(run, op) * op.width * element;
  for (uint8_t* x = (uint8_t*)run.step->buffers[op.x]; left > 0; x += all.buffer_bytes, left -= all.buffer_bytes) {
    int64_t bytes = left < all.buffer_bytes ? left : all.buffer_bytes;
    uint8_t* buffers = all.data + ++all.seq % 2 * all.size * all.buffer_bytes;
    memcpy(buffers + all.rank * all.buffer_bytes, x, bytes);
    __atomic_store_n(all.published + all.rank * 8, (uint64_t)all.seq, __ATOMIC_RELEASE);
    if (!all_published(all)) {
      all.late = 1;
      return false;
    }
    SumParts job = {buffers, x, all.size, all.buffer_bytes, bytes / element};
    choose(job.count)->sum_parts[run.dtype](&job);
  }
  return true;
}

// out = the wanted rows of x.
void select(const Run& run, const Op& op) {
  const Step& step = *run.step;
  int64_t bytes = op.width * (run.dtype ? 2 : 4);
  const uint8_t* x = (const uint8_t*)step.buffers[op.x];
  uint8_t* out = (uint8_t*)step.buffers[op.out];
  for (int64_t i = 0; i < step.num_wanted; i++) memcpy(out + i * bytes, x + step.wanted[i] * bytes, bytes);
}

// Up to the next operation to share.
void advance(Run& run) {
  while (run.at < run.count) {
    const Op& op = run.ops[run.at++];
    if (op.kind == kReduceOp) {
      if (!reduce(run, op)) run.at = run.count;
      continue;
    }
    if (op.kind == kSelectOp) {
      select(run, op);
      continue;
    }
    bool shared = prepare(run, op);
    if (shared && run.threads > 1) return;
    run.kernel(&run.job);
  }
  run.kernel = nullptr;
}

// From an operation that this thread works on, as long as it is the last to leave one. Returns the one that others
// still work on, or that is the last.
uint32_t work_on(Run& run) {
  while (true) {
    run.kernel(&run.job);
    uint64_t state = __atomic_sub_fetch(&run.state, 1, __ATOMIC_ACQ_REL);
    if (at_work(state)) return number(state);
    advance(run);
    want(run, run.kernel ? allowed(run) : run.threads);
    publish(run, number(state) + 1, run.kernel ? 1 : kDone);
    if (!run.kernel) return number(state);
  }
}

thread_local char mark;

void work(void* arg) {
  Run& run = *(Run*)arg;
  int32_t me = &mark == run.caller ? 0 : __atomic_add_fetch(&run.came, 1, __ATOMIC_RELAXED);
  uint32_t operation = me ? 0 : work_on(run);
  if (!me) wait(run, operation);
  while (true) {
    uint64_t state = __atomic_load_n(&run.state, __ATOMIC_ACQUIRE);
    if (at_work(state) == kDone) return;
    int32_t wanted = __atomic_load_n(&run.wanted, __ATOMIC_RELAXED);
    if (me >= wanted) {
      sleep(&run.wanted, wanted, &run.away);
    } else if (!at_work(state)) {
      wait(run, number(state));
    } else if (__atomic_compare_exchange_n(&run.state, &state, state + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
      wait(run, work_on(run));
    }
  }
}

const Cores* shared_cores = nullptr;

}  // namespace

// From now on programs use as many threads as the process may, while they run. null: as many as they are told.
extern "C" __attribute__((visibility("default"))) void kvferry_share_cores(const Cores* cores) { shared_cores = cores; }

extern "C" __attribute__((visibility("default"))) void kvferry_run(const Op* ops, int64_t count, const Step* step,
                                                                   int dtype, int threads) {
  const Cores* cores = shared_cores;
  Run it = {ops, count, 0, step, cores, dtype, threads, nullptr, {}, &mark, 0, 1, 0, 0, 0};
  it.wanted = allowed(it);
  advance(it);
  if (it.kernel) run(work, &it, threads);
}
