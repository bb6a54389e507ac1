// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen for C++20: the calls of fulmen.h with owning types, enum classes and exceptions. Header
// only, no behaviour of its own; each name is explained where fulmen.h explains the C one.
//
//   std::vector<float> q(...), k(...), v(...), o(...);
//   fulmen::attention({.causal = true},
//                     {.q = fulmen::tensor(q, {batch, heads, rows, dim}),
//                      .k = fulmen::tensor(k, {batch, kv_heads, keys, dim}),
//                      .v = fulmen::tensor(v, {batch, kv_heads, keys, dim}),
//                      .o = fulmen::tensor(o, {batch, heads, rows, dim})});
//
// Arrays stay the caller's and must outlive the call. A failure throws fulmen::Error, or the class
// under it that its status names. Threads: as in fulmen.h; a Plan is const while it runs.
#ifndef FULMEN_FULMEN_HPP_
#define FULMEN_FULMEN_HPP_

#include <fulmen/fulmen.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace fulmen {
inline namespace veneer {  // its symbols are never those of the library itself

// ---- Errors ------------------------------------------------------------------------------------

enum class Status {
  kOk = FULMEN_OK,
  kArgument = FULMEN_ERROR_ARGUMENT,
  kShape = FULMEN_ERROR_SHAPE,
  kDType = FULMEN_ERROR_DTYPE,
  kUnsupported = FULMEN_ERROR_UNSUPPORTED,
  kDevice = FULMEN_ERROR_DEVICE,
  kCompile = FULMEN_ERROR_COMPILE,
  kNotFound = FULMEN_ERROR_NOT_FOUND,
  kOutOfMemory = FULMEN_ERROR_OUT_OF_MEMORY,
  kInternal = FULMEN_ERROR_INTERNAL,
};

class Error : public std::runtime_error {
 public:
  Error(const std::string& sentence, Status status)
      : std::runtime_error(sentence), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

// The class of a status: ShapeError is an ArgumentError, the others stand alone.
template <Status kStatus, class Base = Error>
class ErrorOf : public Base {
 public:
  explicit ErrorOf(const std::string& sentence, Status status = kStatus) : Base(sentence, status) {}
};
using ArgumentError = ErrorOf<Status::kArgument>;
using ShapeError = ErrorOf<Status::kShape, ArgumentError>;
using DTypeError = ErrorOf<Status::kDType>;
using UnsupportedError = ErrorOf<Status::kUnsupported>;
using DeviceError = ErrorOf<Status::kDevice>;
using CompileError = ErrorOf<Status::kCompile>;
using NotFoundError = ErrorOf<Status::kNotFound>;
using OutOfMemoryError = ErrorOf<Status::kOutOfMemory>;
using InternalError = ErrorOf<Status::kInternal>;

// Throws what a status that is not FULMEN_OK stands for, with the sentence of this thread.
inline void check(fulmen_status code) {
  const std::string sentence = code == FULMEN_OK ? "" : fulmen_last_error();
  switch (code) {
    case FULMEN_OK:
      return;
    case FULMEN_ERROR_ARGUMENT:
      throw ArgumentError(sentence);
    case FULMEN_ERROR_SHAPE:
      throw ShapeError(sentence);
    case FULMEN_ERROR_DTYPE:
      throw DTypeError(sentence);
    case FULMEN_ERROR_UNSUPPORTED:
      throw UnsupportedError(sentence);
    case FULMEN_ERROR_DEVICE:
      throw DeviceError(sentence);
    case FULMEN_ERROR_COMPILE:
      throw CompileError(sentence);
    case FULMEN_ERROR_NOT_FOUND:
      throw NotFoundError(sentence);
    case FULMEN_ERROR_OUT_OF_MEMORY:
      throw OutOfMemoryError(sentence);
    case FULMEN_ERROR_INTERNAL:
      break;
  }
  throw InternalError(sentence);
}

// ---- Arrays ------------------------------------------------------------------------------------

enum class DType {
  kFloat64 = FULMEN_FLOAT64,
  kFloat32 = FULMEN_FLOAT32,
  kFloat16 = FULMEN_FLOAT16,
  kBFloat16 = FULMEN_BFLOAT16,
  kBool = FULMEN_BOOL,
  kInt32 = FULMEN_INT32,
  kInt64 = FULMEN_INT64,
};

using Extents = std::initializer_list<std::int64_t>;

// A view of the caller's memory; absent unless made by tensor().
struct Tensor : fulmen_tensor {
  Tensor() { check(fulmen_tensor_init(this, nullptr, FULMEN_FLOAT32, 0, nullptr)); }
};

// Contiguous, last axis fastest.
inline Tensor tensor(void* data, DType dtype, Extents shape) {
  Tensor made;
  check(fulmen_tensor_init(&made, data, static_cast<fulmen_dtype>(dtype),
                           static_cast<std::int32_t>(shape.size()), shape.begin()));
  return made;
}

// With strides in elements, as many as extents.
inline Tensor tensor(void* data, DType dtype, Extents shape, Extents strides) {
  Tensor made = tensor(data, dtype, shape);
  if (strides.size() != shape.size()) {
    throw ArgumentError(
        "strides and shape differ in length; pass one stride for "
        "each extent");
  }
  std::copy(strides.begin(), strides.end(), made.strides);
  return made;
}

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, double>) return DType::kFloat64;
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, bool>) return DType::kBool;
  if constexpr (std::is_same_v<T, std::int32_t>) return DType::kInt32;
  if constexpr (std::is_same_v<T, std::int64_t>) return DType::kInt64;
}

