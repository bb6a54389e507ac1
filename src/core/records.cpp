// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arrays of 8 bits: their scales; and caches of records (kernels/attention/mla_record.cuh), how
// many bytes a row has, and that they lie as its layout says.

#include "core/arrays.h"
#include "core/error.h"
#include "core/problem.h"
#include "kernels/attention/mla_record.cuh"

namespace fulmen {

DType computed_dtype(const Arrays& arrays) {
  const DType q = arrays[Array::kQ].dtype;
  return is_quantised(q) ? arrays[Array::kO].dtype : q;
}

// Scales are of quantised q, k and v, and both are of forward calls.
void check_quantised(const Arrays& arrays, Call call) {
  const DType q = arrays[Array::kQ].dtype;
  const DType k = arrays[Array::kK].dtype;
  for (const Array scale : kScaleArrays) {
    const bool is_of_q = scale == Array::kQScale;
    const DType scaled = is_of_q ? q : k;
    if (!arrays[scale].present() || (is_quantised(scaled) && !is_record(scaled))) continue;
    refuse(sentence(name(scale), " is given where ", is_of_q ? "q" : "k", " is ", name(scaled),
                    "; scales are of float8_e4m3fn, float8_e5m2 and int8: leave it out"));
  }
  if (call != Call::kBackward || !is_quantised(k)) return;
  const bool is_all = is_quantised(q);
  throw Error(
      Status::kUnsupported,
      sentence("backward does not take ", is_all ? "q, " : "", "k and v of ", name(k),
               "; gradients are of float32 and 16-bit numbers: pass scale * ",
               is_all ? "q, scale * k and scale * v in one of these" : "k in the dtype of q"));
}

// Of v, for each dim or for each row.
void check_channel_scales(const Problem& problem) {
  const Tensor& scale = problem.arrays[Array::kVScale];
  const bool by_rows = scale.strides[2] != 0 || (problem.is_paged() && scale.strides[0] != 0);
  if (!problem.has_channel_scales() || !by_rows) return;
  throw Error(Status::kShape, sentence("v_scale has an extent of ", problem.dim_v,
                                       " along dim_v beside others "
                                       "along rows",
                                       problem.is_paged() ? " or pages" : "",
                                       "; allowed is one of them: fold one into the numbers"));
}

Sizes with_records(Sizes sizes, i64 dims, const char* rows, const char* cache) {
  if (!is_record_dim(dims)) {
    throw Error(Status::kShape, sentence(rows, " has head dim ", dims, " where ", cache,
                                         " is uint8, records; allowed is ", kRecord656.dims,
                                         " with rows of ", kRecord656.bytes, " bytes, ",
                                         kRecord584.dims, " with ", kRecord584.bytes));
  }
  sizes[Axis::kDimQk] = record_layout(dims).bytes;
  return sizes;
}

void check_records(const Tensor& cache, const char* subject, i64 dims) {
  const RecordLayout& layout = record_layout(dims);
  const bool are_in_order = layout.has_page_scales() && cache.shape[2] > 1;
  if (cache.strides[3] == 1 && (!are_in_order || cache.strides[2] == layout.bytes)) return;
  refuse(sentence(subject, " has strides ", cache.strides[2], " and ", cache.strides[3],
                  " on its last two axes; bytes of records are neighbours",
                  layout.has_page_scales() ? ", and rows of a page 584 bytes apart" : ""));
}

}  // namespace fulmen
