// A step program: what the layers of a model do to a step's rows, as a list of operations that one call runs.
#pragma once
#include "api.h"

enum OpKind { kAddNormOp, kLinearOp, kGatedOp, kRotateOp, kAttendOp };
enum { kBuffers = 4, kAttentions = 8 };

// Buffers are numbers of the step's. Fields that a kind does not use are 0. Mirrored in program.py.
struct Op {
  int64_t kind;
  int64_t x, out;      // buffers
  int64_t delta;       // a buffer that is added to x before its norm is taken, or -1
  int64_t in, width;   // of a row of x where that differs, and of out
  int64_t activation;
  int64_t contexts;    // which of the step's
  int64_t angles;      // which of the step's
  const void *weight, *bias;
  const void *q_norm, *k_norm;  // or null
  void* cache;         // this layer of block 0
  float eps, scale, softcap;
};

// What changes from step to step. Mirrored in program.py.
struct Step {
  int64_t rows;
  void* buffers[kBuffers];
  const Contexts* contexts[kAttentions];
  const void* angles[kAttentions];
};