// Over a contiguous container; its size must be the product of the extents. const memory may only
// be an input.
template <class Container>
Tensor tensor(Container&& elements, Extents shape) {
  const std::span all(elements);
  using T = std::remove_const_t<typename decltype(all)::element_type>;
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  if (count != static_cast<std::int64_t>(all.size())) {
    throw ShapeError("a container of " + std::to_string(all.size()) +
                     " elements cannot have a shape of " + std::to_string(count));
  }
  return tensor(const_cast<T*>(all.data()), dtype_of<T>(), shape);
}

struct Tensors {
  Tensor q{}, k{}, v{};
  Tensor bias{}, mask{}, alibi_slopes{}, sinks{};
  Tensor q_lengths{}, kv_lengths{}, cu_q{}, cu_kv{}, q_ids{}, kv_ids{}, rng{};
  Tensor o{}, lse{}, stats{};
  Tensor dout{}, dlse{};
  Tensor dq{}, dk{}, dv{}, dbias{}, dsinks{};

  fulmen_tensors c() const {
    fulmen_tensors all;
    fulmen_tensors_init(&all);
    all.q = q, all.k = k, all.v = v;
    all.bias = bias, all.mask = mask, all.alibi_slopes = alibi_slopes, all.sinks = sinks;
    all.q_lengths = q_lengths, all.kv_lengths = kv_lengths, all.cu_q = cu_q, all.cu_kv = cu_kv;
    all.q_ids = q_ids, all.kv_ids = kv_ids, all.rng = rng;
    all.o = o, all.lse = lse, all.stats = stats;
    all.dout = dout, all.dlse = dlse;
    all.dq = dq, all.dk = dk, all.dv = dv, all.dbias = dbias, all.dsinks = dsinks;
    return all;
  }
};

// ---- Options -----------------------------------------------------------------------------------

enum class Alignment { kBottomRight = FULMEN_BOTTOM_RIGHT, kTopLeft = FULMEN_TOP_LEFT };
enum class Backend {
  kAuto = FULMEN_BACKEND_AUTO,
  kCpu = FULMEN_BACKEND_CPU,
  kCuda = FULMEN_BACKEND_CUDA,
};
enum class Implementation {
  kAuto = FULMEN_IMPLEMENTATION_AUTO,
  kScalar = FULMEN_SCALAR,
  kTiled = FULMEN_TILED,
  kNaive = FULMEN_NAIVE,
  kSimt = FULMEN_SIMT,
  kSm80 = FULMEN_SM80,
  kSm90 = FULMEN_SM90,
};
enum class Precision {
  kFloat32 = FULMEN_PRECISION_FLOAT32,
  kTf32 = FULMEN_PRECISION_TF32,
  k3xTf32 = FULMEN_PRECISION_3XTF32,
};
enum class Operation { kForward = FULMEN_OPERATION_FORWARD, kBackward = FULMEN_OPERATION_BACKWARD };

inline constexpr std::int64_t kNoLimit = FULMEN_NO_LIMIT;

struct Problem {
  double scale = std::numeric_limits<double>::quiet_NaN();
  double softcap = 0;
  bool causal = false;
  Alignment alignment = Alignment::kBottomRight;
  std::int64_t window_left = kNoLimit;
  std::int64_t window_right = kNoLimit;
  std::int64_t prefix = 0;
  std::int64_t chunk = 0;
  double dropout_p = 0;
  std::uint64_t rng_seed = 0;
  std::uint64_t rng_offset = 0;
  std::int64_t max_q = 0;
  std::int64_t max_kv = 0;
  bool deterministic = false;
  bool batch_invariant = false;
  Backend backend = Backend::kAuto;
  Implementation implementation = Implementation::kAuto;
  std::int32_t device = -1;
  const char* device_name = nullptr;
  std::uint32_t without = 0;                  // an or of fulmen_optimisation
  Precision precision = Precision::kFloat32;  // of float32 inputs

  fulmen_problem c() const {
    fulmen_problem p;
    fulmen_problem_init(&p);
    p.scale = scale, p.softcap = softcap, p.causal = causal;
    p.alignment = static_cast<fulmen_alignment>(alignment);
    p.window_left = window_left, p.window_right = window_right, p.prefix = prefix, p.chunk = chunk;
    p.dropout_p = dropout_p, p.rng_seed = rng_seed, p.rng_offset = rng_offset;
    p.max_q = max_q, p.max_kv = max_kv;
    p.deterministic = deterministic, p.batch_invariant = batch_invariant;
    p.backend = static_cast<fulmen_backend>(backend);
    p.implementation = static_cast<fulmen_implementation>(implementation);
    p.device = device, p.device_name = device_name, p.without = without;
    p.precision = static_cast<fulmen_precision>(precision);
    return p;
  }
};

