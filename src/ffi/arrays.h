// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The arrays of one call of a binding: DLPack views on their way into fulmen_tensors, and the
// memory that they are in. Their list is fulmen/arrays.def; every binding passes them in its order.
// Shapes are not judged here: the core does that for every binding alike.
//
// And how the binding says no: a status and one sentence, thrown by whoever reads an argument,
// raised in Python by exports.cpp under the name of the status.
#pragma once

#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>

#include "ffi/abi.h"
#include "fulmen/fulmen.h"

namespace fulmen::ffi {

struct Refusal {
  fulmen_status status;
  std::string sentence;
};

// The arrays of fulmen_quantise in the order in which bindings pass them: what it writes comes
// first, scales and constants that are found apart from those that are given.
struct QuantiseRow {
  const char* name;
  fulmen_tensor fulmen_quantisation::* member;
  int32_t fulmen_quantisation::* finds;  // null: nothing
  bool has_head_and_row;
};
inline constexpr QuantiseRow kQuantiseRows[] = {
    {"values", &fulmen_quantisation::values, nullptr, true},
    {"scale", &fulmen_quantisation::scale, &fulmen_quantisation::find_scale, true},
    {"constant", &fulmen_quantisation::constant, &fulmen_quantisation::find_constant, true},
    {"x", &fulmen_quantisation::x, nullptr, true},
    {"scale", &fulmen_quantisation::scale, nullptr, true},
    {"constant", &fulmen_quantisation::constant, nullptr, true},
    {"lengths", &fulmen_quantisation::lengths, nullptr, false},
};
void set_array(fulmen_quantisation& quantisation, const QuantiseRow& row,
               const fulmen_tensor& array);

// Whether to rotate; the bits of the headroom.
fulmen_quantisation quantisation_of(int64_t rotate, int64_t headroom);

// The arrays of an append in the order in which bindings pass them: what it writes comes first.
struct AppendRow {
  const char* name;  // in fulmen.h
  const char* word;  // what the caller calls it
  fulmen_tensor fulmen_append::* member;
  bool has_head_and_row;  // axes (.., head, row, dim): the layout of the call applies
};

inline constexpr AppendRow kAppendRows[] = {
    {"k_cache", "k_pages", &fulmen_append::k_cache, true},
    {"v_cache", "v_pages", &fulmen_append::v_cache, true},
    {"q_out", "q_out", &fulmen_append::q_out, true},
    {"k", "k_new", &fulmen_append::k, true},
    {"v", "v_new", &fulmen_append::v, true},
    {"cu_new", "cu_new", &fulmen_append::cu_new, false},
    {"slots", "slots", &fulmen_append::slots, false},
    {"page_table", "page_table", &fulmen_append::page_table, false},
    {"page_indptr", "page_indptr", &fulmen_append::page_indptr, false},
    {"kv_lengths", "kv_lengths", &fulmen_append::kv_lengths, false},
    {"positions", "positions", &fulmen_append::positions, false},
    {"cos", "cos", &fulmen_append::cos, false},
    {"sin", "sin", &fulmen_append::sin, false},
    {"q", "q", &fulmen_append::q, true},
    {"k_scale", "k_scale", &fulmen_append::k_scale, true},
    {"v_scale", "v_scale", &fulmen_append::v_scale, true},
};

// A failed call of the C ABI, with its sentence: arrays are called what the caller calls them.
void check_failed(fulmen_status status);
void check_append_failed(fulmen_status status);
inline void check(fulmen_status status) {
  if (status != FULMEN_OK) check_failed(status);
}

// A dtype in the words of those who pass arrays.
struct DTypeRow {
  fulmen_dtype number;
  DLDataType dlpack;
  int32_t xla;
};

inline constexpr DTypeRow kDTypes[] = {
#define FULMEN_DTYPE(name, number, text, bytes, kind, dlpack, xla) \
  {number, {dlpack, 8 * bytes, 1}, xla},
#include "fulmen/enums.def"
};
inline constexpr size_t kNumDTypes = std::size(kDTypes);

// Their names, with commas between.
std::string known_dtypes();

enum ArrayIndex : size_t {
#define FULMEN_ARRAY(name, ...) name,
#include "fulmen/arrays.def"
  kNumArrays
};

// What calls do with an array, as the table says it.
enum class ArrayUse { kExtents, kMasks, kInputs, kResults, kUpstream, kGradients };

struct ArrayRow {
  const char* name;  // in fulmen.h
  const char* word;  // what the caller calls it
  fulmen_tensor fulmen_tensors::* member;
  ArrayUse use;
  ArrayIndex parameter;   // of a gradient: what it is the gradient of
  bool has_head_and_row;  // axes (.., head, row, dim): the layout of the call applies
  bool is_captured;       // by an expression: of any axes, none included
};

constexpr bool names_head_and_row(std::string_view axes) {
  return axes == "kQAxes" || axes == "kKAxes" || axes == "kVAxes" || axes == "kOAxes" ||
         axes == "kQScaleAxes" || axes == "kScaleAxes" || axes == "kVScaleAxes";
}

inline constexpr ArrayRow kArrays[] = {
#define FULMEN_ARRAY(name, member, word, axes, dtypes, use, run, parameter) \
  {#member,                                                                 \
   word,                                                                    \
   &fulmen_tensors::member,                                                 \
   ArrayUse::use,                                                           \
   parameter,                                                               \
   names_head_and_row(#axes),                                               \
   std::string_view(#axes) == "kCaptureAxes"},
#include "fulmen/arrays.def"
};

// Inputs come first, gradients last.
constexpr size_t count_of(bool (*is_wanted)(ArrayUse)) {
  size_t count = 0;
  for (const ArrayRow& row : kArrays) count += is_wanted(row.use) ? 1 : 0;
  return count;
}
inline constexpr size_t kNumInputs =
    count_of([](ArrayUse use) { return use <= ArrayUse::kInputs; });
inline constexpr size_t kNumGradients =
    count_of([](ArrayUse use) { return use == ArrayUse::kGradients; });
inline constexpr size_t kFirstGradient = kNumArrays - kNumGradients;
static_assert(kArrays[kNumInputs - 1].use <= ArrayUse::kInputs);
static_assert(kArrays[kFirstGradient].use == ArrayUse::kGradients);

// The axes of q, k, v, o and their gradients. As a number: 2 * rank + rows_before_heads.
struct Layout {
  int64_t rank = 0;
  bool rows_before_heads = false;  // (.., row, head, dim)

  static Layout of(int64_t code) { return {code >> 1, (code & 1) != 0}; }
};

// What the caller knows of an array and DLPack does not.
struct ViewOptions {
  bool rows_before_heads = false;  // axes (..., row, head, dim): exchanged where the array has them
  uint8_t dtype = 0;  // a number of fulmen_dtype, of as many bits: NumPy exports integers instead
                      // of bfloat16, bool and 8-bit floating-point numbers; 0: what DLPack says
};

// Throws Refusal, naming the array: a dtype that fulmen does not know, too many axes.
fulmen_tensor view(const char* name, const DLTensor& tensor, ViewOptions options);

// The memory that the arrays of a call are in. Pinned host memory is reached from both sides: it
// follows the others.
class MemorySpace {
 public:
  // Throws Refusal: a device that fulmen does not know, or another one than the arrays before.
  void add(const char* name, DLDevice device);

  bool on_gpu() const { return owner_ != nullptr && device_ >= 0; }
  int32_t device() const { return device_; }  // CUDA's number of the GPU; -1: host memory

 private:
  const char* owner_ = nullptr;  // the first array that says it
  int32_t device_ = -1;
};

inline constexpr int64_t kCurrentStream =
    -1;  // the one that the caller's framework has told tvm-ffi

struct Arrays {
  fulmen_tensors tensors;
  MemorySpace space;

  Arrays() { fulmen_tensors_init(&tensors); }
  void add(ArrayIndex index, const DLTensor& array, ViewOptions options);
  // The same without its pointer, wherever it is: for plans.
  void add_extents(ArrayIndex index, const DLTensor& array, ViewOptions options);

  // Tells the library what it would otherwise ask the driver: where a call without a backend runs.
  // Throws Refusal: a GPU is asked for, and the arrays are in host memory.
  void resolve_device(fulmen_problem* problem) const;
  // What the library gets as the stream; null on the CPU.
  void* stream(int64_t given) const;
};

// The options of a call: the bytes of a fulmen_problem, without pointers. The one reader of all
// bindings. Throws Refusal.
fulmen_problem problem_of(const void* bytes, size_t size);

}  // namespace fulmen::ffi
