// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// C structs into core types. Throws Error where a struct was not made by its _init function, or an
// enumerator or flag is none of those in fulmen.h; all else is validate's.
#pragma once

#include <cstring>

#include "core/problem.h"
#include "fulmen/fulmen.h"

namespace fulmen::api {

// Throws "problem.struct_size is 0: ..." unless `given` is what this library knows.
[[noreturn]] void refuse_struct_size(const char* subject, const char* init, size_t given,
                                     size_t known);
inline void check_struct_size(const char* subject, const char* init, size_t given, size_t known) {
  if (given != known) refuse_struct_size(subject, init, given, known);
}

// Null pointers: to a struct that an _init function makes, and to anything else.
void require_struct(const void* pointer, const char* subject, const char* init);
void require_pointer(const void* pointer, const char* subject, const char* what);

// The CPU has no streams.
void require_no_stream(const void* stream);

Tensor to_tensor(const fulmen_tensor& tensor, const char* subject);
Options to_options(const fulmen_problem* problem);
Arrays to_arrays(const fulmen_tensors* tensors);
Operation to_operation(const fulmen_operation& operation);

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

}  // namespace fulmen::api
