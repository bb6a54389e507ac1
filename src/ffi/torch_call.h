// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One call from PyTorch's dispatcher: options, arrays by their places, PyTorch's current stream.
#pragma once

#include <string>

#include "ffi/arguments.h"
#include "ffi/kept_options.h"
#include "ffi/named_arrays.h"
#include "ffi/refusal.h"
#include "ffi/torch_abi.h"

namespace fulmen::ffi {

class TorchCall {
 public:
  explicit TorchCall(const Kept& how)
      : problem_(how.options), rank_(how.rank), rows_before_heads_(how.rows_before_heads) {
    fulmen_tensors_init(&arrays_.tensors);
  }

  bool rows_before_heads() const { return rows_before_heads_; }

  // Throws Refusal: an array that fulmen does not know, or q, k or v without the layout's axes.
  void add(ArrayPlace place, const DLTensor& array) {
    const NamedArray& entry = kArrays[place];
    if (place <= kV && array.ndim != rank_) {
      throw Refusal{FULMEN_ERROR_SHAPE,
                    std::string(entry.name) + " has " + std::to_string(array.ndim) +
                        " axes; the layout of the call names " + std::to_string(rank_)};
    }
    const bool exchanged = rows_before_heads_ && entry.has_head_and_row;
    arrays_.tensors.*entry.member = view(entry.name, array, {exchanged, false});
    arrays_.place.add(entry.name, array.device);
  }

  void set_lots(uint64_t seed, uint64_t offset) {
    problem_.rng_seed = seed;
    problem_.rng_offset = offset;
  }

  void run(fulmen_status (*function)(const fulmen_problem*, const fulmen_tensors*, void*)) {
    arrays_.settle(&problem_);
    void* stream = nullptr;
    if (arrays_.place.on_gpu()) torch_abi()->get_cuda_stream(arrays_.place.index(), &stream);
    check(function(&problem_, &arrays_.tensors, stream));
  }

 private:
  fulmen_problem problem_;
  int64_t rank_;
  bool rows_before_heads_;
  Arrays arrays_;
};

}  // namespace fulmen::ffi
