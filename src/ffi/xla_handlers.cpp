// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What JAX calls: handlers of XLA's foreign function interface, registered by python/fulmen/jax.py.
// A handler makes one call of the library on XLA's stream, with the buffers of a compiled program
// as its arrays. Attributes of a call, each a vector of int64:
//
//   options   the bytes of a fulmen_problem, without pointers
//   layout    one number, see Layout
//   arrays    for each argument, then each result: which row of fulmen/arrays.def it is; of an
//             append or a rotary embedding: which of kAppendRows
//   interleaved  of those two: one number
//   quantisation  of a quantisation: rotate, the bits of headroom; its arrays are of kQuantiseRows
//   dim_v     one number, of a call whose v is the first dims of k
//
// The caches of an append are arguments and results whose memory is one: XLA copies what was not
// donated. The handler writes the results.

#include <cstring>
#include <iterator>
#include <string>
#include <string_view>

#include "ffi/abi.h"
#include "ffi/arrays.h"

namespace fulmen::ffi {
namespace {

using Call = fulmen_status (*)(const fulmen_problem*, const fulmen_tensors*, void*);

constexpr int kMaxRank = FULMEN_MAX_RANK;

// Of an attribute.
struct Words {
  const int64_t* data = nullptr;
  size_t size = 0;
};

// Nothing where there is none of that name.
Words attribute_if_any(const XlaAttributes& attributes, const char* name) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const XlaText& text = *attributes.names[i];
    if (std::string_view(text.data, text.size) != name) continue;
    const auto* array = static_cast<const XlaArray*>(attributes.items[i]);
    if (attributes.types[i] != kXlaIsArray || array->dtype != kXlaS64) break;
    return {static_cast<const int64_t*>(array->data), array->size};
  }
  return {};
}

Words attribute(const XlaAttributes& attributes, const char* name) {
  if (const Words found = attribute_if_any(attributes, name); found.data != nullptr) return found;
  throw Refusal{FULMEN_ERROR_ARGUMENT, std::string(name) + " is not a vector of int64"};
}

DLDataType dtype_of(int32_t dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.xla == dtype) return row.dlpack;
  }
  throw Refusal{FULMEN_ERROR_DTYPE, "an array has XLA's dtype " + std::to_string(dtype) +
                                        "; fulmen knows " + known_dtypes()};
}

// One call of the library: what the program passes, as the library takes it.
class XlaCall {
 public:
  XlaCall(const XlaCallFrame& frame, DLDevice device) : device_(device) {
    const Words options = attribute(frame.attributes, "options");
    problem_ = problem_of(options.data, options.size * sizeof(int64_t));
    const Words layout = attribute(frame.attributes, "layout");
    if (layout.size == 1) layout_ = Layout::of(*layout.data);
    const Words dim_v = attribute_if_any(frame.attributes, "dim_v");
    if (dim_v.size == 1) dim_v_ = *dim_v.data;
    const Words indices = attribute(frame.attributes, "arrays");
    const auto num_arguments = static_cast<size_t>(frame.arguments.size);
    if (indices.size != num_arguments + static_cast<size_t>(frame.results.size)) {
      throw Refusal{FULMEN_ERROR_INTERNAL, "arrays does not name each argument and result"};
    }
    for (size_t i = 0; i < indices.size; ++i) {
      const bool is_result = i >= num_arguments;
      const XlaBuffers& buffers = is_result ? frame.results : frame.arguments;
      const size_t item = is_result ? i - num_arguments : i;
      const auto index = static_cast<size_t>(indices.data[i]);
      if (buffers.types[item] != kXlaIsBuffer || index >= kNumArrays) {
        throw Refusal{FULMEN_ERROR_INTERNAL, "arrays names what is no array"};
      }
      add(static_cast<ArrayIndex>(index), *static_cast<const XlaBuffer*>(buffers.items[item]));
    }
  }

  void run(Call call, void* stream) {
    arrays_.resolve_device(&problem_);
    check(call(&problem_, &arrays_.tensors, stream));
  }

