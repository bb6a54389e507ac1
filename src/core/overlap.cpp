// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Whether two strided arrays share a byte. The bytes of an array are base + sum of index * stride
// + byte of element, so the question is whether a sum of bounded multiples of strides can land in
// an interval of address differences: a bounded search, exact, with two ways to cut it short (what
// the remaining terms can reach, and their greatest common divisor). Interleaved views, such as the
// three parts of one (batch, row, 3, head, dim) array, are told apart; ranges alone could not.

#include <algorithm>
#include <numeric>

#include "core/arrays.h"

namespace fulmen {
namespace {

constexpr int kMaxTerms = 2 * kMaxRank;
constexpr int kMaxSteps = 10000;  // well above the few dozen that views of real programs take

// Sums of coefficient * x over all terms, 0 <= x <= limit.
class Sums {
 public:
  void add(i64 coefficient, i64 limit) {
    if (coefficient == 0 || limit <= 0) return;
    int at = num_terms_++;
    for (; at > 0 && terms_[at - 1].coefficient < coefficient; --at) terms_[at] = terms_[at - 1];
    terms_[at] = {coefficient, limit, 0, 0};
  }

  // Whether some sum lies in [low, high]; true when kMaxSteps did not decide it.
  bool reach(i64 low, i64 high) {
    fold();
    i64 total = 0;
    i64 divisor = 0;
    for (int i = num_terms_; i-- > 0;) {
      terms_[i].total = total += terms_[i].coefficient * terms_[i].limit;
      terms_[i].divisor = divisor = std::gcd(divisor, terms_[i].coefficient);
    }
    steps_left_ = kMaxSteps;
    return search(0, low, high);
  }

 private:
  struct Term {
    i64 coefficient;
    i64 limit;
    i64 total;    // largest sum of this and all later terms
    i64 divisor;  // of every sum of this and all later terms
  };

  // a x + (a m) y with x <= X, y <= Y takes every multiple of a up to a (X + m Y) when X >= m - 1:
  // one term instead of two. Contiguous axes fold into one.
  void fold() {
    int kept = num_terms_;
    for (int i = num_terms_ - 2; i >= 0; --i) {
      Term& low = terms_[i + 1];
      const Term high = terms_[i];
      const i64 ratio = high.coefficient / low.coefficient;
      if (high.coefficient % low.coefficient != 0 || low.limit < ratio - 1) continue;
      low.limit += ratio * high.limit;
      for (int j = i; j + 1 < kept; ++j) terms_[j] = terms_[j + 1];
      --kept;
    }
    num_terms_ = kept;
  }

  bool search(int i, i64 low, i64 high) {
    if (high < 0) return false;
    if (low <= 0) return true;  // all remaining x = 0
    if (i == num_terms_ || low > terms_[i].total) return false;
    const Term& term = terms_[i];
    if (high / term.divisor * term.divisor < low) return false;
    const i64 rest = i + 1 < num_terms_ ? terms_[i + 1].total : 0;
    const i64 first = low > rest ? ceil_div(low - rest, term.coefficient) : 0;
    const i64 last = min(term.limit, high / term.coefficient);
    for (i64 x = last; x >= first; --x) {
      if (--steps_left_ < 0) return true;
      if (search(i + 1, low - x * term.coefficient, high - x * term.coefficient)) return true;
    }
    return false;
  }

  Term terms_[kMaxTerms] = {};
  int num_terms_ = 0;
  int steps_left_ = 0;
};

}  // namespace

i64 span_bytes(const Tensor& tensor) {
  if (tensor.empty()) return 0;
  i64 last = 0;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    last += (tensor.shape[axis] - 1) * tensor.strides[axis];
  }
  return (last + 1) * size_bytes(tensor.dtype);
}

bool may_overlap(const Tensor& a, const Tensor& b) {
  const i64 a_span = span_bytes(a);
  const i64 b_span = span_bytes(b);
  if (a_span == 0 || b_span == 0) return false;
  const auto a_base = static_cast<i64>(reinterpret_cast<u64>(a.data));
  const auto b_base = static_cast<i64>(reinterpret_cast<u64>(b.data));
  if (a_base + a_span <= b_base || b_base + b_span <= a_base) return false;

  // a_base + A + byte = b_base + B + byte', B = B_last - B' with B' a sum like A:
  // A + B' = b_base + B_last - a_base + (byte' - byte).
  const i64 a_size = size_bytes(a.dtype);
  const i64 b_size = size_bytes(b.dtype);
  Sums sums;
  for (int axis = 0; axis < a.rank; ++axis) {
    sums.add(a.strides[axis] * a_size, a.shape[axis] - 1);
  }
  for (int axis = 0; axis < b.rank; ++axis) {
    sums.add(b.strides[axis] * b_size, b.shape[axis] - 1);
  }
  const i64 difference = b_base + (b_span - b_size) - a_base;
  return sums.reach(difference - (a_size - 1), difference + (b_size - 1));
}

bool is_same(const Tensor& a, const Tensor& b) {
  return a.data == b.data && a.dtype == b.dtype &&
         std::equal(a.shape, a.shape + kMaxRank, b.shape) &&
         std::equal(a.strides, a.strides + kMaxRank, b.strides);
}

bool may_overlap_itself(const Tensor& tensor) {
  if (tensor.empty()) return false;
  // Two different indices differ by d, |d[axis]| < extent; say d[first] > 0 in the first axis where
  // they differ. Then sum d stride = 0, shifted so that every unknown starts at 0.
  for (int first = 0; first < tensor.rank; ++first) {
    if (tensor.shape[first] <= 1) continue;
    if (tensor.strides[first] == 0) return true;
    Sums sums;
    i64 target = -tensor.strides[first];
    sums.add(tensor.strides[first], tensor.shape[first] - 2);
    for (int axis = first + 1; axis < tensor.rank; ++axis) {
      sums.add(tensor.strides[axis], 2 * (tensor.shape[axis] - 1));
      target += tensor.strides[axis] * (tensor.shape[axis] - 1);
    }
    if (sums.reach(target, target)) return true;
  }
  return false;
}

}  // namespace fulmen
