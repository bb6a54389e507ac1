// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// See quantised_append.h.

#include "quantised_append.h"

#include "core/error.h"

namespace fulmen::test {
namespace {

std::vector<i64> shape_of(const Tensor& tensor) {
  return {tensor.shape, tensor.shape + tensor.rank};
}

}  // namespace

Tensor QuantisedAppend::float32_copy(const Tensor& tensor) {
  if (!tensor.present()) return tensor;
  const Tensor copy = random_.contiguous(DType::kFloat32, shape_of(tensor));
  RandomProblem::for_each(tensor, [&](const i64* at) {
    const double value = load_real(RandomProblem::address(tensor, at), tensor.dtype);
    store_real(RandomProblem::address(copy, at), DType::kFloat32, value);
  });
  return copy;
}

QuantisedAppend::QuantisedAppend(unsigned seed, const AppendProblem& drawn, DType stored)
    : given(drawn), wide(drawn), random_(seed) {
  given.k_cache = random_.contiguous(stored, shape_of(drawn.k_cache));
  given.v_cache = random_.contiguous(stored, shape_of(drawn.v_cache));
  if (random_.chance(0.5)) given.k_cache = random_.array(stored, shape_of(drawn.k_cache));
  for (Tensor* const scales : {&given.k_scale, &given.v_scale}) {
    if (random_.chance(0.2)) continue;
    std::vector<i64> shape = shape_of(drawn.k_cache);
    shape[3] = 1;
    for (i64& extent : shape) extent = random_.chance(0.5) ? 1 : extent;
    *scales = random_.array(DType::kFloat32, shape);
    random_.fill_normal(*scales, 0.1);
  }
  wide.k_cache = random_.contiguous(DType::kFloat32, shape_of(drawn.k_cache));
  wide.v_cache = random_.contiguous(DType::kFloat32, shape_of(drawn.v_cache));
  for (const auto member : {&AppendProblem::k, &AppendProblem::v, &AppendProblem::cos,
                            &AppendProblem::sin, &AppendProblem::q}) {
    wide.*member = float32_copy(drawn.*member);
  }
  if (drawn.q_out.present()) {
    wide.q_out = random_.contiguous(DType::kFloat32, shape_of(drawn.q_out));
    given.q_out = random_.contiguous(drawn.q_out.dtype, shape_of(drawn.q_out));
  }
}

AppendProblem QuantisedAppend::with_fresh_caches() {
  AppendProblem fresh = given;
  fresh.k_cache = random_.twin(given.k_cache);
  fresh.v_cache = random_.twin(given.v_cache);
  if (given.q_out.present()) fresh.q_out = random_.twin(given.q_out);
  return fresh;
}

std::string QuantisedAppend::wrong(const AppendProblem& after) const {
  std::string found;
  const auto check = [&](const Tensor& cache, const Tensor& scales, const Tensor& expected) {
    RandomProblem::for_each(expected, [&](const i64* at) {
      const char* const got = RandomProblem::address(cache, at);
      const char* const number = RandomProblem::address(expected, at);
      char stored = '\xff';  // as it was made
      if (load_bytes<u32>(number) != 0xffffffffu) {
        i64 place[kMaxRank];
        for (int axis = 0; axis < 4; ++axis) {
          place[axis] = scales.shape[axis] > 1 ? at[axis] : 0;
        }
        const float scale =
            scales.present() ? load_bytes<float>(RandomProblem::address(scales, place)) : 1.0f;
        store_real(&stored, cache.dtype, static_cast<double>(load_bytes<float>(number) / scale));
      }
      if (load_bytes<u8>(got) == load_bytes<u8>(&stored)) return;
      found = sentence(name(cache.dtype), " [", at[0], "][", at[1], "][", at[2], "][", at[3],
                       "] is ", int{load_bytes<u8>(got)}, " where ", int{load_bytes<u8>(&stored)},
                       " was expected");
    });
  };
  check(after.k_cache, given.k_scale, wide.k_cache);
  check(after.v_cache, given.v_scale, wide.v_cache);
  return found;
}

}  // namespace fulmen::test