// ---- Calls -------------------------------------------------------------------------------------

inline void attention(const Problem& problem, const Tensors& tensors, void* stream = nullptr) {
  const fulmen_problem p = problem.c();
  const fulmen_tensors t = tensors.c();
  check(fulmen_attention(&p, &t, stream));
}

inline void attention_backward(const Problem& problem, const Tensors& tensors,
                               void* stream = nullptr) {
  const fulmen_problem p = problem.c();
  const fulmen_tensors t = tensors.c();
  check(fulmen_attention_backward(&p, &t, stream));
}

// Text of a call that takes (buffer, capacity, needed).
template <class Call>
std::string text_of(const Call& call) {
  std::size_t needed = 0;
  check(call(nullptr, std::size_t{0}, &needed));
  std::string text(needed, '\0');
  check(call(text.data(), text.size(), &needed));
  text.resize(needed - 1);
  return text;
}

class Plan {
 public:
  Plan(const Problem& problem, const Tensors& tensors, Operation operation) {
    const fulmen_problem p = problem.c();
    const fulmen_tensors t = tensors.c();
    fulmen_plan* made = nullptr;
    check(fulmen_plan_create(&p, &t, static_cast<fulmen_operation>(operation), &made));
    plan_.reset(made);
  }

  const fulmen_plan* c() const noexcept { return plan_.get(); }

  std::size_t workspace_bytes() const noexcept { return fulmen_plan_workspace_bytes(plan_.get()); }

  void forward(const Tensors& tensors, std::span<std::byte> workspace,
               void* stream = nullptr) const {
    const fulmen_tensors t = tensors.c();
    check(fulmen_forward(plan_.get(), &t, workspace.data(), workspace.size(), stream));
  }

  void backward(const Tensors& tensors, std::span<std::byte> workspace,
                void* stream = nullptr) const {
    const fulmen_tensors t = tensors.c();
    check(fulmen_backward(plan_.get(), &t, workspace.data(), workspace.size(), stream));
  }

  std::string explain() const {
    return text_of([this](char* buffer, std::size_t capacity, std::size_t* needed) {
      return fulmen_plan_explain(plan_.get(), buffer, capacity, needed);
    });
  }

 private:
  struct Destroy {
    void operator()(fulmen_plan* plan) const noexcept { fulmen_plan_destroy(plan); }
  };
  std::unique_ptr<fulmen_plan, Destroy> plan_;
};

struct MergePart {
  Tensor o{}, lse{};
};

inline void merge(std::span<const MergePart> parts, const Tensor& o, const Tensor& lse = {},
                  const Tensor& sinks = {}, void* stream = nullptr) {
  std::vector<fulmen_merge_part> all(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    fulmen_merge_part_init(&all[i]);
    all[i].o = parts[i].o;
    all[i].lse = parts[i].lse;
  }
  check(fulmen_merge(all.data(), all.size(), &sinks, &o, &lse, stream));
}

inline void dense_mask(const Problem& problem, const Tensors& tensors, const Tensor& visible) {
  const fulmen_problem p = problem.c();
  const fulmen_tensors t = tensors.c();
  check(fulmen_dense_mask(&p, &t, &visible));
}

inline std::string explain(const Problem& problem, const Tensors& tensors,
                           Operation operation = Operation::kForward) {
  return Plan(problem, tensors, operation).explain();
}

// ---- GPUs ---------------------------------------------------------------------------------------

inline std::string gpu_info() { return text_of(fulmen_gpu_info); }

// The faults of a device since the last call: bits of FULMEN_FAULT_*.
inline std::uint32_t device_faults(std::int32_t device) {
  std::uint32_t faults = 0;
  check(fulmen_device_faults(device, &faults));
  return faults;
}

inline void bundle_write(std::span<const Plan> plans, const std::string& path) {
  std::vector<const fulmen_plan*> all;
  for (const Plan& plan : plans) all.push_back(plan.c());
  check(fulmen_bundle_write(all.data(), all.size(), path.c_str()));
}

inline void bundle_load(const std::string& path) { check(fulmen_bundle_load(path.c_str())); }
inline void cache_clear() { check(fulmen_cache_clear()); }

inline void set_nvrtc_candidates(std::span<const std::string> paths) {
  std::vector<const char*> all;
  for (const std::string& path : paths) all.push_back(path.c_str());
  check(fulmen_set_nvrtc_candidates(all.data(), all.size()));
}

// ---- This build ---------------------------------------------------------------------------------

inline std::string build_info() { return text_of(fulmen_build_info); }
inline std::string version() { return fulmen_version(); }
inline void set_num_threads(std::int32_t num_threads) {
  check(fulmen_set_num_threads(num_threads));
}

}  // namespace veneer
}  // namespace fulmen

#endif  // FULMEN_FULMEN_HPP_
