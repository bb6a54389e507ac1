// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From tvm-ffi arguments to the structs of fulmen.h.

#include "ffi/arguments.h"

#include <string>

#include "ffi/refusal.h"
#include "ffi/tensor_view.h"

namespace fulmen::ffi {
namespace {

struct NamedArray {
  const char* name;
  fulmen_tensor fulmen_tensors::* member;
  bool has_head_and_row;  // axes (.., head, row, dim): the layout of the call applies
};

constexpr NamedArray kArrays[] = {
    {"q", &fulmen_tensors::q, true},
    {"k", &fulmen_tensors::k, true},
    {"v", &fulmen_tensors::v, true},
    {"bias", &fulmen_tensors::bias, false},
    {"mask", &fulmen_tensors::mask, false},
    {"alibi_slopes", &fulmen_tensors::alibi_slopes, false},
    {"sinks", &fulmen_tensors::sinks, false},
    {"q_lengths", &fulmen_tensors::q_lengths, false},
    {"kv_lengths", &fulmen_tensors::kv_lengths, false},
    {"cu_q", &fulmen_tensors::cu_q, false},
    {"cu_kv", &fulmen_tensors::cu_kv, false},
    {"q_ids", &fulmen_tensors::q_ids, false},
    {"kv_ids", &fulmen_tensors::kv_ids, false},
    {"o", &fulmen_tensors::o, true},
    {"lse", &fulmen_tensors::lse, false},
    {"stats", &fulmen_tensors::stats, false},
    {"do", &fulmen_tensors::dout, true},
    {"dlse", &fulmen_tensors::dlse, false},
    {"dq", &fulmen_tensors::dq, true},
    {"dk", &fulmen_tensors::dk, true},
    {"dv", &fulmen_tensors::dv, true},
    {"dbias", &fulmen_tensors::dbias, false},
    {"dsinks", &fulmen_tensors::dsinks, false},
};

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

void* Arguments::pointer(const char* name) {
  return reinterpret_cast<void*>(static_cast<intptr_t>(integer(name)));
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

fulmen_tensor Arguments::tensor(const char* name, bool rows_before_heads, bool reinterpret) {
  const DLTensor* source = array(name);
  if (source != nullptr) return view(name, *source, {rows_before_heads, reinterpret});
  fulmen_tensors none;
  fulmen_tensors_init(&none);
  return none.q;
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
  return p;
}

fulmen_tensors Arguments::arrays() {
  fulmen_tensors result;
  fulmen_tensors_init(&result);
  const int64_t reinterpret = integer("reinterpret");
  const bool rows_before_heads = integer("rows_before_heads") != 0;
  int index = 0;
  for (const NamedArray& entry : kArrays) {
    const bool reinterpreted = ((reinterpret >> index++) & 1) != 0;
    const DLTensor* source = array(entry.name);
    if (source == nullptr) continue;
    result.*entry.member =
        view(entry.name, *source, {rows_before_heads && entry.has_head_and_row, reinterpreted});
  }
  return result;
}

}  // namespace fulmen::ffi
