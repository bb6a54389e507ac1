// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention with a sliding window and its gradients through the C++ veneer: plan once, run with
// memory of one's own, and compare o and dq with the formulas written out in double. Prints the
// largest errors; the exit code is 0 when they are what float32 allows.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fulmen/fulmen.hpp>
#include <random>
#include <vector>

namespace {

constexpr int kHeads = 4, kRows = 80, kDim = 32, kWindow = 16;

using Array = std::vector<float>;

Array random_array(std::mt19937& random) {
  std::normal_distribution<float> normal;
  Array values(kHeads * kRows * kDim);
  for (float& value : values) value = normal(random);
  return values;
}

const float* row_of(const Array& array, int head, int row) {
  return array.data() + (head * kRows + row) * kDim;
}

double dot(const float* a, const float* b) {
  double sum = 0;
  for (int d = 0; d < kDim; ++d) sum += static_cast<double>(a[d]) * static_cast<double>(b[d]);
  return sum;
}

struct Inputs {
  Array q, k, v, dout;
};

// Row i sees keys i - kWindow .. i. Returns o and dq of one row.
std::pair<std::vector<double>, std::vector<double>> reference_row(const Inputs& in, int head,
                                                                  int row) {
  const double scale = 1 / std::sqrt(static_cast<double>(kDim));
  const int first = std::max(0, row - kWindow);
  std::vector<double> P, dP, o(kDim), dq(kDim);
  double total = 0;
  for (int j = first; j <= row; ++j) {
    P.push_back(std::exp(scale * dot(row_of(in.q, head, row), row_of(in.k, head, j))));
    dP.push_back(dot(row_of(in.dout, head, row), row_of(in.v, head, j)));
    total += P.back();
  }
  double delta = 0;
  for (std::size_t n = 0; n < P.size(); ++n) delta += (P[n] /= total) * dP[n];
  for (std::size_t n = 0; n < P.size(); ++n) {
    const int j = first + static_cast<int>(n);
    for (std::size_t d = 0; d < kDim; ++d) {
      o[d] += P[n] * static_cast<double>(row_of(in.v, head, j)[d]);
      dq[d] += scale * P[n] * (dP[n] - delta) * static_cast<double>(row_of(in.k, head, j)[d]);
    }
  }
  return {o, dq};
}

double difference(const float* got, const std::vector<double>& expected) {
  double error = 0;
  for (std::size_t d = 0; d < kDim; ++d) {
    error = std::max(error, std::abs(static_cast<double>(got[d]) - expected[d]));
  }
  return error;
}

int compute() {
  std::mt19937 random(1);
  Inputs in{random_array(random), random_array(random), random_array(random), random_array(random)};
  Array o(in.q.size()), dq(in.q.size()), stats(kHeads * kRows * 2);
  const fulmen::Problem problem{.causal = true, .window_left = kWindow};
  fulmen::Tensors tensors{.q = fulmen::tensor(in.q, {kHeads, kRows, kDim}),
                          .k = fulmen::tensor(in.k, {kHeads, kRows, kDim}),
                          .v = fulmen::tensor(in.v, {kHeads, kRows, kDim}),
                          .o = fulmen::tensor(o, {kHeads, kRows, kDim}),
                          .stats = fulmen::tensor(stats, {kHeads, kRows, 2})};

  const fulmen::Plan forward(problem, tensors, fulmen::Operation::kForward);
  std::vector<std::byte> workspace(forward.workspace_bytes());
  forward.forward(tensors, workspace);

  tensors.dout = fulmen::tensor(in.dout, {kHeads, kRows, kDim});
  tensors.dq = fulmen::tensor(dq, {kHeads, kRows, kDim});
  fulmen::attention_backward(problem, tensors);

  double o_error = 0, dq_error = 0;
  for (int head = 0; head < kHeads; ++head) {
    for (int row = 0; row < kRows; ++row) {
      const auto [expected_o, expected_dq] = reference_row(in, head, row);
      o_error = std::max(o_error, difference(row_of(o, head, row), expected_o));
      dq_error = std::max(dq_error, difference(row_of(dq, head, row), expected_dq));
    }
  }
  std::printf("fulmen %s: window of %d keys, largest error of o %.2e, of dq %.2e\n",
              fulmen::version().c_str(), kWindow + 1, o_error, dq_error);
  return o_error < 4e-6 && dq_error < 4e-6 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return compute();
  } catch (const fulmen::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
