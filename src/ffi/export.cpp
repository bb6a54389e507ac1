// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From tvm-ffi arguments to the structs of fulmen.h.
// How an error leaves the library: under the name of its status, for python/fulmen/errors.py.

#include "ffi/export.h"

#include <dlfcn.h>

#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include "ffi/arrays.h"

namespace fulmen::ffi {
namespace {

[[noreturn]] void refuse(const char* name, const char* expected) {
  throw Refusal{FULMEN_ERROR_DTYPE, std::string(name) + " is not " + expected};
}

Bytes bytes_of(const char* name, const DLTensor& source) {
  if (source.ndim != 1 || source.dtype.bits != 8) {
    throw Refusal{FULMEN_ERROR_ARGUMENT, std::string(name) + " is not a vector of bytes"};
  }
  return {static_cast<char*>(source.data) + source.byte_offset,
          static_cast<size_t>(source.shape[0])};
}

}  // namespace

Bytes workspace_of(const DLTensor* vector, const MemorySpace& arrays) {
  if (vector == nullptr) return {};
  MemorySpace space;
  space.add("workspace", vector->device);
  const Bytes found = bytes_of("workspace", *vector);
  if (found.data == nullptr || space.device() == arrays.device()) return found;
  throw Refusal{FULMEN_ERROR_ARGUMENT, "workspace is not where the arrays of the call are"};
}

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

Bytes Arguments::host_bytes(const char* name) {
  const DLTensor* source = array(name);
  if (source == nullptr) return {};
  MemorySpace space;
  space.add(name, source->device);
  if (!space.on_gpu()) return bytes_of(name, *source);
  throw Refusal{FULMEN_ERROR_ARGUMENT, std::string(name) + " is not in host memory"};
}

fulmen_problem Arguments::options() {
  const TVMFFIByteArray bytes = content("options");
  return problem_of(bytes.data, bytes.size);
}

TVMFFIByteArray Arguments::content(const char* name) {
  const TVMFFIAny& value = take(name);
  switch (value.type_index) {
    case kTVMFFINone:
      return {nullptr, 0};
    case kTVMFFIRawStr:
      return {static_cast<const char*>(value.v_ptr), std::strlen(static_cast<char*>(value.v_ptr))};
    case kTVMFFIByteArrayPtr:
      return *static_cast<const TVMFFIByteArray*>(value.v_ptr);
    case kTVMFFISmallStr:
    case kTVMFFISmallBytes:
      return {reinterpret_cast<const char*>(&value.v_int64), value.small_size};
    case kTVMFFIStr:
    case kTVMFFIBytes:
      return *reinterpret_cast<const TVMFFIByteArray*>(static_cast<const char*>(value.v_ptr) +
                                                       kTVMFFIObjectBytes);
    default:
      refuse(name, "str or bytes");
  }
}

OwnDTypes Arguments::own_dtypes() {
  if (!empty() && next_->type_index == kTVMFFIInt) {
    integer("dtypes");
    return OwnDTypes({nullptr, 0});
  }
  return OwnDTypes(content("dtypes"));
}

std::string Arguments::text(const char* name) {
  if (!empty() && (next_->type_index == kTVMFFITensor || next_->type_index == kTVMFFIDLTensorPtr)) {
    const Bytes source = host_bytes(name);
    return std::string(source.data, source.size);
  }
  const TVMFFIByteArray source = content(name);
  return source.data == nullptr ? std::string() : std::string(source.data, source.size);
}

std::optional<std::string> Arguments::optional_text(const char* name) {
  if (!empty() && next_->type_index == kTVMFFINone) return ++next_, std::nullopt;
  return text(name);
}

Planned Arguments::planned() {
  Planned result;
  result.problem = options();
  result.device_name = text("device_name");
  result.without = static_cast<uint32_t>(integer("without"));
  result.tile = text("tile");
  return result;
}

Arrays Arguments::read(bool with_pointers) {
  Arrays result;
  OwnDTypes dtypes = own_dtypes();
  const bool rows_before_heads = Layout::of(integer("layout")).rows_before_heads;
  for (size_t index = 0; index < kNumArrays; ++index) {
    const ArrayRow& row = kArrays[index];
    const ViewOptions options{rows_before_heads, dtypes.next()};
    const DLTensor* source = array(row.word);
    if (source == nullptr) continue;
    if (with_pointers) {
      result.add(static_cast<ArrayIndex>(index), *source, options);
    } else {
      result.add_extents(static_cast<ArrayIndex>(index), *source, options);
    }
  }
  return result;
}

Arrays Arguments::arrays() { return read(true); }
Arrays Arguments::extents() { return read(false); }

namespace {

// tvm-ffi has loaded its library for all to see before it calls us: nothing is linked.
template <typename Function>
Function found(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

TVMFFIByteArray text(std::string_view of) { return {of.data(), of.size()}; }

// Without a backtrace: tvm-ffi would read the symbols of every library of the process for it, which
// takes seconds beside PyTorch, and the frames of a refusal say nothing to its reader.
void raise(std::string_view kind, std::string_view sentence) {
  using Create = int (*)(const TVMFFIByteArray* kind, const TVMFFIByteArray* message,
                         const TVMFFIByteArray* backtrace, void** error);
  using Take = void (*)(void* error);
  using Release = int (*)(void* error);
  static const auto create = found<Create>("TVMFFIErrorCreate");
  static const auto set_raised = found<Take>("TVMFFIErrorSetRaised");
  static const auto release = found<Release>("TVMFFIObjectDecRef");
  if (create == nullptr || set_raised == nullptr || release == nullptr) return;
  const TVMFFIByteArray kind_text = text(kind), message = text(sentence), backtrace = text("");
  void* error = nullptr;
  if (create(&kind_text, &message, &backtrace, &error) != 0) return;
  set_raised(error);
  release(error);
}

}  // namespace

// No exception may leave: tvm-ffi ends the process on those that it does not know.
int guarded(Body body, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  try {
    *result = TVMFFIAny{kTVMFFIInt, 0, {body(Arguments(args, num_args))}};
    return 0;
  } catch (const Refusal& refusal) {
    raise(fulmen_status_name(refusal.status), refusal.sentence);
  } catch (const std::exception& error) {
    raise(fulmen_status_name(FULMEN_ERROR_INTERNAL), error.what());
  } catch (...) {
    raise(fulmen_status_name(FULMEN_ERROR_INTERNAL), "an unknown exception left the library");
  }
  return -1;
}

}  // namespace fulmen::ffi