 private:
  void add(ArrayIndex index, const XlaBuffer& buffer) {
    if (buffer.rank > kMaxRank) {
      throw Refusal{FULMEN_ERROR_SHAPE, "an array has more than 4 axes"};
    }
    if (index == kRng) return add_rng(buffer);
    if (index == kTree) return add_tree(buffer);
    const DLTensor array{buffer.data,
                         device_,
                         static_cast<int32_t>(buffer.rank),
                         dtype_of(buffer.dtype),
                         buffer.dims,
                         nullptr,
                         0};
    arrays_.add(index, array, {layout_.rows_before_heads, 0});
    if (index == kK && dim_v_ > 0) add_first_dims(array);
  }

  // v: the first dims of k.
  void add_first_dims(DLTensor v) {
    int64_t shape[kMaxRank], strides[kMaxRank];
    int64_t stride = 1;
    for (int32_t axis = v.ndim; axis-- > 0;) {
      shape[axis] = v.shape[axis];
      strides[axis] = stride;
      stride *= shape[axis];
    }
    shape[v.ndim - 1] = dim_v_;
    v.shape = shape;
    v.strides = strides;
    arrays_.add(kV, v, {layout_.rows_before_heads, 0});
  }

  // uint32[4] are the words of int64[2], seed and offset: JAX has no int64 unless it is asked to.
  // In host memory they are numbers of the options.
  void add_rng(const XlaBuffer& buffer) {
    if (buffer.dtype != kXlaU32 || buffer.rank != 1 || buffer.dims[0] != 4) {
      throw Refusal{FULMEN_ERROR_DTYPE, "rng is not uint32[4]: seed and offset, low words first"};
    }
    if (device_.device_type == kDLCPU) {
      uint64_t numbers[2];
      std::memcpy(numbers, buffer.data, sizeof numbers);
      problem_.rng_seed = numbers[0];
      problem_.rng_offset = numbers[1];
      return;
    }
    int64_t two = 2;
    arrays_.add(kRng, {buffer.data, device_, 1, {kDLInt, 64, 1}, &two, nullptr, 0}, {});
  }

  // uint32[..., 2] are words of int64, as in add_rng.
  void add_tree(const XlaBuffer& buffer) {
    const auto rank = static_cast<int32_t>(buffer.rank);
    if (buffer.dtype != kXlaU32 || rank < 2 || buffer.dims[rank - 1] != 2) {
      throw Refusal{FULMEN_ERROR_DTYPE, "tree is not uint32[..., 2]: 64-bit words, low half first"};
    }
    const DLDataType int64 = {kDLInt, 64, 1};
    arrays_.add(kTree, {buffer.data, device_, rank - 1, int64, buffer.dims, nullptr, 0}, {});
  }

  DLDevice device_;
  fulmen_problem problem_;
  Layout layout_;
  int64_t dim_v_ = 0;  // of a v that is the first dims of k
  Arrays arrays_;
};

// The arrays of a call that has a struct of its own, each by its row of a table. Results last: they
// take the place of arguments.
template <class Row, size_t kCount, class Set>
void set_arrays(const XlaCallFrame& frame, DLDevice device, const Row (&rows)[kCount],
                const char* Row::* called, const Set& set) {
  const Words layout = attribute(frame.attributes, "layout");
  const Words members = attribute(frame.attributes, "arrays");
  const auto num_arguments = static_cast<size_t>(frame.arguments.size);
  if (layout.size != 1 || members.size != num_arguments + static_cast<size_t>(frame.results.size)) {
    throw Refusal{FULMEN_ERROR_INTERNAL, "arrays does not name each argument and result"};
  }
  for (size_t i = 0; i < members.size; ++i) {
    const bool is_result = i >= num_arguments;
    const XlaBuffers& buffers = is_result ? frame.results : frame.arguments;
    const size_t item = is_result ? i - num_arguments : i;
    const auto member = static_cast<size_t>(members.data[i]);
    if (buffers.types[item] != kXlaIsBuffer || member >= kCount) {
      throw Refusal{FULMEN_ERROR_INTERNAL, "arrays names what is no array"};
    }
    const auto& buffer = *static_cast<const XlaBuffer*>(buffers.items[item]);
    const DLTensor array{
        buffer.data, device, static_cast<int32_t>(buffer.rank), dtype_of(buffer.dtype), buffer.dims,
        nullptr,     0};
    const Row& row = rows[member];
    const bool exchanged = Layout::of(*layout.data).rows_before_heads && row.has_head_and_row;
    set(row, view(row.*called, array, {exchanged, 0}));
  }
}

