// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From tvm-ffi arguments to the structs of fulmen.h.

#include "ffi/arguments.h"

#include <dlfcn.h>

#include <string>

#include "ffi/named_arrays.h"
#include "ffi/refusal.h"
#include "ffi/tensor_view.h"

namespace fulmen::ffi {
namespace {

[[noreturn]] void refuse(const char* name, const char* expected) {
  throw Refusal{FULMEN_ERROR_DTYPE, std::string(name) + " is not " + expected};
}

}  // namespace

const TVMFFIAny& Arguments::take(const char* name) {
  if (empty()) refuse(name, "given");
  return *next_++;
}

int64_t Arguments::integer(const char* name) {
  const TVMFFIAny& value = take(name);
  if (value.type_index != kTVMFFIInt && value.type_index != kTVMFFIBool) refuse(name, "an integer");
  return value.v_int64;
}

double Arguments::real(const char* name) {
  const TVMFFIAny& value = take(name);
  if (value.type_index == kTVMFFIFloat) return value.v_float64;
  if (value.type_index != kTVMFFIInt && value.type_index != kTVMFFIBool) refuse(name, "a number");
  return static_cast<double>(value.v_int64);
}

fulmen_plan* Arguments::plan() {
  return reinterpret_cast<fulmen_plan*>(static_cast<intptr_t>(integer("plan")));
}

const DLTensor* Arguments::array(const char* name) {
  if (empty()) return nullptr;
  const TVMFFIAny& value = *next_++;
  switch (value.type_index) {
    case kTVMFFINone:
      return nullptr;
    case kTVMFFIDLTensorPtr:
      return static_cast<const DLTensor*>(value.v_ptr);
    case kTVMFFITensor:
      return reinterpret_cast<const DLTensor*>(static_cast<const char*>(value.v_ptr) +
                                               kTVMFFIObjectBytes);
    default:
      refuse(name, "an array: NumPy, PyTorch, JAX or anything else with DLPack is");
  }
}

Bytes Arguments::bytes(const char* name, Place* place) {
  const DLTensor* source = array(name);
  if (source == nullptr) return {};
  if (source->ndim != 1 || source->dtype.bits != 8) {
    throw Refusal{FULMEN_ERROR_ARGUMENT, std::string(name) + " is not a vector of bytes"};
  }
  place->add(name, source->device);
  return {static_cast<char*>(source->data) + source->byte_offset,
          static_cast<size_t>(source->shape[0])};
}

Bytes Arguments::host_bytes(const char* name) {
  Place place;
  const Bytes result = bytes(name, &place);
  if (!place.on_gpu()) return result;
  throw Refusal{FULMEN_ERROR_ARGUMENT, std::string(name) + " is not in host memory"};
}

fulmen_problem Arguments::options() {
  fulmen_problem p;
  fulmen_problem_init(&p);
  p.scale = real("scale");
  p.softcap = real("softcap");
  p.causal = static_cast<int32_t>(integer("causal"));
  p.alignment = static_cast<fulmen_alignment>(integer("alignment"));
  p.window_left = integer("window_left");
  p.window_right = integer("window_right");
  p.prefix = integer("prefix");
  p.chunk = integer("chunk");
  p.dropout_p = real("dropout_p");
  p.rng_seed = static_cast<uint64_t>(integer("rng_seed"));
  p.rng_offset = static_cast<uint64_t>(integer("rng_offset"));
  p.max_q = integer("max_q");
  p.max_kv = integer("max_kv");
  p.deterministic = static_cast<int32_t>(integer("deterministic"));
  p.batch_invariant = static_cast<int32_t>(integer("batch_invariant"));
  p.backend = static_cast<fulmen_backend>(integer("backend"));
  p.implementation = static_cast<fulmen_implementation>(integer("implementation"));
  p.precision = static_cast<fulmen_precision>(integer("precision"));
  return p;
}

std::string Arguments::text(const char* name) {
  const Bytes source = host_bytes(name);
  return source.data == nullptr ? std::string() : std::string(source.data, source.size);
}

Target Arguments::target() {
  Target result;
  result.device = static_cast<int32_t>(integer("device"));
  result.device_name = text("device_name");
  result.without = static_cast<uint32_t>(integer("without"));
  return result;
}

Arrays Arguments::read(bool with_pointers) {
  Arrays result;
  fulmen_tensors_init(&result.tensors);
  const int64_t reinterpret = integer("reinterpret");
  const bool rows_before_heads = integer("rows_before_heads") != 0;
  int index = 0;
  for (const NamedArray& entry : kArrays) {
    const bool reinterpreted = ((reinterpret >> index++) & 1) != 0;
    const DLTensor* source = array(entry.name);
    if (source == nullptr) continue;
    fulmen_tensor& tensor = result.tensors.*entry.member;
    tensor =
        view(entry.name, *source, {rows_before_heads && entry.has_head_and_row, reinterpreted});
    if (with_pointers) {
      result.place.add(entry.name, source->device);
    } else {
      tensor.data = nullptr;
    }
  }
  return result;
}

Arrays Arguments::arrays() { return read(true); }
Arrays Arguments::extents() { return read(false); }

void Arrays::settle(fulmen_problem* problem) const {
  if (place.on_gpu()) {
    if (problem->device < 0) problem->device = place.index();
    if (problem->backend == FULMEN_BACKEND_AUTO) problem->backend = FULMEN_BACKEND_CUDA;
    return;
  }
  const bool is_gpu_asked =
      problem->backend == FULMEN_BACKEND_CUDA ||
      (problem->backend == FULMEN_BACKEND_AUTO && problem->implementation >= FULMEN_NAIVE);
  if (is_gpu_asked) {
    throw Refusal{FULMEN_ERROR_ARGUMENT,
                  "the arrays are in host memory and backend or implementation names a GPU; copy "
                  "them to the GPU, or use backend='cpu' with implementation='auto'"};
  }
  if (problem->backend == FULMEN_BACKEND_AUTO &&
      problem->implementation == FULMEN_IMPLEMENTATION_AUTO) {
    problem->backend = FULMEN_BACKEND_CPU;
  }
}

// tvm-ffi has loaded its library for all to see before it calls us: nothing is linked.
void* Arrays::stream(int64_t given) const {
  if (!place.on_gpu()) return nullptr;
  if (given != kCurrentStream) return reinterpret_cast<void*>(static_cast<intptr_t>(given));
  using GetStream = void* (*)(int32_t device_type, int32_t device_id);
  static const auto get_stream =
      reinterpret_cast<GetStream>(dlsym(RTLD_DEFAULT, "TVMFFIEnvGetStream"));
  return get_stream == nullptr ? nullptr : get_stream(kDLCUDA, place.index());
}

}  // namespace fulmen::ffi
