// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h sections 2 and 3: structs are made, and read.

#include "api/convert.h"

#include <limits>

#include "api/boundary.h"
#include "core/refuse.h"

namespace fulmen::api {
namespace {

constexpr bool agree(DType dtype, fulmen_dtype code) {
  return static_cast<int>(dtype) == static_cast<int>(code);
}
static_assert(agree(DType::kFloat64, FULMEN_FLOAT64) && agree(DType::kFloat32, FULMEN_FLOAT32));
static_assert(agree(DType::kFloat16, FULMEN_FLOAT16) && agree(DType::kBFloat16, FULMEN_BFLOAT16));
static_assert(agree(DType::kBool, FULMEN_BOOL) && agree(DType::kInt32, FULMEN_INT32));
static_assert(agree(DType::kInt64, FULMEN_INT64));
static_assert(kMaxRank == FULMEN_MAX_RANK);
static_assert(kNoLimit == FULMEN_NO_LIMIT);

// The members of fulmen_tensors, in the order of Array.
constexpr fulmen_tensor fulmen_tensors::* kMembers[] = {
    &fulmen_tensors::q,      &fulmen_tensors::k,         &fulmen_tensors::v,
    &fulmen_tensors::bias,   &fulmen_tensors::mask,      &fulmen_tensors::alibi_slopes,
    &fulmen_tensors::sinks,  &fulmen_tensors::q_lengths, &fulmen_tensors::kv_lengths,
    &fulmen_tensors::cu_q,   &fulmen_tensors::cu_kv,     &fulmen_tensors::q_ids,
    &fulmen_tensors::kv_ids, &fulmen_tensors::rng,       &fulmen_tensors::o,
    &fulmen_tensors::lse,    &fulmen_tensors::stats,     &fulmen_tensors::dout,
    &fulmen_tensors::dlse,   &fulmen_tensors::dq,        &fulmen_tensors::dk,
    &fulmen_tensors::dv,     &fulmen_tensors::dbias,     &fulmen_tensors::dsinks,
};
static_assert(sizeof(kMembers) / sizeof(kMembers[0]) == kNumArrays);

bool to_flag(int32_t value, const char* option) {
  if (value != 0 && value != 1) refuse(sentence(option, " is ", value, "; allowed is 0 or 1"));
  return value == 1;
}

// An enumerator of core, from one of C with the same number, 0 .. last.
template <class To, class From>
To to_enum(const From& value, const char* option, int last) {
  const int number = number_of(value);
  if (number < 0 || number > last) {
    refuse(sentence(option, " is ", number, "; allowed is 0 to ", last,
                    ", the enumerators in fulmen.h"));
  }
  return static_cast<To>(number);
}

bool is_present(const fulmen_tensor& tensor, const char* subject) {
  check_struct_size(subject, "fulmen_tensors_init or fulmen_tensor_init", tensor.struct_size,
                    sizeof(fulmen_tensor));
  return tensor.data != nullptr || tensor.rank != 0;
}

Tensor present_tensor(const fulmen_tensor& tensor, const char* subject) {
  const int dtype = number_of(tensor.dtype);
  if (dtype < FULMEN_FLOAT64 || dtype > FULMEN_INT64) {
    throw Error(Status::kDType,
                sentence(subject, " has dtype number ", dtype, "; allowed is ",
                         static_cast<int>(FULMEN_FLOAT64), " to ", static_cast<int>(FULMEN_INT64),
                         ", the enumerators of fulmen_dtype"));
  }
  Tensor converted{tensor.data, static_cast<DType>(dtype), tensor.rank, {}, {}};
  for (int axis = 0; axis < kMaxRank; ++axis) {
    converted.shape[axis] = tensor.shape[axis];
    converted.strides[axis] = tensor.strides[axis];
  }
  return converted;
}

constexpr fulmen_tensor absent() {
  fulmen_tensor tensor{};
  tensor.struct_size = sizeof(fulmen_tensor);
  tensor.dtype = FULMEN_FLOAT32;
  return tensor;
}

constexpr fulmen_tensors all_absent() {
  fulmen_tensors tensors{};
  tensors.struct_size = sizeof(fulmen_tensors);
  for (const auto member : kMembers) tensors.*member = absent();
  return tensors;
}
constexpr fulmen_tensors kAllAbsent = all_absent();  // one copy a call, not 24 structs made anew

}  // namespace

void refuse_struct_size(const char* subject, const char* init, size_t given, size_t known) {
  if (given == 0) {
    refuse(sentence(subject, ".struct_size is 0; ", init, " makes the struct"));
  }
  refuse(sentence(subject, ".struct_size is ", given, "; this library knows ", known,
                  ": header and library are of different versions, or ", init,
                  " did not make the struct"));
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

Options to_options(const fulmen_problem* problem) {
  require_struct(problem, "problem", "fulmen_problem_init");
  check_struct_size("problem", "fulmen_problem_init", problem->struct_size, sizeof(fulmen_problem));
  return {
      .scale = problem->scale,
      .softcap = problem->softcap,
      .causal = to_flag(problem->causal, "causal"),
      .alignment = to_enum<Alignment>(problem->alignment, "alignment", FULMEN_TOP_LEFT),
      .window_left = problem->window_left,
      .window_right = problem->window_right,
      .prefix = problem->prefix,
      .chunk = problem->chunk,
      .dropout_p = problem->dropout_p,
      .rng_seed = problem->rng_seed,
      .rng_offset = problem->rng_offset,
      .max_q = problem->max_q,
      .max_kv = problem->max_kv,
      .deterministic = to_flag(problem->deterministic, "deterministic"),
      .batch_invariant = to_flag(problem->batch_invariant, "batch_invariant"),
      .backend = to_enum<Backend>(problem->backend, "backend", FULMEN_BACKEND_CUDA),
      .implementation =
          to_enum<Implementation>(problem->implementation, "implementation", FULMEN_SM90),
      .device = problem->device,
      .device_name = problem->device_name,
      .without = problem->without,
      .precision = to_enum<Precision>(problem->precision, "precision", FULMEN_PRECISION_3XTF32),
  };
}

Arrays to_arrays(const fulmen_tensors* tensors) {
  require_struct(tensors, "tensors", "fulmen_tensors_init");
  check_struct_size("tensors", "fulmen_tensors_init", tensors->struct_size, sizeof(fulmen_tensors));
  Arrays arrays;
  for (int index = 0; index < kNumArrays; ++index) {
    const Array array = static_cast<Array>(index);
    const fulmen_tensor& tensor = tensors->*kMembers[index];
    if (!is_present(tensor, name(array))) continue;
    arrays[array] = present_tensor(tensor, name(array));
  }
  return arrays;
}

Operation to_operation(const fulmen_operation& operation) {
  return to_enum<Operation>(operation, "operation", FULMEN_OPERATION_BACKWARD);
}

Request to_request(const fulmen_problem* problem, const fulmen_tensors* tensors,
                   Operation operation) {
  return {operation, to_options(problem), to_arrays(tensors)};
}

}  // namespace fulmen::api

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
    fulmen_tensor made = fulmen::api::absent();
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

void fulmen_problem_init(fulmen_problem* problem) {
  if (problem == nullptr) return;
  *problem = {};
  problem->struct_size = sizeof(fulmen_problem);
  problem->scale = std::numeric_limits<double>::quiet_NaN();
  problem->window_left = FULMEN_NO_LIMIT;
  problem->window_right = FULMEN_NO_LIMIT;
  problem->device = -1;
}

void fulmen_tensors_init(fulmen_tensors* tensors) {
  if (tensors != nullptr) *tensors = fulmen::api::kAllAbsent;
}
