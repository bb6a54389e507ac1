// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 2, status: sentences by thread, and the way of an exception into a status.
// Sections 2 and 3: structs are made, and read.

#include "api/boundary.h"

#include <cstddef>
#include <iterator>
#include <limits>
#include <new>
#include <string>
#include <type_traits>

#include "core/error.h"
#include "core/log.h"

namespace fulmen::api {
namespace {

constexpr const char* kOutOfMemory = "out of memory";

// The sentence of the last failure of this thread: static text where there is no memory for more.
struct LastError {
  std::string text;
  const char* shown = "";
};

LastError& last_error() {
  thread_local LastError the_error;
  return the_error;
}

}  // namespace

fulmen_status fail(Status status, const char* sentence) noexcept {
  LastError& error = last_error();
  try {
    error.text = sentence;
    error.shown = error.text.c_str();
  } catch (const std::bad_alloc&) {
    error.shown = kOutOfMemory;
  }
  log(LogLevel::kError, error.shown);
  return static_cast<fulmen_status>(status);
}

fulmen_status fail_with_current_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(Status::kOutOfMemory, kOutOfMemory);
  } catch (const std::exception& error) {
    return fail(Status::kInternal, error.what());
  } catch (...) {
    return fail(Status::kInternal, "an exception of unknown type; this is a bug in fulmen");
  }
}

