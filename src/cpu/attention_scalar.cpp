// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The oracle: attention and its gradients in float64, one row at a time, in the order of the
// equations of fulmen.h, without tiles, threads or cleverness. Every faster implementation is
// compared with it; read it first. Slow on purpose, O(kv_len dim) memory.
// Source of the backward pass: Dao et al., FlashAttention (2022), appendix B.2.

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "core/problem.h"
#include "core/program.h"
#include "core/tensor.h"
#include "cpu/backend.h"
#include "cpu/libm_math.h"
#include "cpu/row_results.h"

namespace fulmen::cpu {
namespace {

using Float64Math = LibmMath<double>;
using State = RowState;
using expression::Program;

// A float64 copy of the rows of one head: loaded from an array of any dtype and strides, stored
// back with one rounding.
struct Matrix {
  Matrix(i64 num_rows, i64 num_cols)
      : rows(num_rows), cols(num_cols), values(static_cast<size_t>(num_rows * num_cols)) {}
  double* operator[](i64 row) { return values.data() + row * cols; }
  const double* operator[](i64 row) const { return values.data() + row * cols; }

  i64 rows;
  i64 cols;
  std::vector<double> values;
};

// Of k or v: the keys of a sequence, wherever they lie.
Matrix load_keys(const Problem& problem, Array array, const CacheSequence& sequence, i64 kv_head) {
  Matrix matrix(sequence.shape.kv_len, problem.dims(array));
  for (i64 j = 0; j < matrix.rows; ++j) {
    const KeyRow at = readable(problem.cache_layout(), problem.key(sequence, j));
    if (problem.has_records()) {
      const RecordRow<const u8> record = problem.record(array, at, kv_head);
      for (i64 d = 0; d < matrix.cols; ++d) matrix[j][d] = record_number<double>(record, d);
      continue;
    }
    for (i64 d = 0; d < matrix.cols; ++d) {
      const double scale = problem.kv_scale(array, at, kv_head, d);
      matrix[j][d] = scale * problem.arrays[array].real(at.batch, kv_head, at.row, d);
    }
  }
  return matrix;
}

Matrix load(const Tensor& tensor, i64 batch, i64 head, i64 begin, i64 rows) {
  Matrix matrix(rows, tensor.shape[3]);
  for (i64 i = 0; i < rows; ++i) {
    for (i64 d = 0; d < matrix.cols; ++d) matrix[i][d] = tensor.real(batch, head, begin + i, d);
  }
  return matrix;
}

Matrix load_queries(const Problem& problem, const CacheSequence& sequence, i64 head) {
  const i64 begin = sequence.q_begin;
  Matrix Q = load(problem.arrays[Array::kQ], sequence.batch, head, begin, sequence.shape.q_len);
  for (i64 i = 0; i < Q.rows; ++i) {
    const double scale = problem.q_scale(sequence.batch, head, begin + i);
    for (i64 d = 0; d < Q.cols; ++d) Q[i][d] *= scale;
  }
  return Q;
}

// What sums begin with: 0, or, with accumulate, what is there.
Matrix sums_from(const Problem& problem, Array array, i64 batch, i64 head, i64 begin, i64 rows) {
  const Tensor& sums = problem.arrays[array];
  if (problem.accumulate && sums.present()) return load(sums, batch, head, begin, rows);
  return Matrix(rows, array == Array::kDQ || array == Array::kDK ? problem.dim_qk : problem.dim_v);
}

// Rows past the matrix, up to `slot`, are zero-filled. An absent tensor is not wanted.
void store(const Tensor& tensor, const Matrix& matrix, i64 batch, i64 head, i64 begin, i64 slot) {
  if (!tensor.present()) return;
  for (i64 i = 0; i < slot; ++i) {
    for (i64 d = 0; d < tensor.shape[3]; ++d) {
      tensor.set_real(batch, head, begin + i, d, i < matrix.rows ? matrix[i][d] : 0.0);
    }
  }
}

double dot(const double* a, const double* b, i64 size) {
  double sum = 0;
  for (i64 d = 0; d < size; ++d) sum += a[d] * b[d];
  return sum;
}

// y += a x
void axpy(double a, const double* x, double* y, i64 size) {
  for (i64 d = 0; d < size; ++d) y[d] += a * x[d];
}

// One head of one sequence: its inputs, and its scores row by row.
struct Head {
  Head(const Problem& p, i64 sequence_index, i64 head_index)
      : problem(p),
        index(sequence_index),
        head(head_index),
        kv_head(p.kv_head(head_index)),
        sequence(p.sequence(sequence_index)),
        Q(load_queries(p, sequence, head)),
        K(load_keys(p, Array::kK, sequence, kv_head)),
        V(load_keys(p, Array::kV, sequence, kv_head)),
        s(static_cast<size_t>(kv_len())),
        slope(s.size()),
        own_slope(s.size(), 1.0),
        keep(s.size()),
        visible(s.size()) {
    if (p.has(Array::kSinks)) sink = p.arrays[Array::kSinks].real(0, head, 0, 0);
    if (p.adds_alibi()) {
      alibi = p.arrays[Array::kAlibiSlopes].real(index, head, 0, 0);
    }
    if (p.has_score_expression()) {
      unmodified.resize(s.size());
      values.resize(p.program->steps.size());
    }
  }

