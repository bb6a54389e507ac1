// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One attention problem with its data, and what float64 says of it: every output with the largest
// difference that rounding can explain.
#pragma once

#include <vector>

#include "kernels/forward_sm90/config.h"

namespace fulmen::test {

struct ForwardShape {
  i32 q_len;
  i32 kv_len;
  i32 heads_q = 2;
  i32 heads_kv = 2;
  i32 batch = 1;
};

// Normal numbers, contiguous (batch, head, row, dim). With `outlier` != 0 one key of every head is
// a query times it: its score is out of the range of the rest.
class ForwardProblem {
 public:
  ForwardProblem(const ForwardSm90Config& config, const ForwardShape& shape,
                 const IntervalMask& mask, float outlier);

  const ForwardSm90Config& config() const { return config_; }
  const ForwardShape& shape() const { return shape_; }
  const IntervalMask& mask() const { return mask_; }
  SequenceShape sequence() const {
    return {shape_.q_len, shape_.kv_len, shape_.kv_len - shape_.q_len};
  }
  double scale() const;

  double to_double(u16 bits) const;
  i64 line(i32 batch, i32 head) const { return i64{batch} * shape_.heads_q + head; }

  std::vector<u16> q;  // (batch, heads_q, q_len, d_qk)
  std::vector<u16> k;  // (batch, heads_kv, kv_len, d_qk)
  std::vector<u16> v;  // (batch, heads_kv, kv_len, d_v)

 private:
  ForwardSm90Config config_;
  ForwardShape shape_;
  IntervalMask mask_;
};

// A number and how far a right result may lie from it.
struct Bounded {
  double value;
  double bound;
};

struct ReferenceRow {
  std::vector<Bounded> o;  // (d_v)
  Bounded lse;             // -inf for a row that saw nothing
};

ReferenceRow reference_row(const ForwardProblem& problem, i32 batch, i32 head, i32 q_row);

}  // namespace fulmen::test
