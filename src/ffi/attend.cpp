// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The shortest calls from Python: attention of q, k and v alone under options that are read once
// and kept under a number. Reading 37 arguments takes tvm-ffi twice as long as reading these, and
// asking tensors in Python for their axes takes as long again.

#include <array>
#include <span>

#include "ffi/arguments.h"
#include "ffi/export.h"
#include "ffi/refusal.h"

namespace fulmen::ffi {
namespace {

// Places in fulmen_tensors: q, k, v, o, stats, and for gradients do, dq, dk, dv.
constexpr std::array<int, 5> kForward = {0, 1, 2, 14, 16};
constexpr std::array<int, 9> kBackward = {0, 1, 2, 14, 16, 17, 19, 20, 21};

struct Kept {
  fulmen_problem options;
  bool rows_before_heads;
  int64_t rank;  // of q
};

// (options, rows_before_heads, rank) -> their number
int64_t keep_options(Arguments in) {
  const fulmen_problem options = in.options();
  const bool rows_before_heads = in.integer("rows_before_heads") != 0;
  return reinterpret_cast<intptr_t>(new Kept{options, rows_before_heads, in.integer("rank")});
}

const Kept* kept(Arguments& in) {
  return reinterpret_cast<const Kept*>(static_cast<intptr_t>(in.integer("options")));
}

// (number)
int64_t drop_options(Arguments in) {
  delete kept(in);
  return 0;
}

// Whether an o that was made like q is the o that a caller expects: as wide as v, its rows dense.
bool is_o_like_q(const fulmen_tensors& tensors, int64_t rank) {
  if (tensors.q.rank != rank || tensors.k.rank != rank || tensors.v.rank != rank) return false;
  const int64_t dim = tensors.o.shape[rank - 1];
  return dim == tensors.v.shape[rank - 1] && (dim <= 1 || tensors.o.strides[rank - 1] == 1);
}

struct Call {
  int64_t rank;
  fulmen_problem problem;
  Arrays arrays;
  void* stream;
};

Call read(Arguments& in, std::span<const int> places) {
  const Kept& how = *kept(in);
  const int64_t stream = in.integer("stream");
  Call call = {how.rank, how.options, in.some(places, how.rows_before_heads), nullptr};
  call.arrays.settle(&call.problem);
  call.stream = call.arrays.stream(stream);
  return call;
}

// (number, stream, q, k, v, o, stats or None) -> 0; or 1, and nothing was done, where o is made
// in another way than like q
int64_t attend(Arguments in) {
  const std::span<const int> places = kForward;
  const Call call = read(in, in.ends_with_none() ? places.first(4) : places);
  if (!is_o_like_q(call.arrays.tensors, call.rank)) return 1;
  check(fulmen_attention(&call.problem, &call.arrays.tensors, call.stream));
  return 0;
}

// (number, stream, q, k, v, o, stats, do, dq, dk, dv)
int64_t attend_backward(Arguments in) {
  const Call call = read(in, kBackward);
  check(fulmen_attention_backward(&call.problem, &call.arrays.tensors, call.stream));
  return 0;
}

}  // namespace
}  // namespace fulmen::ffi

FULMEN_FFI_EXPORT(keep_options)
FULMEN_FFI_EXPORT(drop_options)
FULMEN_FFI_EXPORT(attend)
FULMEN_FFI_EXPORT(attend_backward)
