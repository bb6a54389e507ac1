// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What JAX calls: handlers of XLA's foreign function interface, registered by python/fulmen/jax.py.
// A handler turns the buffers of a compiled program into the arguments that the Python binding
// passes, and makes the same call on XLA's stream. Attributes of a call, each a vector of int64:
//
//   numbers   the options in their order; of real ones the 64 bits of the double
//   form      which numbers are real (bit i), rows_before_heads
//   places    for each argument, then each result: which array of fulmen_tensors it is

#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/named_arrays.h"
#include "ffi/refusal.h"
#include "ffi/xla_ffi_abi.h"

namespace fulmen::ffi {
namespace {

using Call = fulmen_status (*)(const fulmen_problem*, const fulmen_tensors*, void*);

constexpr size_t kNumArrays = std::size(kArrays);
constexpr size_t kSeed = 9;  // of the numbers; the offset follows
constexpr int kMaxRank = FULMEN_MAX_RANK;

struct Numbers {
  const int64_t* data = nullptr;
  size_t size = 0;
};

Numbers attribute(const XlaAttributes& attributes, const char* name) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const XlaText& text = *attributes.names[i];
    if (std::string_view(text.data, text.size) != name) continue;
    const auto* array = static_cast<const XlaArray*>(attributes.items[i]);
    if (attributes.types[i] != kXlaIsArray || array->dtype != kXlaS64) break;
    return {static_cast<const int64_t*>(array->data), array->size};
  }
  throw Refusal{FULMEN_ERROR_ARGUMENT, std::string(name) + " is not a vector of int64"};
}

DLDataType dtype_of(int32_t dtype) {
  switch (dtype) {
    case kXlaPred:
      return {kDLBool, 8, 1};
    case kXlaS32:
      return {kDLInt, 32, 1};
    case kXlaS64:
      return {kDLInt, 64, 1};
    case kXlaU32:
      return {kDLUInt, 32, 1};
    case kXlaF16:
      return {kDLFloat, 16, 1};
    case kXlaF32:
      return {kDLFloat, 32, 1};
    case kXlaF64:
      return {kDLFloat, 64, 1};
    case kXlaBf16:
      return {kDLBfloat, 16, 1};
    default:
      throw Refusal{FULMEN_ERROR_DTYPE,
                    "an array has XLA's dtype " + std::to_string(dtype) +
                        "; fulmen knows float64, float32, float16, bfloat16, bool, int32, int64"};
  }
}

// The arrays of one call as DLPack has them, in memory that lives as long as the call.
class Frame {
 public:
  Frame(const XlaCallFrame& frame, DLDevice device) : device_(device) {
    const Numbers places = attribute(frame.attributes, "places");
    const auto num_arguments = static_cast<size_t>(frame.arguments.size);
    if (places.size != num_arguments + static_cast<size_t>(frame.results.size)) {
      throw Refusal{FULMEN_ERROR_INTERNAL, "places does not name each argument and result"};
    }
    for (size_t i = 0; i < places.size; ++i) {
      const bool is_result = i >= num_arguments;
      const XlaBuffers& buffers = is_result ? frame.results : frame.arguments;
      const size_t index = is_result ? i - num_arguments : i;
      const auto place = static_cast<size_t>(places.data[i]);
      if (buffers.types[index] != kXlaIsBuffer || place >= kNumArrays) {
        throw Refusal{FULMEN_ERROR_INTERNAL, "places names what is no array"};
      }
      set(place, *static_cast<const XlaBuffer*>(buffers.items[index]));
    }
  }

  // The arguments of the binding: options, stream, reinterpret, rows_before_heads, arrays.
  std::vector<TVMFFIAny> arguments(const XlaAttributes& attributes) {
    const Numbers numbers = attribute(attributes, "numbers");
    const Numbers form = attribute(attributes, "form");
    if (form.size != 2 || numbers.size <= kSeed + 1) {
      throw Refusal{FULMEN_ERROR_INTERNAL, "numbers or form is too short"};
    }
    std::vector<TVMFFIAny> made;
    for (size_t i = 0; i < numbers.size; ++i) {
      const bool is_real = ((form.data[0] >> i) & 1) != 0;
      made.push_back(integer(numbers.data[i]));
      if (is_real) made.back().type_index = kTVMFFIFloat;
    }
    if (given_[kRng] && device_.device_type == kDLCPU) {  // the lots are numbers there
      int64_t lots[2];
      std::memcpy(lots, tensors_[kRng].data, sizeof lots);
      made[kSeed].v_int64 = lots[0];
      made[kSeed + 1].v_int64 = lots[1];
      given_[kRng] = false;
    }
    for (const int64_t number : {int64_t{0}, int64_t{0}, form.data[1]}) {
      made.push_back(integer(number));
    }
    for (size_t i = 0; i < kNumArrays; ++i) {
      TVMFFIAny array{kTVMFFINone, 0, {0}};
      if (given_[i]) {
        array.type_index = kTVMFFIDLTensorPtr;
        array.v_ptr = &tensors_[i];
      }
      made.push_back(array);
    }
    return made;
  }

