// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A call of the C ABI under construction: arrays between guard pages, inputs from a seed, outputs
// full of a byte pattern that reads as NaN, so that what a call wrote, or did not, can be seen.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "fulmen/fulmen.h"
#include "support/guarded_memory.h"

namespace fulmen::test {

using Member = fulmen_tensor fulmen_tensors::*;
using Shape = std::vector<int64_t>;

struct Sizes {
  int64_t batch = 2;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t q_rows = 3;
  int64_t kv_rows = 5;
  int64_t dim_qk = 4;
  int64_t dim_v = 6;
};

class TestCall {
 public:
  // q, k, v, o, lse and stats of float32.
  explicit TestCall(const Sizes& sizes = {}, fulmen_dtype dtype = FULMEN_FLOAT32);

  // Adds what backward wants: dout, dlse, and dq, dk, dv.
  void add_backward();

  // A contiguous array in guarded memory. Inputs hold numbers from a seed.
  fulmen_tensor& input(Member member, fulmen_dtype dtype, const Shape& shape);
  fulmen_tensor& output(Member member, fulmen_dtype dtype, const Shape& shape);

  // An int64 vector, as lengths and offsets are.
  fulmen_tensor& indices(Member member, const std::vector<int64_t>& values);

  void remove(Member member) { (tensors.*member) = absent_; }

  fulmen_status forward() { return fulmen_attention(&problem, &tensors, nullptr); }
  fulmen_status backward() { return fulmen_attention_backward(&problem, &tensors, nullptr); }

  // Every byte of every output as it was made?
  bool outputs_untouched() const;
  // The bytes of a contiguous array.
  std::string bytes(Member member) const;
  std::vector<float> floats(Member member) const;

  Sizes sizes;
  fulmen_dtype dtype;
  fulmen_problem problem;
  fulmen_tensors tensors;

 private:
  fulmen_tensor& add(Member member, fulmen_dtype dtype, const Shape& shape);

  fulmen_tensor absent_;
  std::vector<GuardedMemory> memory_;
  std::vector<std::pair<const char*, size_t>> outputs_;
  unsigned seed_ = 1;
};

size_t size_of(fulmen_dtype dtype);
size_t size_of(const fulmen_tensor& tensor);

}  // namespace fulmen::test
