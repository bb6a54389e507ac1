// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Random problems, and the row in float64 with its bound. u = 2^-8 or 2^-11 is the unit roundoff of
// bf16 or f16, e = 2^-24 that of float32; p_j are the probabilities, s_j the scores, R the number
// of blocks of keys and therefore the most times that earlier results are rescaled.
//   exponents  a score is d products and sums in float32: d e max_j scale sum |q k|. Times c
//   (itself
//              rounded) less m (rounded with every rescaling), |m| <= max |s| + log 256: so in all
//              E = e (d max_j scale sum |q k| + (4 + 2 R) (max |s| + log 256)) + (1 + R) 2^-22,
//              2^-22 being what ex2 may be wrong by; p_j is right up to a factor exp(+-E), and so
//              is their sum
//   sums       kv_len + 16 + 2 R additions and multiplications of float32 in O, as many in the sum
//   output     p_j is rounded once (u) before P V, O once (u); p_j in f16 or flushed by ex2 also
//              loses up to 2^-25 (f16) or 2^-26 (2^-126 of a sum of at least 2^-100) outright
#include "forward_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace fulmen::test {
namespace {

constexpr double kFloatRoundoff = 0x1p-24;

u16 to_bits(float x, DType dtype) {
  return dtype == DType::kBFloat16 ? to_bf16(x).bits : to_f16(x).bits;
}

struct Scores {
  std::vector<double> s;     // of the visible keys
  double max_absolute = 0;   // largest |s|
  double max_magnitude = 0;  // largest scale sum |q k|
};

Scores scores_of(const ForwardProblem& problem, const u16* q, const u16* k, Interval visible) {
  const i32 dims = problem.config().d_qk;
  Scores scores;
  for (i64 j = visible.begin; j < visible.end; ++j) {
    double s = 0, magnitude = 0;
    for (i32 d = 0; d < dims; ++d) {
      const double product = problem.to_double(q[d]) * problem.to_double(k[j * dims + d]);
      s += product;
      magnitude += std::abs(product);
    }
    scores.s.push_back(s * problem.scale());
    scores.max_absolute = std::max(scores.max_absolute, std::abs(scores.s.back()));
    scores.max_magnitude = std::max(scores.max_magnitude, magnitude * problem.scale());
  }
  return scores;
}

}  // namespace

ForwardProblem::ForwardProblem(const ForwardSm90Config& config, const ForwardShape& shape,
                               const IntervalMask& mask, float outlier)
    : config_(config), shape_(shape), mask_(mask) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<u16>& array, i64 heads, i64 rows, i64 dims) {
    array.resize(static_cast<size_t>(shape.batch * heads * rows * dims));
    for (u16& x : array) x = to_bits(normal(random), config.dtype);
  };
  fill(q, shape.heads_q, shape.q_len, config.d_qk);
  fill(k, shape.heads_kv, shape.kv_len, config.d_qk);
  fill(v, shape.heads_kv, shape.kv_len, config.d_v);
  if (outlier == 0) return;
  const i32 key = std::min(3, shape.kv_len - 1);
  const i32 group = shape.heads_q / shape.heads_kv;
  for (i32 head = 0; head < shape.batch * shape.heads_kv; ++head) {
    const i64 q_row = i64{head} * group * shape.q_len + shape.q_len / 2;
    const i64 k_row = i64{head} * shape.kv_len + key;
    for (i32 d = 0; d < config.d_qk; ++d) {
      const double x = to_double(q[static_cast<size_t>(q_row * config.d_qk + d)]);
      k[static_cast<size_t>(k_row * config.d_qk + d)] =
          to_bits(outlier * static_cast<float>(x), config.dtype);
    }
  }
}

double ForwardProblem::scale() const { return 1 / std::sqrt(static_cast<double>(config_.d_qk)); }

double ForwardProblem::to_double(u16 bits) const {
  return config_.dtype == DType::kBFloat16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

ReferenceRow reference_row(const ForwardProblem& problem, i32 batch, i32 head, i32 q_row) {
  const ForwardSm90Config& config = problem.config();
  const ForwardShape& shape = problem.shape();
  const i64 kv_line = i64{batch} * shape.heads_kv + head / (shape.heads_q / shape.heads_kv);
  const u16* q =
      &problem
           .q[static_cast<size_t>((problem.line(batch, head) * shape.q_len + q_row) * config.d_qk)];
  const u16* k = &problem.k[static_cast<size_t>(kv_line * shape.kv_len * config.d_qk)];
  const u16* v = &problem.v[static_cast<size_t>(kv_line * shape.kv_len * config.d_v)];
  const Interval visible = visible_columns(problem.mask(), problem.sequence(), q_row);
  const Scores scores = scores_of(problem, q, k, visible);

  ReferenceRow row{std::vector<Bounded>(static_cast<size_t>(config.d_v), Bounded{0, 0}),
                   {-std::numeric_limits<double>::infinity(), 0}};
  if (scores.s.empty()) return row;
  const double max = *std::max_element(scores.s.begin(), scores.s.end());
  double sum = 0;
  for (const double s : scores.s) sum += std::exp(s - max);

  const bool is_bf16 = config.dtype == DType::kBFloat16;
  const double roundoff = is_bf16 ? 0x1p-8 : 0x1p-11;
  const double lost = is_bf16 ? 0x1p-26 : 0x1p-25;
  const double rescalings = static_cast<double>(ceil_div(shape.kv_len, config.kv_rows));
  const double shift = scores.max_absolute + std::log(256.0);
  const double exponents =
      kFloatRoundoff * (config.d_qk * scores.max_magnitude + (4 + 2 * rescalings) * shift) +
      (1 + rescalings) * 0x1p-22;
  const double sums = (shape.kv_len + 16 + 2 * rescalings) * kFloatRoundoff;
  // O and its divisor, 1 / sum (2 e) and the last product (e)
  const double factor = std::expm1(2 * (exponents + sums) + 3 * kFloatRoundoff);

  for (i32 d = 0; d < config.d_v; ++d) {
    double o = 0, magnitude = 0, all = 0;
    for (size_t j = 0; j < scores.s.size(); ++j) {
      const size_t at = (static_cast<size_t>(visible.begin) + j) * static_cast<size_t>(config.d_v);
      const double x = problem.to_double(v[at + static_cast<size_t>(d)]);
      const double p = std::exp(scores.s[j] - max) / sum;
      o += p * x;
      magnitude += p * std::abs(x);
      all += std::abs(x);
    }
    const double before = ((1 + roundoff) * (1 + factor) - 1) * magnitude + lost * all;
    row.o[static_cast<size_t>(d)] = {o, before + roundoff * (std::abs(o) + before) + 0x1p-25};
  }
  const double lse = max + std::log(sum);
  // log2 of the sum, 2^-22 of at most (|lse| + |m|) log2(e) or of 1; a sum and two products
  row.lse = {lse, exponents + sums + (0x1p-22 + 4 * kFloatRoundoff) * (1 + std::abs(lse) + shift)};
  return row;
}

}  // namespace fulmen::test
