// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Preconditions of fulmen_quantise: presence, ranks and null pointers, dtypes, shapes, overlaps;
// then contents, where the host can read them.

#include "core/quantisation.h"

#include <cmath>
#include <iterator>

#include "core/arrays.h"
#include "core/error.h"

namespace fulmen {
namespace {

using enum Axis;

constexpr AxisList kQuantisedRowAxes{4, 2, 0, {kBatch, kHead, kNewRow, kDimQk}, {0, 1, 2, 3}};
constexpr AxisList kConstantAxes{4, 1, 3, {kBatch, kHead, kOne, kDimQk}, {0, 1, 2, 3}};
constexpr AxisList kGroupScaleAxes{4, 1, 4, {kBatch, kHead, kNewRow, kDimQk}, {0, 1, 2, 3}};
constexpr AxisList kCountedRowAxes{1, 1, 0, {kSequence}, {3}};

// In the order of kQuantiseArrays.
constexpr AxisList kQuantiseLists[] = {kQuantisedRowAxes, kQuantisedRowAxes, kConstantAxes,
                                       kGroupScaleAxes, kCountedRowAxes};
static_assert(std::size(kQuantiseLists) == std::size(kQuantiseArrays));

void check_quantise_presence(const QuantiseProblem& given) {
  if (!given.x.present()) refuse("x is missing; (batch, head, row, dim) is needed");
  if (!given.values.present()) refuse("values is missing; it is the array to write");
  const QuantiseExtents& extents = given.extents;
  if (extents.find_constant && !given.constant.present()) {
    refuse("find_constant is 1 and constant is missing; it is the array to write");
  }
  if (extents.find_scale && !given.scale.present()) {
    refuse("find_scale is 1 and scale is missing; it is the array to write");
  }
  if (!(given.headroom >= 1) || !std::isfinite(given.headroom)) {
    refuse(sentence("headroom is ", given.headroom, "; allowed are finite numbers from 1 on"));
  }
}

[[noreturn]] void refuse_quantised_dtype(const char* array, DType dtype, const char* allowed) {
  throw Error(Status::kDType, sentence(array, " is ", name(dtype), "; allowed is ", allowed));
}

void check_quantise_dtypes(const QuantiseProblem& given) {
  const DType x = given.x.dtype, values = given.values.dtype;
  if (x != DType::kFloat32 && x != DType::kFloat16 && x != DType::kBFloat16) {
    refuse_quantised_dtype("x", x, "float32, float16 or bfloat16");
  }
  if (values != x && (!is_quantised(values) || is_record(values))) {
    refuse_quantised_dtype("values", values, "float8_e4m3fn, float8_e5m2, int8, or the dtype of x");
  }
  for (const auto member : {&QuantiseProblem::constant, &QuantiseProblem::scale}) {
    const Tensor& tensor = given.*member;
    if (!tensor.present() || tensor.dtype == DType::kFloat32) continue;
    refuse_quantised_dtype(member == &QuantiseProblem::scale ? "scale" : "constant", tensor.dtype,
                           "float32");
  }
  if (given.lengths.present() && !is_index(given.lengths.dtype)) {
    refuse_quantised_dtype("lengths", given.lengths.dtype, "int32 or int64");
  }
  if (given.scale.present() && values == x) {
    refuse(sentence("scale is given and values is ", name(values),
                    ", as x; scales are of numbers of 8 bits: leave it out"));
  }
}

Sizes measure_quantise(QuantiseProblem& problem) {
  const Tensor x = normal_form(problem.x, kQuantisedRowAxes);
  QuantiseExtents& extents = problem.extents;
  extents.batch = x.shape[0];
  extents.heads = x.shape[1];
  extents.rows = x.shape[2];
  extents.dim = x.shape[3];
  if (extents.dim < 1 || extents.dim > kMaxQuantisedDim) {
    throw Error(Status::kShape, sentence("x has rows of ", extents.dim,
                                         " numbers; allowed is 1 to ", kMaxQuantisedDim));
  }
  Sizes sizes{};
  sizes[kBatch] = sizes[kSequence] = extents.batch;
  sizes[kHead] = extents.heads;
  sizes[kNewRow] = extents.rows;
  sizes[kDimQk] = extents.dim;
  sizes[kOne] = 1;
  return sizes;
}

// What is found has an element for each group that it is of.
void check_found(const QuantiseProblem& problem) {
  const QuantiseExtents& extents = problem.extents;
  if (extents.scales_rows && extents.scales_dims) {
    throw Error(Status::kShape,
                "scale has an element for each row and each dim; allowed is one of the two");
  }
  const Tensor& constant = problem.constant;
  const bool is_whole = constant.shape[0] == extents.batch && constant.shape[1] == extents.heads &&
                        constant.shape[3] == extents.dim;
  if (extents.find_constant && !is_whole) {
    throw Error(Status::kShape,
                sentence("constant has shape ", shape_text(constant),
                         " where find_constant is 1: (", extents.batch, ", ", extents.heads,
                         ", 1, ", extents.dim, ") is needed, one for each head and dim"));
  }
}

void check_quantise_overlap(const QuantiseProblem& problem) {
  for (const QuantiseArray& written : kQuantiseArrays) {
    const Tensor& tensor = problem.*written.member;
    const bool is_written =
        written.member == &QuantiseProblem::values ||
        (written.member == &QuantiseProblem::constant && problem.extents.find_constant) ||
        (written.member == &QuantiseProblem::scale && problem.extents.find_scale);
    if (!is_written) continue;
    if (may_overlap_itself(tensor)) {
      refuse(sentence(written.name, " has strides by which two of its elements are one"));
    }
    for (const QuantiseArray& other : kQuantiseArrays) {
      const Tensor& beside = problem.*other.member;
      if (other.member == written.member || !beside.present()) continue;
      if (may_overlap(tensor, beside)) {
        refuse(sentence(written.name, " overlaps ", other.name,
                        " in memory; allowed is another array"));
      }
    }
  }
}

}  // namespace

QuantiseProblem validate_quantise(QuantiseProblem given) {
  check_quantise_presence(given);
  for (size_t i = 0; i < std::size(kQuantiseArrays); ++i) {
    const Tensor& tensor = given.*kQuantiseArrays[i].member;
    if (!tensor.present()) continue;
    check_layout(tensor, kQuantiseArrays[i].name, kQuantiseLists[i], {}, Pointers::kChecked);
    check_span(tensor, kQuantiseArrays[i].name);
  }
  check_quantise_dtypes(given);
  const Sizes sizes = measure_quantise(given);
  alignas(kMaxPointerAlignment) static char nothing[1];  // an offset may be added to its address
  for (size_t i = 0; i < std::size(kQuantiseArrays); ++i) {
    Tensor& tensor = given.*kQuantiseArrays[i].member;
    if (!tensor.present()) continue;
    Tensor normal = normal_form(tensor, kQuantiseLists[i]);
    check_shape(tensor, normal, kQuantiseArrays[i].name, kQuantiseLists[i], sizes);
    tensor = normal;
    if (normal.data == nullptr) tensor.data = nothing;
  }
  given.extents.scales_rows = given.scale.present() && given.scale.shape[2] > 1;
  given.extents.scales_dims = given.scale.present() && given.scale.shape[3] > 1;
  given.extents.part = static_cast<float>(given.headroom) / largest_of(given.values.dtype);
  check_found(given);
  check_quantise_overlap(given);
  if (given.scale.present() && given.scale.shape[3] == 1) given.scale.strides[3] = 0;
  return given;
}

void check_contents(const QuantiseProblem& problem) {
  if (!problem.lengths.present()) return;
  for (i64 b = 0; b < problem.extents.batch; ++b) {
    const i64 length = problem.lengths.index(0, 0, 0, b);
    if (length >= 0 && length <= problem.extents.rows) continue;
    refuse(sentence("lengths[", b, "] is ", length, "; allowed is 0 to ", problem.extents.rows));
  }
}

}  // namespace fulmen
