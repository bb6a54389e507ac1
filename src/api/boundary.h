// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The boundary between C++ inside and C outside.
// Nothing thrown crosses it: each C function is return guarded([&] { ... }), in which Error becomes
// its status and sentence.
// C structs become core types: Error where a struct was not made by its _init function, or an
// enumerator or flag is none of those in fulmen.h; all else is validate's.
// And what a fulmen_plan* points to.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "core/error.h"
#include "core/problem.h"
#include "fulmen/fulmen.h"
#include "fulmen/fulmen_experimental.h"
#include "gpu/backend.h"
#include "plan/plan.h"

struct fulmen_plan {
  fulmen::Plan plan;
  std::shared_ptr<const fulmen::gpu::PreparedPlan> gpu;  // null: for the CPU
  fulmen::Arrays arrays;                                 // as they were given, for same_layout
};

namespace fulmen::api {

// Sends the log there: one line a message, with its level. `destination`: "stderr" or the path of a
// file, which is made or added to; a callback goes first. Throws Error kArgument when it cannot be
// opened.
void log_to(const char* destination);

// Once in the life of the process, at its first call: what FULMEN_LOG says. Throws like log_to,
// and then again at the next call.
void follow_environment_log();

// Back to that, after a callback: FULMEN_LOG's destination, or silence.
void restore_environment_log();

// Remembers the sentence for fulmen_last_error of this thread, tells the log, returns the status.
fulmen_status fail(Status status, const char* sentence) noexcept;

// The exception in flight, as a failure. Called from a catch block.
fulmen_status fail_with_current_exception() noexcept;

template <class Body>
fulmen_status guarded(const Body& body) noexcept {
  try {
    follow_environment_log();
    body();
    return FULMEN_OK;
  } catch (...) {
    return fail_with_current_exception();
  }
}

// Refuses a struct_size that no version's _init function writes: `given` bytes, where this library
// knows `known`. What `rest` points to is the part that it does not know, if any.
void check_struct_size(const char* subject, const char* init, size_t given, size_t known,
                       const void* rest);

// A struct as this library knows it: the caller's own where sizes agree. Otherwise `room`, which
// holds defaults, with the fields that both know. Throws where the caller set a field of later.
template <class Struct>
const Struct& known_struct(const Struct& given, const char* subject, const char* init,
                           Struct& room) {
  const size_t size = given.struct_size;
  if (size == sizeof(Struct)) return given;
  const char* const bytes = reinterpret_cast<const char*>(&given);
  check_struct_size(subject, init, size, sizeof(Struct), bytes + sizeof(Struct));
  std::memcpy(&room, bytes, size < sizeof(Struct) ? size : sizeof(Struct));
  room.struct_size = sizeof(Struct);
  return room;
}

// Writes the part of `defaults` that the caller's struct has room for, and zeros behind it.
template <class Struct>
void init_struct(Struct* target, size_t struct_size, const Struct& defaults) {
  if (target == nullptr || struct_size < sizeof(size_t)) return;
  char* const bytes = reinterpret_cast<char*>(target);
  const size_t known = struct_size < sizeof(Struct) ? struct_size : sizeof(Struct);
  std::memcpy(bytes, &defaults, known);
  std::memset(bytes + known, 0, struct_size - known);
  target->struct_size = struct_size;
}

constexpr fulmen_tensor absent_tensor() {
  fulmen_tensor tensor{};
  tensor.struct_size = sizeof(fulmen_tensor);
  tensor.dtype = FULMEN_FLOAT32;
  return tensor;
}

// Null pointers: to a struct that an _init function makes, and to anything else.
void require_struct(const void* pointer, const char* subject, const char* init);
void require_pointer(const void* pointer, const char* subject, const char* what);

// The CPU has no streams.
void require_no_stream(const void* stream);

Tensor to_tensor(const fulmen_tensor& tensor, const char* subject);
Tensor optional_tensor(const fulmen_tensor* tensor, const char* subject);  // null: absent
Options to_options(const fulmen_problem* problem);
Arrays to_arrays(const fulmen_tensors* tensors);
Operation to_operation(const fulmen_operation& operation);
Experiment to_experiment(const fulmen_experiment* experiment);  // null: none

Request to_request(const fulmen_problem* problem, const fulmen_tensors* tensors,
                   Operation operation);

// The number of an enumerator that came from C, which may be none of the enumeration's: C++ may not
// even load such a value, so its bytes are copied, and enumerators are passed by reference until
// here.
template <class Enum>
int number_of(const Enum& value) {
  static_assert(sizeof(Enum) == sizeof(int));
  int number;
  std::memcpy(&number, &value, sizeof number);
  return number;
}

// Cut between characters of UTF-8 where the buffer ends. Throws Error: null with a capacity.
void copy_text(const std::string& text, char* buffer, size_t capacity, size_t* needed);

// Throws Error. Arrays are not looked at, but for where q is. experiment: may be null.
fulmen_plan make_plan(const fulmen_problem* problem, const fulmen_tensors* tensors,
                      const fulmen_operation& operation,
                      const fulmen_experiment* experiment = nullptr);

// The JSON object of a plan.
std::string explain(const fulmen_plan& plan);

}  // namespace fulmen::api
