// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One call from PyTorch's dispatcher: options that were kept, arrays as they are named, PyTorch's
// current stream.
#pragma once

#include "ffi/arguments.h"
#include "ffi/kept_options.h"
#include "ffi/refusal.h"
#include "ffi/torch_abi.h"

namespace fulmen::ffi {

class TorchCall {
 public:
  explicit TorchCall(const Kept& how) : how_(how), problem_(how.options) {
    fulmen_tensors_init(&arrays_.tensors);
  }

  bool rows_before_heads() const { return how_.rows_before_heads; }

  void name(const char* name, fulmen_tensor fulmen_tensors::* member, const DLTensor& array) {
    arrays_.tensors.*member = view(name, array, {how_.rows_before_heads, false});
    arrays_.place.add(name, array.device);
  }

  void name_inputs(const DLTensor& q, const DLTensor& k, const DLTensor& v) {
    if (q.ndim != how_.rank || k.ndim != how_.rank || v.ndim != how_.rank) {
      throw Refusal{FULMEN_ERROR_SHAPE, "q, k or v has not as many axes as the layout"};
    }
    name("q", &fulmen_tensors::q, q);
    name("k", &fulmen_tensors::k, k);
    name("v", &fulmen_tensors::v, v);
  }

  void name_stats(const DLTensor& stats) {
    arrays_.tensors.stats = view("stats", stats, {});
    arrays_.place.add("stats", stats.device);
  }

  void run(fulmen_status (*function)(const fulmen_problem*, const fulmen_tensors*, void*)) {
    arrays_.settle(&problem_);
    void* stream = nullptr;
    if (arrays_.place.on_gpu()) torch_abi()->get_cuda_stream(arrays_.place.index(), &stream);
    check(function(&problem_, &arrays_.tensors, stream));
  }

 private:
  const Kept& how_;
  fulmen_problem problem_;
  Arrays arrays_;
};

}  // namespace fulmen::ffi