  i64 q_len() const { return sequence.shape.q_len; }
  i64 kv_len() const { return sequence.shape.kv_len; }

  double bias(i64 i, i64 j) const {
    if (!problem.has(Array::kBias)) return 0;
    return problem.arrays[Array::kBias].real(index, head, i, sequence.first_key + j);
  }

  // s[j] = softcap(scale dot(q, k)) + bias + ALiBi for visible j, and d s / d dot beside it; where
  // a score was written by the user, s'(s) and its slope. keep[j] = 0 or 1 / (1 - p).
  void attend(i64 i) {
    const ScoreMap<double>& map = problem.score_map;
    const bool has_segments = problem.has_segments();
    DropoutRow dropout(problem.dropout, has_segments ? problem.q_position(index, i) : i,
                       problem.batch_head(index, head));
    for (i64 j = 0; j < kv_len(); ++j) {
      visible[at(j)] = problem.shows(sequence, index, head, i, j);
      if (!visible[at(j)]) continue;
      const double capped = map.score<Float64Math>(dot(Q[i], K[j], Q.cols));
      slope[at(j)] = map.slope(capped) * map.scale;
      s[at(j)] =
          capped + bias(i, j) +
          alibi_bias(alibi, problem.position(sequence, i), problem.key_position(sequence, j));
      if (problem.has_score_expression()) {
        const Program& program = *problem.program;
        evaluate(i, j, program.slope_goal);
        own_slope[at(j)] = value(program.slope);
        slope[at(j)] *= own_slope[at(j)];
        unmodified[at(j)] = s[at(j)];
        s[at(j)] = value(program.score);
      }
      const i64 key = has_segments ? problem.kv_position(index, j) : j;
      const bool kept = !problem.dropout.enabled() || dropout.keeps(key);
      keep[at(j)] = kept ? problem.dropout.kept_scale() : 0.0;
    }
  }

  // The steps of a goal for a visible pair, from s[j] or, once attended, from what it was.
  void evaluate(i64 i, i64 j, const expression::Goal& goal, bool is_attended = false) {
    expression::Operands operands = expression::operands_of(problem, sequence, index, head, i, j);
    operands.s = is_attended ? unmodified[at(j)] : s[at(j)];
    expression::evaluate(*problem.program, goal, operands, values.data());
  }
  double value(i32 step) const { return values[static_cast<size_t>(step)].real; }

  static size_t at(i64 j) { return static_cast<size_t>(j); }

