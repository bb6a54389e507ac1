// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Caches of records (kernels/attention/mla_record.cuh): how many bytes a row has, and that they lie
// as its layout says.

#include "core/arrays.h"
#include "core/error.h"
#include "kernels/attention/mla_record.cuh"

namespace fulmen {

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
