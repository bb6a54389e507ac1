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
#include <utility>
#include <vector>

namespace fulmen {
inline namespace veneer {  // its symbols are never those of the library itself

// ---- Errors ------------------------------------------------------------------------------------

enum class Status {
#define FULMEN_STATUS(name, code) name = code,
#include <fulmen/enums.def>
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
#define FULMEN_DTYPE(name, code, ...) name = code,
#include <fulmen/enums.def>
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

// Members are those of fulmen_tensors, inputs first: q, k, v, bias, ...
struct Tensors {
#define FULMEN_ARRAY(array, member, ...) Tensor member{};
#include <fulmen/arrays.def>

  fulmen_tensors c() const {
    fulmen_tensors all;
    fulmen_tensors_init(&all);
#define FULMEN_ARRAY(array, member, ...) all.member = member;
#include <fulmen/arrays.def>
    return all;
  }
};

// ---- Options -----------------------------------------------------------------------------------

enum class Alignment {
#define FULMEN_ALIGNMENT(name, code, ...) name = code,
#include <fulmen/enums.def>
};
enum class Backend {
#define FULMEN_BACKEND(name, code, ...) name = code,
#include <fulmen/enums.def>
};
enum class Implementation {
#define FULMEN_IMPLEMENTATION(name, code, ...) name = code,
#include <fulmen/enums.def>
};
enum class Precision {
#define FULMEN_PRECISION(name, code, ...) name = code,
#include <fulmen/enums.def>
};
enum class Operation { kForward = FULMEN_OPERATION_FORWARD, kBackward = FULMEN_OPERATION_BACKWARD };

inline constexpr std::int64_t kNoLimit = FULMEN_NO_LIMIT;

namespace detail {

// The type of an option here: bool of a flag, an enum class of an enumeration, else that of C.
enum class OptionKind { kReal, kFlag, kChoice, kLimit, kCount, kWord, kIndex, kText };
template <OptionKind kKind, class Field>
struct OptionType {
  using Type = std::conditional_t<kKind == OptionKind::kFlag, bool, Field>;
};
template <>
struct OptionType<OptionKind::kChoice, fulmen_alignment> {
  using Type = Alignment;
};
template <>
struct OptionType<OptionKind::kChoice, fulmen_backend> {
  using Type = Backend;
};
template <>
struct OptionType<OptionKind::kChoice, fulmen_implementation> {
  using Type = Implementation;
};
template <>
struct OptionType<OptionKind::kChoice, fulmen_precision> {
  using Type = Precision;
};
template <OptionKind kKind, class Field>
using OptionTypeOf = typename OptionType<kKind, Field>::Type;

}  // namespace detail

// Members are those of fulmen_problem, in its order, at its defaults.
struct Problem {
#define FULMEN_OPTION(kind, type, name, initial, ...)         \
  detail::OptionTypeOf<detail::OptionKind::kind, type> name = \
      static_cast<detail::OptionTypeOf<detail::OptionKind::kind, type>>(initial);
#include <fulmen/options.def>

  fulmen_problem c() const {
    fulmen_problem p;
    fulmen_problem_init(&p);
#define FULMEN_OPTION(kind, type, name, ...) p.name = static_cast<type>(name);
#include <fulmen/options.def>
    return p;
  }
};

// ---- Scores and masks of the caller's own ------------------------------------------------------

// Texts, as fulmen_expression_create has them; what they read is capture0 .. of Tensors and scalar0
// .. of Problem, in the order of the names:
//   fulmen::Expression alibi("s - slope[h] * abs(p - j)", nullptr, {"slope"});
//   fulmen::attention({.expression = alibi.number()}, {.q = q, .k = k, .v = v, .o = o,
//                                                      .capture0 = slopes});
class Expression {
 public:
  explicit Expression(const char* score, const char* mask = nullptr,
                      std::initializer_list<const char*> captures = {},
                      std::initializer_list<const char*> scalars = {}) {
    check(fulmen_expression_create(score, mask, captures.begin(), captures.size(), scalars.begin(),
                                   scalars.size(), &number_));
  }
  ~Expression() { fulmen_expression_destroy(number_); }
  Expression(Expression&& other) noexcept : number_(std::exchange(other.number_, 0)) {}
  Expression& operator=(Expression&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  std::uint64_t number() const noexcept { return number_; }

 private:
  std::uint64_t number_ = 0;
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

// As fulmen_append: arrays that are left out are absent.
struct Append {
  Tensor k_cache{}, v_cache{}, k{}, v{}, cu_new{}, slots{}, page_table{}, page_indptr{},
      kv_lengths{}, positions{}, cos{}, sin{}, q{}, q_out{};
  bool interleaved = false;
  Tensor k_scale{}, v_scale{};

  fulmen_append c() const {
    fulmen_append made;
    fulmen_append_init(&made);
    made.k_cache = k_cache;
    made.v_cache = v_cache;
    made.k = k;
    made.v = v;
    made.cu_new = cu_new;
    made.slots = slots;
    made.page_table = page_table;
    made.page_indptr = page_indptr;
    made.kv_lengths = kv_lengths;
    made.positions = positions;
    made.cos = cos;
    made.sin = sin;
    made.q = q;
    made.q_out = q_out;
    made.interleaved = interleaved ? 1 : 0;
    made.k_scale = k_scale;
    made.v_scale = v_scale;
    return made;
  }
};

inline void append_kv(const Append& append, void* stream = nullptr) {
  const fulmen_append made = append.c();
  check(fulmen_append_kv(&made, stream));
}

// As fulmen_quantisation: arrays that are left out are absent.
struct Quantisation {
  Tensor x{}, values{}, constant{}, scale{}, lengths{};
  bool rotate = false, find_constant = false, find_scale = false;
  double headroom = 1;

  fulmen_quantisation c() const {
    fulmen_quantisation made;
    fulmen_quantisation_init(&made);
    made.x = x;
    made.values = values;
    made.constant = constant;
    made.scale = scale;
    made.lengths = lengths;
    made.rotate = rotate ? 1 : 0;
    made.find_constant = find_constant ? 1 : 0;
    made.find_scale = find_scale ? 1 : 0;
    made.headroom = headroom;
    return made;
  }
};

inline void quantise(const Quantisation& quantisation, void* stream = nullptr) {
  const fulmen_quantisation made = quantisation.c();
  check(fulmen_quantise(&made, stream));
}

// As fulmen_indexer: arrays that are left out are absent.
struct Indexer {
  Tensor q{}, k{}, k_scale{}, weights{}, kv_lengths{}, page_table{}, indices{};
  bool causal = false;

  fulmen_indexer c() const {
    fulmen_indexer made;
    fulmen_indexer_init(&made);
    made.q = q;
    made.k = k;
    made.k_scale = k_scale;
    made.weights = weights;
    made.kv_lengths = kv_lengths;
    made.page_table = page_table;
    made.indices = indices;
    made.causal = causal ? 1 : 0;
    return made;
  }
};

inline void mla_indexer(const Indexer& indexer, void* stream = nullptr) {
  const fulmen_indexer made = indexer.c();
  check(fulmen_mla_indexer(&made, stream));
}

// positions absent: row i is at position i. out may be x.
inline void rotary(const Tensor& x, const Tensor& positions, const Tensor& cos, const Tensor& sin,
                   bool interleaved, const Tensor& out, void* stream = nullptr) {
  check(fulmen_rotary(&x, &positions, &cos, &sin, interleaved ? 1 : 0, &out, stream));
}

inline void dense_mask(const Problem& problem, const Tensors& tensors, const Tensor& visible) {
  const fulmen_problem p = problem.c();
  const fulmen_tensors t = tensors.c();
  check(fulmen_dense_mask(&p, &t, &visible));
}

// kinds (batch, head, q_block, kv_block) int8: 0 no visible pair, 2 all visible, 1 some or unknown.
inline void block_map(const Problem& problem, const Tensors& tensors, std::int64_t block_q,
                      std::int64_t block_kv, bool exact, const Tensor& kinds) {
  const fulmen_problem p = problem.c();
  const fulmen_tensors t = tensors.c();
  check(fulmen_block_map(&p, &t, block_q, block_kv, exact ? 1 : 0, &kinds));
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
inline std::string schema() { return text_of(fulmen_schema); }
inline void set_num_threads(std::int32_t num_threads) {
  check(fulmen_set_num_threads(num_threads));
}

}  // namespace veneer
}  // namespace fulmen

#endif  // FULMEN_FULMEN_HPP_