  const Problem& problem;
  i64 index, head, kv_head;
  CacheSequence sequence;
  Matrix Q, K, V;
  double sink = -Float64Math::kInfinity;
  double alibi = 0;
  std::vector<double> s, slope, own_slope, keep;  // (kv_len), of the row attended last
  std::vector<char> visible;                      // (kv_len)
  std::vector<double> unmodified;                 // (kv_len): s where s' is the user's
  std::vector<expression::Value> values;          // of the steps of an expression
};

// m = max_j s[j], l = sum_j exp(s[j] - m) over visible j.
State softmax_of(const Head& a) {
  State state;
  for (i64 j = 0; j < a.kv_len(); ++j) {
    if (a.visible[a.at(j)]) state.row_max = max(state.row_max, a.s[a.at(j)]);
  }
  for (i64 j = 0; j < a.kv_len(); ++j) {
    if (a.visible[a.at(j)]) state.row_sum += state.weight(a.s[a.at(j)]);
  }
  return state;
}

// The same as stats keep it: m in their type, not below the true one, and l beside that m, as the
// backward pass takes its weights. Where numbers of the type lie so far apart that l would vanish,
// m lies below, and weights above 1 count as 1.
State kept_state(const Head& a, const State& state, DType stats_dtype) {
  constexpr double kMostAbove = 64;  // exp(-64) is far from the smallest float32
  State kept{round_up(state.row_max, stats_dtype), 0};
  if (kept.row_max - state.row_max > kMostAbove) {
    kept.row_max = -round_up(-state.row_max, stats_dtype);
  }
  for (i64 j = 0; j < a.kv_len(); ++j) {
    if (a.visible[a.at(j)]) kept.row_sum += std::exp(min(a.s[a.at(j)] - kept.shift(), 0.0));
  }
  return kept;
}

// What the forward pass kept of a row.
State saved_state(const Head& a, i64 i) {
  return cpu::saved_state(a.problem, a.sequence.batch, a.head, a.sequence.q_begin + i);
}

void store_state(const Head& a, i64 i, const State& state, const State& kept) {
  const Tensor& lse = a.problem.arrays[Array::kLse];
  const Tensor& stats = a.problem.arrays[Array::kStats];
  const i64 row = a.sequence.q_begin + i;
  if (lse.present()) lse.set_real(a.sequence.batch, a.head, row, 0, state.lse());
  if (stats.present()) {
    stats.set_real(a.sequence.batch, a.head, row, 0, kept.row_max);
    stats.set_real(a.sequence.batch, a.head, row, 1, kept.row_sum);
  }
}

// o[i], lse and stats. With accumulate o[i] holds a part already, as stats say: the two are merged,
// and where row i sees nothing the part stays, but for what a sink takes.
void row_forward(Head& a, i64 i, double* O) {
  a.attend(i);
  const State own = softmax_of(a);
  if (a.problem.accumulate && own.row_sum == 0 && !a.problem.has(Array::kSinks)) return;
  const State before = a.problem.accumulate ? saved_state(a, i) : State{};
  State state = own;
  const State::MergeFactors share = state.join(before, a.sink);
  for (i64 d = 0; d < a.V.cols; ++d) O[d] = share.other == 0 ? 0.0 : O[d] * share.other;
  for (i64 j = 0; j < a.kv_len(); ++j) {
    const size_t at = a.at(j);
    if (!a.visible[at]) continue;
    axpy(own.weight(a.s[at]) * share.mine * a.keep[at], a.V[j], O, a.V.cols);
  }
  State kept = kept_state(a, own, accumulator(a.problem.dtype));
  kept.merge(before);
  store_state(a, i, state, kept);
}

// What the expression reads: the gradient of each array, contiguous.
using CaptureGradients = std::array<std::vector<double>, kNumCaptures>;

// dK, dV of a kv_head, summed over its heads; dbias, dsinks and what is captured, of the whole
// problem.
struct SharedGradients {
  Matrix dK, dV;
  Matrix &dbias, &dsinks;
  CaptureGradients& captures;
};

CaptureGradients zero_captures(const Problem& problem) {
  CaptureGradients all;
  for (int index = 0; index < kNumCaptures; ++index) {
    const Tensor& out = problem.arrays[capture_gradient(index)];
    if (!out.present()) continue;
    all[static_cast<size_t>(index)].resize(static_cast<size_t>(expression::num_elements(out)));
  }
  return all;
}

// dC[what pair (i, j) read] += dS d s' / d C
void add_captures(Head& a, i64 i, i64 j, double dS, CaptureGradients& out) {
  if (!a.problem.has_score_expression()) return;
  for (const expression::Derivative& one : a.problem.program->derivatives) {
    const expression::Step& read = a.problem.program->step(one.read);
    std::vector<double>& sum = out[static_cast<size_t>(read.index)];
    if (sum.empty()) continue;
    a.evaluate(i, j, one.goal, true);
    const Tensor& out_tensor = a.problem.arrays[capture_gradient(read.index)];
    const i64 element =
        expression::offset_of(read, a.values.data(), expression::contiguous(out_tensor));
    sum[static_cast<size_t>(element)] += dS * a.value(one.value);
  }
}

void store_captures(const Problem& problem, const CaptureGradients& gradients) {
  for (int index = 0; index < kNumCaptures; ++index) {
    const Tensor& out = problem.arrays[capture_gradient(index)];
    const std::vector<double>& sum = gradients[static_cast<size_t>(index)];
    for (size_t element = 0; element < sum.size(); ++element) {
      expression::store_element(out, static_cast<i64>(element), sum[element]);
    }
  }
}

// Where pair (i, j) of a head adds up in dbias: axes of extent 1 are summed over.
double& dbias_at(const Head& a, Matrix& dbias, i64 i, i64 j) {
  const Tensor& t = a.problem.arrays[Array::kDBias];
  const auto reduced = [&t](i64 index, int axis) { return t.shape[axis] == 1 ? 0 : index; };
  const i64 batch_head = reduced(a.index, 0) * t.shape[1] + reduced(a.head, 1);
  return dbias[batch_head * t.shape[2] + reduced(i, 2)][reduced(j, 3)];
}

void row_backward(Head& a, i64 i, const Matrix& O, const Matrix& dO, Matrix& dQ,
                  SharedGradients& out) {
  const State state = saved_state(a, i);
  if (state.row_sum == 0) return;  // saw nothing: adds nothing
  a.attend(i);
  const double normalizer = state.normalizer(a.sink);
  const double D = dot(dO[i], O[i], O.cols);
  const Tensor& dlse = a.problem.arrays[Array::kDLse];
  const i64 row = a.sequence.q_begin + i;
  const double dL = dlse.present() ? dlse.real(a.sequence.batch, a.head, row, 0) : 0.0;
  for (i64 j = 0; j < a.kv_len(); ++j) {
    const size_t at = a.at(j);
    if (!a.visible[at]) continue;
    const double weight = std::exp(min(a.s[at] - state.shift(), 0.0));
    const double P = weight * normalizer;
    const double dP = dot(dO[i], a.V[j], a.V.cols) * a.keep[at];
    const double dS = P * (dP - D) + weight / state.row_sum * dL;
    const double dX = dS * a.slope[at];
    axpy(P * a.keep[at], dO[i], out.dV[j], a.V.cols);
    axpy(dX, a.K[j], dQ[i], a.K.cols);
    axpy(dX, a.Q[i], out.dK[j], a.Q.cols);
    if (a.problem.has(Array::kDBias)) dbias_at(a, out.dbias, i, j) += dS * a.own_slope[at];
    add_captures(a, i, j, dS, out.captures);
  }
  if (a.problem.has(Array::kDSinks)) out.dsinks[a.head][0] -= state.sink_share(a.sink) * D;
}

void head_backward(Head& a, SharedGradients& out) {
  const Arrays& arrays = a.problem.arrays;
  const CacheSequence& at = a.sequence;
  const Matrix O = load(arrays[Array::kO], at.batch, a.head, at.q_begin, a.q_len());
  const Matrix dO = load(arrays[Array::kDOut], at.batch, a.head, at.q_begin, a.q_len());
  Matrix dQ = sums_from(a.problem, Array::kDQ, at.batch, a.head, at.q_begin, a.q_len());
  for (i64 i = 0; i < a.q_len(); ++i) row_backward(a, i, O, dO, dQ, out);
  store(arrays[Array::kDQ], dQ, at.batch, a.head, at.q_begin,
        a.problem.accumulate ? a.q_len() : at.q_slot);
}

}  // namespace

void scalar_forward(const Problem& problem) {
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    for (i64 head = 0; head < problem.heads_q; ++head) {
      Head a(problem, index, head);
      const i64 begin = a.sequence.q_begin;
      Matrix O = sums_from(problem, Array::kO, a.sequence.batch, head, begin, a.q_len());
      for (i64 i = 0; i < a.q_len(); ++i) row_forward(a, i, O[i]);
      if (problem.accumulate) {
        store(problem.arrays[Array::kO], O, a.sequence.batch, head, begin, a.q_len());
        continue;
      }
      for (i64 i = a.q_len(); i < a.sequence.q_slot; ++i) store_state(a, i, {}, {});
      store(problem.arrays[Array::kO], O, a.sequence.batch, head, begin, a.sequence.q_slot);
    }
  }
}