fulmen_append append_of(const XlaCallFrame& frame, DLDevice device) {
  fulmen_append append;
  fulmen_append_init(&append);
  const Words interleaved = attribute(frame.attributes, "interleaved");
  if (interleaved.size != 1) {
    throw Refusal{FULMEN_ERROR_INTERNAL, "interleaved is not one number"};
  }
  append.interleaved = static_cast<int32_t>(*interleaved.data);
  set_arrays(frame, device, kAppendRows, &AppendRow::word,
             [&](const AppendRow& row, const fulmen_tensor& array) { append.*row.member = array; });
  return append;
}

void run_quantise(const XlaCallFrame& frame, DLDevice device, void* stream) {
  const Words given = attribute(frame.attributes, "quantisation");
  if (given.size != 2) throw Refusal{FULMEN_ERROR_INTERNAL, "quantisation is not two numbers"};
  fulmen_quantisation quantisation = quantisation_of(given.data[0], given.data[1]);
  set_arrays(frame, device, kQuantiseRows, &QuantiseRow::name,
             [&](const QuantiseRow& row, const fulmen_tensor& array) {
               set_array(quantisation, row, array);
             });
  check(fulmen_quantise(&quantisation, stream));
}

void run_append(const XlaCallFrame& frame, DLDevice device, void* stream) {
  const fulmen_append append = append_of(frame, device);
  const fulmen_status status = fulmen_append_kv(&append, stream);
  if (status != FULMEN_OK) check_append_failed(status);
}

void run_rotary(const XlaCallFrame& frame, DLDevice device, void* stream) {
  const fulmen_append a = append_of(frame, device);
  const fulmen_status status =
      fulmen_rotary(&a.q, &a.positions, &a.cos, &a.sin, a.interleaved, &a.q_out, stream);
  if (status != FULMEN_OK) check_append_failed(status);
}

void run_forward(const XlaCallFrame& frame, DLDevice device, void* stream) {
  XlaCall(frame, device).run(fulmen_attention, stream);
}

void run_backward(const XlaCallFrame& frame, DLDevice device, void* stream) {
  XlaCall(frame, device).run(fulmen_attention_backward, stream);
}

using XlaRun = void (*)(const XlaCallFrame& frame, DLDevice device, void* stream);

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
XlaError* handle(XlaCallFrame* frame, XlaRun run) {
  if (told_version(*frame)) return nullptr;
  try {
    DLDevice device{kDLCPU, 0};
    XlaStreamGet stream{sizeof stream, nullptr, frame->context, nullptr};
    if (kOnGpu) {
      device = {kDLCUDA, ordinal(*frame)};
      if (XlaError* error = frame->api->stream_get(&stream); error != nullptr) return error;
    }
    run(*frame, device, stream.stream);
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

#define FULMEN_XLA_EXPORT(name, body, on_gpu)                                                    \
  extern "C" FULMEN_API fulmen::ffi::XlaError* fulmen_xla_##name(fulmen::ffi::XlaCallFrame* f) { \
    return fulmen::ffi::handle<on_gpu>(f, fulmen::ffi::body);                                    \
  }

FULMEN_XLA_EXPORT(forward_cpu, run_forward, false)
FULMEN_XLA_EXPORT(forward_cuda, run_forward, true)
FULMEN_XLA_EXPORT(backward_cpu, run_backward, false)
FULMEN_XLA_EXPORT(backward_cuda, run_backward, true)
FULMEN_XLA_EXPORT(append_kv_cpu, run_append, false)
FULMEN_XLA_EXPORT(append_kv_cuda, run_append, true)
FULMEN_XLA_EXPORT(rotary_cpu, run_rotary, false)
FULMEN_XLA_EXPORT(rotary_cuda, run_rotary, true)
FULMEN_XLA_EXPORT(quantise_cpu, run_quantise, false)
FULMEN_XLA_EXPORT(quantise_cuda, run_quantise, true)
