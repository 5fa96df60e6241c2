// A step program: what a model does to a step's rows, as a list of operations that one call runs.
#pragma once
#include "api.h"

enum OpKind {
  kEmbedOp,
  kAddNormOp,
  kQuantizeOp,
  kLinearOp,
  kGatedOp,
  kRotateOp,
  kAttendOp,
  kReduceOp,
  kArgmaxOp,
  kSelectOp,
};
enum { kBuffers = 6, kAttentions = 8 };

// The memory through which the ranks of a group on one machine exchange messages, as `shm_parallel.py` says it.
// Mirrored in program.py.
struct Exchange {
  uint64_t* published;  // [size], a cache line apart
  uint8_t* data;        // [2, size, buffer_bytes]
  int64_t rank, size, buffer_bytes, timeout_ns;
  int64_t seq;          // messages so far
  int64_t late;         // not 0: some rank did not come in time, and the rest of the program was left out
};

// What `runtime/cores.py` keeps: a slot of its file, and how a process reads all of them. Mirrored there.
struct Note {
  int64_t pid, group, ranks, until;  // counts as busy until then: ns, the monotonic clock
};

struct Cores {
  const int64_t* notes;  // number of slots in use, then these
  int64_t count;         // of the machine
  int64_t group, group_size;
  int64_t one_free_until;  // this group leaves one to others until then
};

// Buffers are numbers of the step's. Fields that a kind does not use are 0. Mirrored in program.py.
struct Op {
  int64_t kind;
  int64_t x, out;      // buffers
  int64_t delta;       // a buffer that is added to x before its norm is taken, or -1
  int64_t in, width;   // of a row of x (of an embedding: its rows), and of out
  int64_t wanted;      // not 0: for the step's wanted rows alone
  int64_t of_all;      // not 0, of those: x still holds all rows
  int64_t packed;      // not 0: an embedding that lies as a linear's weight
  int64_t activation;
  int64_t form;        // of quantised rows, or -1
  int64_t contexts;    // which of the step's
  int64_t angles;      // which of the step's
  const void *weight, *bias;
  const void* after;   // the weight of the next linear, or null
  const void *q_norm, *k_norm;  // or null
  void* cache;         // this layer of block 0
  Exchange* exchange;
  float eps, scale, softcap;
};

// What changes from step to step. Mirrored in program.py.
struct Step {
  int64_t rows, num_wanted;
  const int64_t* token_ids;  // [rows]
  const int64_t* wanted;     // [num_wanted] rows
  float* largest;            // [num_wanted], and where it stands: what kArgmaxOp finds
  int64_t* places;           // [num_wanted]
  void* buffers[kBuffers];
  const Contexts* contexts[kAttentions];
  const void* angles[kAttentions];
  int64_t num_angles[kAttentions];
};