 private:
  static TVMFFIAny integer(int64_t value) { return {kTVMFFIInt, 0, {value}}; }

  void set(size_t place, const XlaBuffer& buffer) {
    if (buffer.rank > kMaxRank) {
      throw Refusal{FULMEN_ERROR_SHAPE, "an array has more than 4 axes"};
    }
    const auto rank = static_cast<int32_t>(buffer.rank);
    tensors_[place] = {buffer.data, device_, rank, dtype_of(buffer.dtype), buffer.dims, nullptr, 0};
    given_[place] = true;
    if (place != kRng) return;
    // uint32[4] are the words of int64[2]: JAX has no int64 unless it is asked to.
    if (buffer.dtype != kXlaU32 || rank != 1 || buffer.dims[0] != 4) {
      throw Refusal{FULMEN_ERROR_DTYPE, "rng is not uint32[4]: seed and offset, low words first"};
    }
    tensors_[place].dtype = {kDLInt, 64, 1};
    tensors_[place].shape = &two_;
  }

  DLDevice device_;
  int64_t two_ = 2;
  std::array<DLTensor, kNumArrays> tensors_{};
  std::array<bool, kNumArrays> given_{};
};

XlaError* refused(const XlaCallFrame& frame, const std::string& sentence) {
  XlaErrorCreate error{sizeof error, nullptr, sentence.c_str(), kXlaInvalidArgument};
  return frame.api->error_create(&error);
}

// XLA asks each handler once for the version that it was built for.
bool told_version(const XlaCallFrame& frame) {
  for (XlaExtension* extension = frame.extension; extension != nullptr;
       extension = extension->next) {
    if (extension->type != kXlaMetadata) continue;
    XlaMetadata& metadata = *reinterpret_cast<XlaMetadataExtension*>(extension)->metadata;
    metadata.version.major = 0;
    metadata.version.minor = frame.api == nullptr ? 0 : frame.api->version.minor;
    metadata.traits = 0;
    return true;
  }
  return false;
}

// The GPU that a call runs on; XLA says which since version 0.3.
int32_t ordinal(const XlaCallFrame& frame) {
  constexpr size_t kNeeded = offsetof(XlaApi, device_ordinal_get) + sizeof(void*);
  if (frame.api->struct_size < kNeeded) return 0;
  XlaDeviceOrdinalGet asked{sizeof asked, nullptr, frame.context, 0};
  return frame.api->device_ordinal_get(&asked) == nullptr ? asked.ordinal : 0;
}

template <bool kOnGpu>
XlaError* handle(XlaCallFrame* frame, Call call) {
  if (told_version(*frame)) return nullptr;
  try {
    DLDevice device{kDLCPU, 0};
    XlaStreamGet stream{sizeof stream, nullptr, frame->context, nullptr};
    if (kOnGpu) {
      device = {kDLCUDA, ordinal(*frame)};
      if (XlaError* error = frame->api->stream_get(&stream); error != nullptr) return error;
    }
    Frame arrays_of(*frame, device);
    const std::vector<TVMFFIAny> values = arrays_of.arguments(frame->attributes);
    Arguments in(values.data(), static_cast<int32_t>(values.size()));
    fulmen_problem problem = in.options();
    in.integer("stream");
    const Arrays arrays = in.arrays();
    arrays.settle(&problem);
    check(call(&problem, &arrays.tensors, stream.stream));
    return nullptr;
  } catch (const Refusal& refusal) {
    return refused(*frame, refusal.sentence);
  } catch (const std::exception& error) {
    return refused(*frame, error.what());
  } catch (...) {
    return refused(*frame, "an unknown exception left the library");
  }
}

}  // namespace
}  // namespace fulmen::ffi

#define FULMEN_XLA_EXPORT(name, call, on_gpu)                                                    \
  extern "C" FULMEN_API fulmen::ffi::XlaError* fulmen_xla_##name(fulmen::ffi::XlaCallFrame* f) { \
    return fulmen::ffi::handle<on_gpu>(f, call);                                                 \
  }

FULMEN_XLA_EXPORT(forward_cpu, fulmen_attention, false)
FULMEN_XLA_EXPORT(forward_cuda, fulmen_attention, true)
FULMEN_XLA_EXPORT(backward_cpu, fulmen_attention_backward, false)
FULMEN_XLA_EXPORT(backward_cuda, fulmen_attention_backward, true)
