// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of libfulmen behind the interface that backward.py calls: contiguous bf16
// arrays (batch, head, row, dim), float32 lse, one stream. Plans are made once for a shape and
// kept; the workspace is the caller's. Prints the library's sentence when a call fails.
#include <fulmen/fulmen.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <map>

namespace {

// dims, mask (0 none, 1 causal, 2 causal and window), batch, heads_q, heads_kv, q_len, kv_len,
// window_left, top_left, one that the library chooses itself
using Shape = std::array<int, 10>;

bool deterministic = false;

struct Call {
  fulmen_problem problem;
  fulmen_tensors tensors;
};

Call call_of(const Shape& s, void* const (&data)[9]) {
  Call call;
  fulmen_problem_init(&call.problem);
  fulmen_tensors_init(&call.tensors);
  call.problem.causal = s[1] > 0;
  call.problem.window_left = s[1] == 2 ? s[7] : FULMEN_NO_LIMIT;
  call.problem.alignment = s[8] ? FULMEN_TOP_LEFT : FULMEN_BOTTOM_RIGHT;
  call.problem.backend = FULMEN_BACKEND_CUDA;
  call.problem.implementation = FULMEN_SM90;
  call.problem.deterministic = deterministic;
  const int64_t q[4] = {s[2], s[3], s[5], s[0]}, kv[4] = {s[2], s[4], s[6], s[0]};
  fulmen_tensors& t = call.tensors;
  fulmen_tensor* const arrays[9] = {&t.q, &t.k, &t.v, &t.o, &t.dout, &t.lse, &t.dq, &t.dk, &t.dv};
  const bool is_kv[9] = {false, true, true, false, false, false, false, true, true};
  for (int i = 0; i < 9; ++i) {
    fulmen_tensor_init(arrays[i], data[i], i == 5 ? FULMEN_FLOAT32 : FULMEN_BFLOAT16,
                       i == 5 ? 3 : 4, is_kv[i] ? kv : q);
  }
  return call;
}

// Where sequences differ: device memory, int32 (batch) lengths or (batch + 1) offsets.
struct Sequences {
  bool packed = false;
  void* q = nullptr;
  void* kv = nullptr;
} sequences;

// Packed: the batch is one entry of one head, whose rows are those of all sequences.
void add_sequences(Call& call, const Shape& s) {
  if (!sequences.q) return;
  fulmen_tensors& t = call.tensors;
  const int64_t count = s[2] + (sequences.packed ? 1 : 0);
  fulmen_tensor_init(sequences.packed ? &t.cu_q : &t.q_lengths, sequences.q, FULMEN_INT32, 1,
                     &count);
  fulmen_tensor_init(sequences.packed ? &t.cu_kv : &t.kv_lengths, sequences.kv, FULMEN_INT32, 1,
                     &count);
  if (!sequences.packed) return;
  for (fulmen_tensor* x : {&t.q, &t.k, &t.v, &t.o, &t.dout, &t.lse, &t.dq, &t.dk, &t.dv}) {
    const int64_t lse[2] = {1, x->shape[0] * x->shape[2]};
    const int64_t rows[3] = {1, x->shape[0] * x->shape[2], x->shape[3]};
    const bool is_lse = x == &t.lse;
    fulmen_tensor_init(x, x->data, x->dtype, is_lse ? 2 : 3, is_lse ? lse : rows);
  }
}

fulmen_plan* plan_of(const Shape& shape) {
  static std::map<Shape, fulmen_plan*> plans;
  fulmen_plan*& plan = plans[shape];
  if (plan) return plan;
  void* const none[9] = {};
  Call call = call_of(shape, none);
  add_sequences(call, shape);
  if (fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_BACKWARD, &plan)) {
    std::printf("%s\n", fulmen_last_error());
  }
  return plan;
}

int run(const Shape& shape, void* const (&data)[9], void* work, void* stream) {
  Call call = call_of(shape, data);
  add_sequences(call, shape);
  const fulmen_plan* const plan = plan_of(shape);
  const int error =
      fulmen_backward(plan, &call.tensors, work, fulmen_plan_workspace_bytes(plan), stream);
  if (error) std::printf("%s\n", fulmen_last_error());
  return error;
}

}  // namespace

// Before the first call.
extern "C" void backward_set_deterministic(int is) { deterministic = is != 0; }

// For the calls from now on; null: all sequences are alike again. Plans are kept by shape alone, so
// a shape is called in one way only.
extern "C" void backward_set_sequences(int packed, void* q, void* kv) {
  sequences = {packed != 0, q, kv};
}
extern "C" size_t backward_workspace_of(const int* shape) {
  Shape s;
  std::memcpy(s.data(), shape, sizeof(s));
  return fulmen_plan_workspace_bytes(plan_of(s));
}
extern "C" int backward_run_of(const int* shape, void* q, void* k, void* v, void* o, void* dout,
                               void* lse, void* dq, void* dk, void* dv, void* work, void* stream) {
  Shape s;
  std::memcpy(s.data(), shape, sizeof(s));
  return run(s, {q, k, v, o, dout, lse, dq, dk, dv}, work, stream);
}
