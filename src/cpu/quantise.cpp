// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_quantise on the CPU: constants and scales of each head by its rows, then the rows, in
// float32 and in the order of the sums of kernels/quantise, so that values have the same bits.

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/quantisation.h"
#include "cpu/backend.h"
#include "cpu/thread_pool.h"

namespace fulmen::cpu {
namespace {

constexpr i64 kRowsOfTask = 64;

// What a thread works with.
struct QuantisedRow {
  float x[kMaxQuantisedDim];
};

i64 rows_in_use(const QuantiseProblem& problem, i64 batch) {
  return problem.lengths.present() ? problem.lengths.index(0, 0, 0, batch) : problem.extents.rows;
}

void load_row(const QuantiseProblem& problem, i64 batch, i64 head, i64 row, float* x) {
  for (i64 d = 0; d < problem.extents.dim; ++d) {
    x[d] = static_cast<float>(problem.x.real(batch, head, row, d));
  }
}

// Hadamard's matrix on each part of the row.
void rotate_row(float* x, i64 dim) {
  const i64 part = rotated_dims(static_cast<i32>(dim));
  for (i64 distance = 1; distance < part; distance *= 2) {
    for (i64 d = 0; d < dim; ++d) {
      if ((d & distance) != 0) continue;
      const float a = x[d], b = x[d + distance];
      x[d] = a + b;
      x[d + distance] = a - b;
    }
  }
  const float factor = inverse_root(static_cast<i32>(part));
  for (i64 d = 0; d < dim; ++d) x[d] *= factor;
}

// R (x - c)
void prepare_row(const QuantiseProblem& problem, i64 batch, i64 head, i64 row, float* x) {
  load_row(problem, batch, head, row, x);
  if (problem.constant.present()) {
    for (i64 d = 0; d < problem.extents.dim; ++d) {
      x[d] -= static_cast<float>(problem.constant.real(batch, head, 0, d));
    }
  }
  if (problem.extents.rotate) rotate_row(x, problem.extents.dim);
}

void find_constant(const QuantiseProblem& problem, i64 batch, i64 head, QuantisedRow& own) {
  const i64 rows = rows_in_use(problem, batch), count = num_sampled(rows),
            dim = problem.extents.dim;
  float mean[kMaxQuantisedDim] = {};
  float gain = 0;
  for (i64 i = 0; i < count; ++i) {
    load_row(problem, batch, head, sampled_row(i, rows), own.x);
    float square = 0;
    for (i64 d = 0; d < dim; ++d) square += own.x[d] * own.x[d];
    if (!(square <= kLargestSquare)) continue;
    gain -= square;
    for (i64 d = 0; d < dim; ++d) mean[d] += own.x[d];
  }
  for (i64 d = 0; d < dim; ++d) {
    mean[d] /= static_cast<float>(max<i64>(count, 1));
    gain += gain_of_constant(mean[d], count);
  }
  for (i64 d = 0; d < dim; ++d) {
    store_bytes(problem.constant.address(batch, head, 0, d), gain >= 0 ? mean[d] : 0.f);
  }
}

float found_scale(const QuantiseProblem& problem, float largest) {
  return std::max(kLeastScale, largest * problem.extents.part);
}

// The magnitudes of numbers that are finite, where they are larger.
void raise_to_row(const QuantiseProblem& problem, const float* x, float* most) {
  for (i64 d = 0; d < problem.extents.dim; ++d) {
    const float magnitude = std::fabs(x[d]);
    if (magnitude > most[d] && magnitude <= kLargestFloat) most[d] = magnitude;
  }
}

float largest_number(const QuantiseProblem& problem, const float* most) {
  return *std::max_element(most, most + problem.extents.dim);
}

// Of a group of heads and batch entries: those whose scales are the same.
void find_group_scales(const QuantiseProblem& problem, i64 group, QuantisedRow& own) {
  const QuantiseExtents& extents = problem.extents;
  const bool has_batch = problem.scale.shape[0] > 1, has_heads = problem.scale.shape[1] > 1;
  const i64 batch = has_batch ? group / problem.scale.shape[1] : 0;
  const i64 head = has_heads ? group % problem.scale.shape[1] : 0;
  float most[kMaxQuantisedDim] = {};
  for (i64 b = batch; b < (has_batch ? batch + 1 : extents.batch); ++b) {
    for (i64 h = head; h < (has_heads ? head + 1 : extents.heads); ++h) {
      for (i64 row = 0; row < rows_in_use(problem, b); ++row) {
        prepare_row(problem, b, h, row, own.x);
        raise_to_row(problem, own.x, most);
      }
    }
  }
  if (!extents.scales_dims) {
    const float scale = found_scale(problem, largest_number(problem, most));
    return store_bytes(problem.scale.address(batch, head, 0, 0), scale);
  }
  for (i64 d = 0; d < extents.dim; ++d) {
    store_bytes(problem.scale.address(batch, head, 0, d), found_scale(problem, most[d]));
  }
}

void quantise_row(const QuantiseProblem& problem, i64 batch, i64 head, i64 row, QuantisedRow& own) {
  const QuantiseExtents& extents = problem.extents;
  if (row < rows_in_use(problem, batch)) {
    prepare_row(problem, batch, head, row, own.x);
  } else {
    std::fill_n(own.x, extents.dim, 0.f);
  }
  if (extents.find_scale && extents.scales_rows) {
    float most[kMaxQuantisedDim] = {};
    raise_to_row(problem, own.x, most);
    const float scale = found_scale(problem, largest_number(problem, most));
    store_bytes(problem.scale.address(batch, head, row, 0), scale);
  }
  for (i64 d = 0; d < extents.dim; ++d) {
    float x = own.x[d];
    if (problem.scale.present()) {
      x /= static_cast<float>(problem.scale.real(batch, head, row, d));
    }
    store_real(problem.values.address(batch, head, row, d), problem.values.dtype,
               static_cast<double>(x));
  }
}

}  // namespace

void quantise(const QuantiseProblem& problem) {
  check_contents(problem);
  const QuantiseExtents& extents = problem.extents;
  const int slots = num_threads();
  std::vector<QuantisedRow> own(static_cast<size_t>(slots));
  const auto each = [&](i64 count, const auto& task) {
    for_each_task(slots, count, [&](int slot, i64 i) { task(i, own[static_cast<size_t>(slot)]); });
  };
  const i64 heads = extents.batch * extents.heads;
  if (extents.find_constant) {
    each(heads, [&](i64 i, QuantisedRow& row) {
      find_constant(problem, i / extents.heads, i % extents.heads, row);
    });
  }
  if (extents.find_scale && !extents.scales_rows) {
    each(problem.scale.shape[0] * problem.scale.shape[1],
         [&](i64 group, QuantisedRow& row) { find_group_scales(problem, group, row); });
  }
  const i64 of_head = ceil_div(extents.rows, kRowsOfTask);
  each(heads * of_head, [&](i64 task, QuantisedRow& own_row) {
    const i64 head = task / max<i64>(of_head, 1), begin = task % max<i64>(of_head, 1) * kRowsOfTask;
    for (i64 row = begin; row < min(begin + kRowsOfTask, extents.rows); ++row) {
      quantise_row(problem, head / extents.heads, head % extents.heads, row, own_row);
    }
  });
}

}  // namespace fulmen::cpu
