// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The preconditions of fulmen_merge.

#include "core/merge_problem.h"

#include <algorithm>

#include "core/arrays.h"
#include "core/error.h"

namespace fulmen {
namespace {

using rules::kLseAxes;
using rules::kOAxes;
using rules::kSinkAxes;

std::string part_name(size_t index, const char* member) {
  return sentence("parts[", index, "].", member);
}

void require_dtype(const Tensor& tensor, const std::string& subject, bool is_allowed,
                   const char* allowed) {
  if (is_allowed) return;
  throw Error(Status::kDType,
              sentence(subject, " is ", name(tensor.dtype), "; allowed is ", allowed));
}

void require_float(const Tensor& tensor, const std::string& subject) {
  require_dtype(tensor, subject, is_float(tensor.dtype), "float64, float32, float16 or bfloat16");
}

void require_lse_dtype(const Tensor& tensor, const std::string& subject) {
  require_dtype(tensor, subject,
                is_float(tensor.dtype) && tensor.dtype == accumulator(tensor.dtype),
                "float32 or float64");
}

// Layout and shape of one array; brings it to normal form.
void normalize(Tensor& tensor, const std::string& subject, const AxisList& list,
               const Sizes& sizes) {
  if (!tensor.present()) throw Error(Status::kArgument, sentence(subject, " is missing"));
  check_layout(tensor, subject.c_str(), list, false, Pointers::kChecked);
  check_span(tensor, subject.c_str());
  const Tensor normal = normal_form(tensor, list);
  check_shape(tensor, normal, subject.c_str(), list, sizes);
  tensor = normal;
}

Sizes sizes_of_output(const Tensor& o) {
  if (!o.present()) throw Error(Status::kArgument, "o is missing; it is the array to write");
  check_layout(o, "o", kOAxes, false, Pointers::kChecked);
  const Tensor normal = normal_form(o, kOAxes);
  Sizes sizes{};
  sizes[Axis::kBatch] = normal.shape[0];
  sizes[Axis::kHead] = normal.shape[1];
  sizes[Axis::kQRow] = normal.shape[2];
  sizes[Axis::kDimV] = normal.shape[3];
  return sizes;
}

bool is_same(const Tensor& a, const Tensor& b) {
  return a.data == b.data && a.dtype == b.dtype &&
         std::equal(a.shape, a.shape + kMaxRank, b.shape) &&
         std::equal(a.strides, a.strides + kMaxRank, b.strides);
}

void require_disjoint(const Tensor& out, const char* subject, const Tensor& other,
                      const std::string& other_subject, bool may_be_same) {
  if (!other.present() || !may_overlap(out, other)) return;
  if (may_be_same && is_same(out, other)) return;
  throw Error(Status::kArgument,
              sentence(subject, " overlaps ", other_subject, " in memory; allowed is ",
                       may_be_same ? "the same array, with equal dtype and strides, or another"
                                   : "another array"));
}

void check_output(const MergeProblem& merge, const Tensor& out, const char* subject) {
  if (may_overlap_itself(out)) {
    throw Error(Status::kArgument,
                sentence(subject, " has strides by which two of its elements are one"));
  }
  const bool is_o = &out == &merge.o;
  for (size_t index = 0; index < merge.parts.size(); ++index) {
    const MergePart& part = merge.parts[index];
    require_disjoint(out, subject, part.o, part_name(index, "o"), is_o);
    require_disjoint(out, subject, part.lse, part_name(index, "lse"), !is_o);
  }
  require_disjoint(out, subject, merge.sinks, "sinks", false);
}

}  // namespace

MergeProblem validate_merge(MergeProblem given) {
  if (given.parts.empty()) {
    throw Error(Status::kArgument, "num_parts is 0; a merge needs at least one part");
  }
  const Sizes sizes = sizes_of_output(given.o);
  require_float(given.o, "o");
  normalize(given.o, "o", kOAxes, sizes);
  for (size_t index = 0; index < given.parts.size(); ++index) {
    MergePart& part = given.parts[index];
    normalize(part.o, part_name(index, "o"), kOAxes, sizes);
    require_float(part.o, part_name(index, "o"));
    normalize(part.lse, part_name(index, "lse"), kLseAxes, sizes);
    require_lse_dtype(part.lse, part_name(index, "lse"));
  }
  if (given.sinks.present()) {
    normalize(given.sinks, "sinks", kSinkAxes, sizes);
    require_float(given.sinks, "sinks");
  }
  if (given.lse.present()) {
    normalize(given.lse, "lse", kLseAxes, sizes);
    require_lse_dtype(given.lse, "lse");
    check_output(given, given.lse, "lse");
    require_disjoint(given.lse, "lse", given.o, "o", false);
  }
  check_output(given, given.o, "o");
  return given;
}

}  // namespace fulmen
