// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The shortest calls from Python: attention of q, k and v alone under options that are read once
// and kept under a number. Reading 37 arguments takes tvm-ffi twice as long as reading these.

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

// (options) -> their number
int64_t keep_options(Arguments in) {
  return reinterpret_cast<intptr_t>(new fulmen_problem(in.options()));
}

const fulmen_problem* kept(Arguments& in) {
  return reinterpret_cast<const fulmen_problem*>(static_cast<intptr_t>(in.integer("options")));
}

// (number)
int64_t drop_options(Arguments in) {
  delete kept(in);
  return 0;
}

using Call = fulmen_status (*)(const fulmen_problem*, const fulmen_tensors*, void*);

int64_t call(Arguments in, std::span<const int> places, Call function) {
  fulmen_problem problem = *kept(in);
  const int64_t stream = in.integer("stream");
  const Arrays arrays = in.some(places);
  arrays.settle(&problem);
  check(function(&problem, &arrays.tensors, arrays.stream(stream)));
  return 0;
}

// (number, stream, rows_before_heads, q, k, v, o, stats or nothing)
int64_t attend(Arguments in) {
  const std::span<const int> places = kForward;
  return call(in, in.size() == 7 ? places.first(4) : places, fulmen_attention);
}

// (number, stream, rows_before_heads, q, k, v, o, stats, do, dq, dk, dv)
int64_t attend_backward(Arguments in) { return call(in, kBackward, fulmen_attention_backward); }

}  // namespace
}  // namespace fulmen::ffi

FULMEN_FFI_EXPORT(keep_options)
FULMEN_FFI_EXPORT(drop_options)
FULMEN_FFI_EXPORT(attend)
FULMEN_FFI_EXPORT(attend_backward)