namespace {

static_assert(kMaxRank == FULMEN_MAX_RANK);
static_assert(kNoLimit == FULMEN_NO_LIMIT);

// The table against fulmen_problem: the same fields in the same order, with no gap between them.
constexpr size_t end_of_fields() {
  size_t end = sizeof(size_t);
#define FULMEN_OPTION(kind, type, name, ...)                           \
  static_assert(std::is_same_v<decltype(fulmen_problem::name), type>); \
  if (end != offsetof(fulmen_problem, name)) return 0;                 \
  end += sizeof(type);
#include "fulmen/options.def"
  return end;
}
static_assert((end_of_fields() + 7) / 8 * 8 == sizeof(fulmen_problem));  // init clears the rest

constexpr fulmen_problem default_problem() {
  fulmen_problem problem{};
  problem.struct_size = sizeof(fulmen_problem);
#define FULMEN_OPTION(kind, type, name, initial, ...) problem.name = initial;
#include "fulmen/options.def"
  return problem;
}
constexpr fulmen_problem kDefaults = default_problem();

// The members of fulmen_tensors, in the order of Array.
constexpr fulmen_tensor fulmen_tensors::* kMembers[] = {
#define FULMEN_ARRAY(array, member, ...) &fulmen_tensors::member,
#include "fulmen/arrays.def"
};
static_assert(sizeof(fulmen_tensors) == sizeof(size_t) + kNumArrays * sizeof(fulmen_tensor));

// The enumerator of core with the number of one of C.
template <class To, class From>
To to_enum(const From& value, const char* option, size_t count) {
  const int number = number_of(value);
  if (number < 0 || static_cast<size_t>(number) >= count) {
    refuse(sentence(option, " is ", number, "; allowed is 0 to ", count - 1,
                    ", the enumerators in fulmen.h"));
  }
  return static_cast<To>(number);
}

constexpr size_t count_of(Alignment) { return std::size(kAlignmentNames); }
constexpr size_t count_of(Backend) { return std::size(kBackendNames); }
constexpr size_t count_of(Implementation) { return std::size(kImplementationNames); }
constexpr size_t count_of(Precision) { return std::size(kPrecisionNames); }

// One option as core has it; the bounds of numbers are validate's.
template <OptionKind kKind, class Field>
OptionTypeOf<kKind, Field> to_option(const Field& value, const char* option) {
  using To = OptionTypeOf<kKind, Field>;
  if constexpr (kKind == OptionKind::kChoice) {
    return to_enum<To>(value, option, count_of(To{}));
  } else if constexpr (kKind == OptionKind::kFlag) {
    if (value != 0 && value != 1) refuse(sentence(option, " is ", value, "; allowed is 0 or 1"));
    return value == 1;
  } else {
    return value;
  }
}

[[noreturn]] void refuse_struct_size(const char* subject, const char* init, size_t given,
                                     size_t known) {
  if (given == 0) {
    refuse(sentence(subject, ".struct_size is 0; ", init, " makes the struct"));
  }
  refuse(sentence(subject, ".struct_size is ", given, "; this library knows ", known,
                  ": header and library are of different versions, or ", init,
                  " did not make the struct"));
}

bool is_present(const fulmen_tensor& tensor, const char* subject) {
  if (tensor.struct_size != sizeof(fulmen_tensor)) {  // it never grows
    refuse_struct_size(subject, "fulmen_tensors_init or fulmen_tensor_init", tensor.struct_size,
                       sizeof(fulmen_tensor));
  }
  return tensor.data != nullptr || tensor.rank != 0;
}

Tensor present_tensor(const fulmen_tensor& tensor, const char* subject) {
  const int dtype = number_of(tensor.dtype);
  if (dtype < 1 || static_cast<size_t>(dtype) >= std::size(kDTypeNames)) {
    throw Error(Status::kDType,
                sentence(subject, " has dtype number ", dtype, "; allowed is 1 to ",
                         std::size(kDTypeNames) - 1, ", the enumerators of fulmen_dtype"));
  }
  Tensor converted{tensor.data, static_cast<DType>(dtype), tensor.rank, {}, {}};
  for (int axis = 0; axis < kMaxRank; ++axis) {
    converted.shape[axis] = tensor.shape[axis];
    converted.strides[axis] = tensor.strides[axis];
  }
  return converted;
}

constexpr fulmen_tensors all_absent() {
  fulmen_tensors tensors{};
  tensors.struct_size = sizeof(fulmen_tensors);
  for (const auto member : kMembers) tensors.*member = absent_tensor();
  return tensors;
}
constexpr fulmen_tensors kAllAbsent = all_absent();  // one copy a call, not 24 structs made anew

Options options_of(const fulmen_problem& given) {
  Options options;
#define FULMEN_OPTION(kind, type, name, ...) \
  options.name = to_option<OptionKind::kind>(given.name, #name);
#include "fulmen/options.def"
  return options;
}

Arrays arrays_of(const fulmen_tensors& given) {
  Arrays arrays;
  for (int index = 0; index < kNumArrays; ++index) {
    const Array array = static_cast<Array>(index);
    const fulmen_tensor& tensor = given.*kMembers[index];
    if (!is_present(tensor, name(array))) continue;
    arrays[array] = present_tensor(tensor, name(array));
  }
  return arrays;
}

}  // namespace

void check_struct_size(const char* subject, const char* init, size_t given, size_t known,
                       const void* rest) {
  constexpr size_t kLeast = 2 * sizeof(size_t);  // at least one field
  constexpr size_t kMostBeyond = 4096;  // a struct that grew by more is one that nothing filled
  if (given < kLeast || given % sizeof(size_t) != 0 || given > known + kMostBeyond) {
    refuse_struct_size(subject, init, given, known);
  }
  const char* const bytes = static_cast<const char*>(rest);
  for (size_t at = 0; known + at < given; ++at) {
    if (bytes[at] == 0) continue;
    refuse(sentence(subject, ".struct_size is ", given, "; this library knows ", known,
                    " bytes, and those behind them are not all zero: the caller sets what only a "
                    "later version has, or ",
                    init, " did not make the struct"));
  }
}

void require_struct(const void* pointer, const char* subject, const char* init) {
  if (pointer == nullptr) refuse(sentence(subject, " is null; pass one made by ", init));
}

void require_pointer(const void* pointer, const char* subject, const char* what) {
  if (pointer == nullptr) refuse(sentence(subject, " is null; pass ", what));
}

void require_no_stream(const void* stream) {
  if (stream != nullptr) refuse("stream is not null; the CPU has no streams: pass NULL");
}

Tensor to_tensor(const fulmen_tensor& tensor, const char* subject) {
  return is_present(tensor, subject) ? present_tensor(tensor, subject) : Tensor{};
}

Tensor optional_tensor(const fulmen_tensor* tensor, const char* subject) {
  return tensor == nullptr ? Tensor{} : to_tensor(*tensor, subject);
}

Options to_options(const fulmen_problem* problem) {
  constexpr const char* kInit = "fulmen_problem_init";
  require_struct(problem, "problem", kInit);
  if (problem->struct_size == sizeof(fulmen_problem)) return options_of(*problem);
  fulmen_problem room = kDefaults;
  return options_of(known_struct(*problem, "problem", kInit, room));
}

Arrays to_arrays(const fulmen_tensors* tensors) {
  constexpr const char* kInit = "fulmen_tensors_init";
  require_struct(tensors, "tensors", kInit);
  if (tensors->struct_size == sizeof(fulmen_tensors)) return arrays_of(*tensors);
  fulmen_tensors room = kAllAbsent;
  return arrays_of(known_struct(*tensors, "tensors", kInit, room));
}

Experiment to_experiment(const fulmen_experiment* experiment) {
  if (experiment == nullptr) return {};
  fulmen_experiment room{};
  const fulmen_experiment& given =
      known_struct(*experiment, "experiment", "fulmen_experiment_init", room);
  if (given.reserved != 0) {
    refuse(sentence("experiment.reserved is ", given.reserved, "; allowed is 0"));
  }
  return {given.without, given.tile};
}

Operation to_operation(const fulmen_operation& operation) {
  return to_enum<Operation>(operation, "operation", 2);
}

Request to_request(const fulmen_problem* problem, const fulmen_tensors* tensors,
                   Operation operation) {
  return {operation, to_options(problem), to_arrays(tensors), {}};
}

}  // namespace fulmen::api

