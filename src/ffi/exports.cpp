// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What Python calls: the C ABI of fulmen.h, one export each, in the calling convention of
// apache-tvm-ffi. Each reads its arguments in order (arguments.h), makes one call, and returns a
// number. An error is raised in Python under the name of its status; python/fulmen/errors.py has
// the one table from these names to classes. The interpreter lock is released during a call.

#include <dlfcn.h>

#include <exception>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/refusal.h"

namespace fulmen::ffi {
namespace {

// tvm-ffi has loaded its library for all to see before it calls us: nothing is linked.
void raise(const char* kind, const char* sentence) {
  using SetRaised = void (*)(const char* kind, const char* message);
  static const auto set_raised =
      reinterpret_cast<SetRaised>(dlsym(RTLD_DEFAULT, "TVMFFIErrorSetRaisedFromCStr"));
  if (set_raised != nullptr) set_raised(kind, sentence);
}

// No exception may leave: tvm-ffi ends the process on those that it does not know.
int guarded(int64_t (*body)(Arguments), const TVMFFIAny* args, int32_t num_args,
            TVMFFIAny* result) {
  try {
    *result = TVMFFIAny{kTVMFFIInt, 0, {body(Arguments(args, num_args))}};
    return 0;
  } catch (const Refusal& refusal) {
    raise(fulmen_status_name(refusal.status), refusal.sentence.c_str());
  } catch (const std::exception& error) {
    raise(fulmen_status_name(FULMEN_ERROR_INTERNAL), error.what());
  } catch (...) {
    raise(fulmen_status_name(FULMEN_ERROR_INTERNAL), "an unknown exception left the library");
  }
  return -1;
}

// A caller's buffer of bytes: workspace, or room for a text.
struct Bytes {
  char* data = nullptr;
  size_t size = 0;
};

Bytes bytes(Arguments& in, const char* name) {
  const DLTensor* array = in.array(name);
  if (array == nullptr) return {};
  if (array->ndim != 1 || array->dtype.bits != 8 || array->device.device_type != kDLCPU) {
    throw Refusal{FULMEN_ERROR_ARGUMENT, std::string(name) + " is not a vector of bytes"};
  }
  return {static_cast<char*>(array->data) + array->byte_offset,
          static_cast<size_t>(array->shape[0])};
}

fulmen_plan* plan_of(Arguments& in) { return static_cast<fulmen_plan*>(in.pointer("plan")); }

// (options, arrays)
int64_t forward(Arguments in) {
  const fulmen_problem problem = in.options();
  const fulmen_tensors tensors = in.arrays();
  check(fulmen_attention(&problem, &tensors, nullptr));
  return 0;
}

// (options, arrays)
int64_t backward(Arguments in) {
  const fulmen_problem problem = in.options();
  const fulmen_tensors tensors = in.arrays();
  check(fulmen_attention_backward(&problem, &tensors, nullptr));
  return 0;
}

// (operation, options, arrays) -> the plan, as a number
int64_t plan_create(Arguments in) {
  const auto operation = static_cast<fulmen_operation>(in.integer("operation"));
  const fulmen_problem problem = in.options();
  const fulmen_tensors tensors = in.arrays();
  fulmen_plan* plan = nullptr;
  check(fulmen_plan_create(&problem, &tensors, operation, &plan));
  return reinterpret_cast<intptr_t>(plan);
}

// (plan)
int64_t plan_destroy(Arguments in) {
  fulmen_plan_destroy(plan_of(in));
  return 0;
}

// (plan) -> bytes
int64_t plan_workspace_bytes(Arguments in) {
  return static_cast<int64_t>(fulmen_plan_workspace_bytes(plan_of(in)));
}

// (plan, workspace, arrays)
int64_t plan_forward(Arguments in) {
  const fulmen_plan* plan = plan_of(in);
  const Bytes workspace = bytes(in, "workspace");
  const fulmen_tensors tensors = in.arrays();
  check(fulmen_forward(plan, &tensors, workspace.data, workspace.size, nullptr));
  return 0;
}

// (plan, workspace, arrays)
int64_t plan_backward(Arguments in) {
  const fulmen_plan* plan = plan_of(in);
  const Bytes workspace = bytes(in, "workspace");
  const fulmen_tensors tensors = in.arrays();
  check(fulmen_backward(plan, &tensors, workspace.data, workspace.size, nullptr));
  return 0;
}

// (plan, text) -> bytes that the whole text takes
int64_t plan_explain(Arguments in) {
  const fulmen_plan* plan = plan_of(in);
  const Bytes text = bytes(in, "text");
  size_t needed = 0;
  check(fulmen_plan_explain(plan, text.data, text.size, &needed));
  return static_cast<int64_t>(needed);
}

// (text, operation, options, arrays) -> bytes that the whole text takes
int64_t explain(Arguments in) {
  const Bytes text = bytes(in, "text");
  const auto operation = static_cast<fulmen_operation>(in.integer("operation"));
  const fulmen_problem problem = in.options();
  const fulmen_tensors tensors = in.arrays();
  size_t needed = 0;
  check(fulmen_explain(&problem, &tensors, operation, text.data, text.size, &needed));
  return static_cast<int64_t>(needed);
}

// (text) -> bytes that the whole text takes
int64_t build_info(Arguments in) {
  const Bytes text = bytes(in, "text");
  size_t needed = 0;
  check(fulmen_build_info(text.data, text.size, &needed));
  return static_cast<int64_t>(needed);
}

// (visible: uint8, options, arrays)
int64_t dense_mask(Arguments in) {
  const fulmen_tensor visible = in.tensor("visible", false, true);
  const fulmen_problem problem = in.options();
  const fulmen_tensors tensors = in.arrays();
  check(fulmen_dense_mask(&problem, &tensors, &visible));
  return 0;
}

// (reinterpret, rows_before_heads, sinks, o, lse, then o and lse of each part)
int64_t merge(Arguments in) {
  int64_t bits = in.integer("reinterpret");
  const bool rows_before_heads = in.integer("rows_before_heads") != 0;
  const auto next = [&](const char* name, bool layout) {
    const bool reinterpret = (bits & 1) != 0;
    bits >>= 1;
    return in.tensor(name, rows_before_heads && layout, reinterpret);
  };
  const fulmen_tensor sinks = next("sinks", false);
  const fulmen_tensor o = next("o", true);
  const fulmen_tensor lse = next("lse", false);
  std::vector<fulmen_merge_part> parts;
  while (!in.empty()) {
    fulmen_merge_part& part = parts.emplace_back();
    fulmen_merge_part_init(&part);
    part.o = next("o of a part", true);
    part.lse = next("lse of a part", false);
  }
  check(fulmen_merge(parts.data(), parts.size(), &sinks, &o, &lse, nullptr));
  return 0;
}

}  // namespace
}  // namespace fulmen::ffi

#define FULMEN_FFI_EXPORT(verb)                                                                \
  extern "C" FULMEN_API int __tvm_ffi_fulmen_##verb(void*, const fulmen::ffi::TVMFFIAny* args, \
                                                    int32_t num_args,                          \
                                                    fulmen::ffi::TVMFFIAny* result) {          \
    return fulmen::ffi::guarded(fulmen::ffi::verb, args, num_args, result);                    \
  }

FULMEN_FFI_EXPORT(forward)
FULMEN_FFI_EXPORT(backward)
FULMEN_FFI_EXPORT(plan_create)
FULMEN_FFI_EXPORT(plan_destroy)
FULMEN_FFI_EXPORT(plan_workspace_bytes)
FULMEN_FFI_EXPORT(plan_forward)
FULMEN_FFI_EXPORT(plan_backward)
FULMEN_FFI_EXPORT(plan_explain)
FULMEN_FFI_EXPORT(explain)
FULMEN_FFI_EXPORT(build_info)
FULMEN_FFI_EXPORT(dense_mask)
FULMEN_FFI_EXPORT(merge)