void scalar_backward(const Problem& problem) {
  const Tensor& dbias_out = problem.arrays[Array::kDBias];
  const Tensor& dsinks_out = problem.arrays[Array::kDSinks];
  const i64* extent = dbias_out.shape;
  Matrix dbias(extent[0] * extent[1] * extent[2], extent[3]);
  Matrix dsinks(problem.heads_q, 1);
  CaptureGradients captures = zero_captures(problem);
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    const CacheSequence at = problem.sequence(index);
    for (i64 kv_head = 0; kv_head < problem.heads_kv; ++kv_head) {
      const auto sums = [&](Array array) {
        return sums_from(problem, array, at.batch, kv_head, at.kv_begin, at.shape.kv_len);
      };
      SharedGradients out{sums(Array::kDK), sums(Array::kDV), dbias, dsinks, captures};
      for (i64 member = 0; member < problem.group_size(); ++member) {
        Head a(problem, index, kv_head * problem.group_size() + member);
        head_backward(a, out);
      }
      const i64 stored = problem.accumulate ? at.shape.kv_len : at.kv_slot;
      store(problem.arrays[Array::kDK], out.dK, at.batch, kv_head, at.kv_begin, stored);
      store(problem.arrays[Array::kDV], out.dV, at.batch, kv_head, at.kv_begin, stored);
    }
  }
  store_captures(problem, captures);
  for (i64 row = 0; row < dbias.rows; ++row) {
    const i64 batch_head = row / extent[2];
    for (i64 j = 0; j < dbias.cols; ++j) {
      dbias_out.set_real(batch_head / extent[1], batch_head % extent[1], row % extent[2], j,
                         dbias[row][j]);
    }
  }
  for (i64 head = 0; dsinks_out.present() && head < problem.heads_q; ++head) {
    dsinks_out.set_real(0, head, 0, 0, dsinks[head][0]);
  }
}

}  // namespace fulmen::cpu