const char* fulmen_last_error(void) { return fulmen::api::last_error().shown; }

const char* fulmen_status_name(fulmen_status status) {
  switch (fulmen::api::number_of(status)) {
#define FULMEN_STATUS(name, code) \
  case code:                      \
    return #code;
#include "fulmen/enums.def"
    default:
      return "unknown status";
  }
}

using fulmen::Error;
using fulmen::refuse;
using fulmen::sentence;
using fulmen::Status;

fulmen_status fulmen_tensor_init(fulmen_tensor* tensor, void* data, fulmen_dtype dtype,
                                 int32_t rank, const int64_t* shape) {
  return fulmen::api::guarded([&] {
    fulmen::api::require_pointer(tensor, "tensor", "the address of a fulmen_tensor");
    if (rank < 0 || rank > FULMEN_MAX_RANK) {
      throw Error(Status::kShape,
                  sentence("rank is ", rank, "; allowed is 0 to ", FULMEN_MAX_RANK));
    }
    if (rank > 0 && shape == nullptr) {
      refuse(sentence("shape is null; rank ", rank, " needs its extents"));
    }
    fulmen_tensor made = fulmen::api::absent_tensor();
    made.data = data;
    std::memcpy(&made.dtype, &dtype, sizeof dtype);  // see number_of
    made.rank = rank;
    fulmen::u64 stride = 1;  // wraps where extents are absurd; validate refuses those
    for (int axis = rank; axis-- > 0;) {
      made.shape[axis] = shape[axis];
      made.strides[axis] = static_cast<int64_t>(stride);
      stride *= static_cast<fulmen::u64>(shape[axis] > 0 ? shape[axis] : 1);
    }
    *tensor = made;
  });
}

void fulmen_problem_init_sized(fulmen_problem* problem, size_t struct_size) {
  fulmen::api::init_struct(problem, struct_size, fulmen::api::kDefaults);
}

void fulmen_tensors_init_sized(fulmen_tensors* tensors, size_t struct_size) {
  fulmen::api::init_struct(tensors, struct_size, fulmen::api::kAllAbsent);
}

void fulmen_experiment_init_sized(fulmen_experiment* experiment, size_t struct_size) {
  fulmen::api::init_struct(experiment, struct_size, {});
}
