// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Random problems, the formulas of the definition in float64 and in the 16-bit recipe ("plain":
// sums in float32, P, dS and results rounded), and the rule between them:
//   err(row) <= 2 max(err_plain(row), median of err_plain over the head) + 8 eps A(row) + ulp(row)
// A is the formula with the absolute value of every product that is summed, eps that of float32,
// ulp of the 16-bit type at the row's largest element.
#include "backward_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <sstream>

namespace fulmen::test {
namespace {

// Everything that one head of queries gives to the three gradients, in Real; `magnitude` instead of
// values with absolute terms.
template <class Real>
struct HeadPass {
  const BackwardProblem& problem;
  i32 b, h, g;
  bool plain;
  bool magnitude;

  Real rounded(Real x) const {
    return plain ? static_cast<Real>(problem.value(problem.round(static_cast<double>(x)))) : x;
  }

  Real term(Real x) const { return magnitude ? std::abs(x) : x; }

  void row(i64 i, std::vector<Real>& dq, std::vector<std::vector<Real>>& dk,
           std::vector<std::vector<Real>>& dv) const {
    const Interval visible = visible_columns(problem.mask(), problem.sequence(), i);
    const i32 dims = problem.q.dims, dims_v = problem.v.dims;
    const Real scale = static_cast<Real>(problem.scale());
    const double* q = problem.q.row(b, h, i);
    const double* dout = problem.dout.row(b, h, i);
    std::vector<Real> p;
    Real row_max = -std::numeric_limits<Real>::infinity();
    for (i64 j = visible.begin; j < visible.end; ++j) {
      const double* k = problem.k.row(b, g, j);
      Real s = 0;
      for (i32 d = 0; d < dims; ++d) s += static_cast<Real>(q[d]) * static_cast<Real>(k[d]);
      p.push_back(s * scale);
      row_max = std::max(row_max, p.back());
    }
    Real sum = 0;
    for (Real& x : p) sum += x = std::exp(x - row_max);
    if (problem.shape().sinks) sum += std::exp(static_cast<Real>(problem.sink(h)) - row_max);
    for (Real& x : p) x /= sum;
    Real delta = 0;
    for (i32 d = 0; d < dims_v; ++d) {
      Real o = 0;
      if (plain) {
        o = static_cast<Real>(problem.o.row(b, h, i)[d]);
      } else {
        for (size_t j = 0; j < p.size(); ++j) {
          o +=
              p[j] * static_cast<Real>(problem.v.row(b, g, visible.begin + static_cast<i64>(j))[d]);
        }
      }
      delta += term(o * static_cast<Real>(dout[d]));
    }
    if (problem.shape().dlse) delta -= term(static_cast<Real>(*problem.dlse.row(b, h, i)));
    dq.assign(static_cast<size_t>(dims), 0);
    for (size_t n = 0; n < p.size(); ++n) {
      const i64 j = visible.begin + static_cast<i64>(n);
      const double* k = problem.k.row(b, g, j);
      const double* v = problem.v.row(b, g, j);
      Real dp = 0;
      for (i32 d = 0; d < dims_v; ++d) {
        dp += term(static_cast<Real>(dout[d]) * static_cast<Real>(v[d]));
      }
      const Real ds = magnitude ? p[n] * (dp + std::abs(delta)) : rounded(p[n] * (dp - delta));
      for (i32 d = 0; d < dims; ++d) {
        dq[static_cast<size_t>(d)] += ds * term(static_cast<Real>(k[d]));
        dk[static_cast<size_t>(j)][static_cast<size_t>(d)] += ds * term(static_cast<Real>(q[d]));
      }
      for (i32 d = 0; d < dims_v; ++d) {
        dv[static_cast<size_t>(j)][static_cast<size_t>(d)] +=
            rounded(p[n]) * term(static_cast<Real>(dout[d]));
      }
    }
    for (Real& x : dq) x = rounded(x * scale);
  }
};

template <class Real>
Gradients gradients(const BackwardProblem& problem, bool plain, bool magnitude) {
  const BackwardShape& shape = problem.shape();
  Gradients result{problem.q, problem.k, problem.v};
  const size_t keys = static_cast<size_t>(shape.kv_len);
  for (i32 b = 0; b < shape.batch; ++b) {
    for (i32 g = 0; g < shape.heads_kv; ++g) {
      std::vector<std::vector<Real>> dk(keys,
                                        std::vector<Real>(static_cast<size_t>(problem.k.dims)));
      std::vector<std::vector<Real>> dv(keys,
                                        std::vector<Real>(static_cast<size_t>(problem.v.dims)));
      std::vector<Real> dq;
      const i32 group = shape.heads_q / shape.heads_kv;
      for (i32 h = g * group; h < (g + 1) * group; ++h) {
        const HeadPass<Real> pass{problem, b, h, g, plain, magnitude};
        for (i32 i = 0; i < shape.q_len; ++i) {
          pass.row(i, dq, dk, dv);
          std::copy(dq.begin(), dq.end(), result.dq.row(b, h, i));
        }
      }
      const HeadPass<Real> pass{problem, b, g, g, plain, magnitude};
      const Real scale = static_cast<Real>(problem.scale());
      for (size_t j = 0; j < keys; ++j) {
        const i64 row = static_cast<i64>(j);
        for (size_t d = 0; d < dk[j].size(); ++d) {
          result.dk.row(b, g, row)[d] = pass.rounded(dk[j][d] * scale);
        }
        for (size_t d = 0; d < dv[j].size(); ++d) {
          result.dv.row(b, g, row)[d] = pass.rounded(dv[j][d]);
        }
      }
    }
  }
  return result;
}

double largest(const Matrix& a, i32 b, i32 h, i32 r) {
  const double* row = a.row(b, h, r);
  double most = 0;
  for (i32 d = 0; d < a.dims; ++d) most = std::max(most, std::abs(row[d]));
  return most;
}

// NaN where either side is NaN: no bound holds for it.
double distance(const Matrix& a, const Matrix& other, i32 b, i32 h, i32 r) {
  const double *x = a.row(b, h, r), *y = other.row(b, h, r);
  double most = 0;
  for (i32 d = 0; d < a.dims; ++d) {
    const double error = std::abs(x[d] - y[d]);
    if (!(error <= most)) most = error;
  }
  return most;
}

std::string compare(const char* name, const Matrix& found, const Matrix& reference,
                    const Matrix& plain, const Matrix& magnitude, int fraction_bits) {
  for (i32 b = 0; b < found.batch; ++b) {
    for (i32 h = 0; h < found.heads; ++h) {
      std::vector<double> errors;
      for (i32 r = 0; r < found.rows; ++r) errors.push_back(distance(plain, reference, b, h, r));
      std::vector<double> sorted = errors;
      std::sort(sorted.begin(), sorted.end());
      const double median = sorted[sorted.size() / 2];
      for (i32 r = 0; r < found.rows; ++r) {
        const double top = std::max(largest(reference, b, h, r), 1e-30);
        const double ulp = std::ldexp(1.0, std::ilogb(top) - fraction_bits);
        const double bound = 2 * std::max(errors[static_cast<size_t>(r)], median) +
                             8 * 0x1p-23 * largest(magnitude, b, h, r) + ulp;
        const double error = distance(found, reference, b, h, r);
        if (!(error <= bound)) {
          return (std::ostringstream()
                  << name << " of batch " << b << ", head " << h << ", row " << r << " is off by "
                  << error << ", " << bound << " is allowed")
              .str();
        }
      }
    }
  }
  return "";
}

}  // namespace

BackwardProblem::BackwardProblem(const BackwardSm90Config& config, const BackwardShape& shape,
                                 const IntervalMask& mask)
    : q(shape.batch, shape.heads_q, shape.q_len, shape.dim_qk ? shape.dim_qk : config.dims),
      k(shape.batch, shape.heads_kv, shape.kv_len, q.dims),
      v(shape.batch, shape.heads_kv, shape.kv_len, shape.dim_v ? shape.dim_v : config.dims),
      dout(shape.batch, shape.heads_q, shape.q_len, v.dims),
      o(dout),
      lse(shape.batch, shape.heads_q, shape.q_len, 1),
      stats(shape.batch, shape.heads_q, shape.q_len, 2),
      dlse(lse),
      dtype_(config.dtype),
      shape_(shape),
      mask_(mask) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](Matrix& matrix) {
    for (double& x : matrix.data) x = value(round(static_cast<double>(normal(random))));
  };
  fill(q);
  fill(k);
  if (shape.huge) {  // whole numbers: sums are exact, and many scores equal
    for (double& x : q.data) x = 0x1p17 * std::round(x);
    for (double& x : k.data) x = std::round(x);
  }
  if (shape.low) {  // products of -100 / (scale dims), dims of them in a score
    const double size = std::sqrt(100 / (scale() * q.dims));
    for (double& x : q.data) x = value(round(size * (1 + 0.03 * x)));
    for (double& x : k.data) x = value(round(-size * (1 + 0.03 * x)));
  }
  fill(v);
  if (shape.low) std::fill(v.data.begin(), v.data.end(), 0.75);
  fill(dout);
  for (double& x : dlse.data) x = static_cast<double>(normal(random));
  const i32 group = shape.heads_q / shape.heads_kv;
  for (i32 b = 0; b < shape.batch; ++b) {
    for (i32 h = 0; h < shape.heads_q; ++h) {
      for (i32 i = 0; i < shape.q_len; ++i) {
        const Interval visible = visible_columns(mask, sequence(), i);
        std::vector<float> s;
        float row_max = -std::numeric_limits<float>::infinity();
        for (i64 j = visible.begin; j < visible.end; ++j) {
          float x = 0;
          for (i32 d = 0; d < q.dims; ++d) {
            x += static_cast<float>(q.row(b, h, i)[d] * k.row(b, h / group, j)[d]);
          }
          s.push_back(x * static_cast<float>(scale()));
          row_max = std::max(row_max, s.back());
        }
        float sum = 0;
        for (float& x : s) sum += x = std::exp(x - row_max);
        const float sink_part = shape.sinks ? std::exp(sink(h) - row_max) : 0;
        for (i32 d = 0; d < v.dims; ++d) {
          float x = 0;
          for (size_t j = 0; j < s.size(); ++j) {
            const double p = value(round(static_cast<double>(s[j])));
            x +=
                static_cast<float>(p * v.row(b, h / group, visible.begin + static_cast<i64>(j))[d]);
          }
          o.row(b, h, i)[d] =
              s.empty() ? 0 : value(round(static_cast<double>(x / (sum + sink_part))));
        }
        *lse.row(b, h, i) = static_cast<double>(row_max + std::log(sum));
        stats.row(b, h, i)[0] = static_cast<double>(row_max);
        stats.row(b, h, i)[1] = static_cast<double>(sum);
      }
    }
  }
}

double BackwardProblem::scale() const { return 1 / std::sqrt(static_cast<double>(q.dims)); }

u16 BackwardProblem::round(double x) const {
  const float single = static_cast<float>(x);
  return dtype_ == DType::kBFloat16 ? to_bf16(single).bits : to_f16(single).bits;
}

double BackwardProblem::value(u16 bits) const {
  return static_cast<double>(dtype_ == DType::kBFloat16 ? to_float(bf16{bits})
                                                        : to_float(f16{bits}));
}

std::string BackwardProblem::difference(const Gradients& found) const {
  if (!expected_) {
    expected_ = {gradients<double>(*this, false, false), gradients<float>(*this, true, false),
                 gradients<double>(*this, false, true)};
  }
  const int bits = dtype_ == DType::kBFloat16 ? 7 : 10;
  std::string text;
  const auto check = [&](const char* name, const Matrix Gradients::* of) {
    if (!text.empty() || (found.*of).data.empty()) return;
    text = compare(name, found.*of, expected_->reference.*of, expected_->plain.*of,
                   expected_->magnitude.*of, bits);
  };
  check("dq", &Gradients::dq);
  check("dk", &Gradients::dk);
  check("dv", &Gradients::dv);
  return text;
}

}  // namespace fulmen::test
