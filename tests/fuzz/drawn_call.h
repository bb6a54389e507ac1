// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A call of fulmen.h drawn from a seed: options, and arrays of every row of fulmen/arrays.def, each
// in memory of its own between guard pages, with gaps and axes in any order. As drawn it is a good
// call; damage.h spoils it. The structs lie between guard pages as well.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/arrays.h"
#include "fulmen/fulmen.h"
#include "support/guarded_memory.h"

namespace fulmen::test {

// The numbers of one case.
class Random {
 public:
  explicit Random(u64 seed) : engine_(seed) {}

  u64 word() { return engine_(); }
  // In [low, high].
  i64 number(i64 low, i64 high) {
    return low + static_cast<i64>(word() % static_cast<u64>(high - low + 1));
  }
  bool chance(double probability) {
    return static_cast<double>(word() >> 11) * 0x1p-53 < probability;
  }
  template <class T>
  const T& one_of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(number(0, static_cast<i64>(choices.size()) - 1))];
  }
  double normal() { return std::normal_distribution<double>()(engine_); }

 private:
  std::mt19937_64 engine_;
};

// Memory that ends at a page nobody may touch. Arrays begin kMarginBytes into it, so that damage
// can move them.
struct Block {
  static constexpr size_t kMarginBytes = 64;

  explicit Block(size_t bytes_) : bytes(bytes_), memory(bytes_) {}
  char* begin() const { return memory.data(); }
  char* end() const { return begin() + bytes; }

  size_t bytes;
  GuardedMemory memory;
};

// The number of a tensor's dtype, which damage makes none of the enumeration's: C++ may not load
// it.
inline int dtype_number(const fulmen_tensor& tensor) {
  int number;
  std::memcpy(&number, &tensor.dtype, sizeof number);
  return number;
}

inline constexpr fulmen_tensor fulmen_tensors::* kTensorMembers[] = {
#define FULMEN_ARRAY(array, member, ...) &fulmen_tensors::member,
#include "fulmen/arrays.def"
};

class DrawnCall {
 public:
  explicit DrawnCall(u64 seed);

  fulmen_tensor& at(Array array) const { return tensors->*kTensorMembers[static_cast<int>(array)]; }
  bool has(Array array) const { return at(array).data != nullptr || at(array).rank != 0; }
  fulmen_operation c_operation() const { return static_cast<fulmen_operation>(operation); }

  // Memory between guard pages, full of bytes that read as NaN.
  Block& add_block(size_t bytes);

  // Every tensor that is there, a line each.
  std::string text() const;

  // An array of a row of the table in memory of its own, and its contents.
  fulmen_tensor drawn(const ArrayRule& rule);

  Random random;
  Operation operation = Operation::kForward;
  bool packed = false;
  bool adds = false;              // backward: to what dq, dk and dv hold
  bool has_two_captures = false;  // of the expression, where there is one
  Sizes sizes{};
  DType dtype = DType::kFloat32;
  std::vector<i64> q_lengths, kv_lengths;  // of packed sequences

  fulmen_problem* problem = nullptr;
  fulmen_tensors* tensors = nullptr;
  std::vector<Block> blocks;

 private:
  void draw_sizes();
  void draw_options();
  void draw_expression();
  void draw_arrays();
  bool is_wanted(const ArrayRule& rule);
  DType dtype_of(const ArrayRule& rule);
  std::vector<i64> shape_of(const ArrayRule& rule);
  void place(fulmen_tensor& tensor, bool is_output, bool is_index);
  void fill(const fulmen_tensor& tensor, Array array);
  void fill_index(const fulmen_tensor& tensor, Array array);
  i64 fewest_keys();
  i64 word_of_segment(i64 rows, i64 n, i64 word);
};

// Calls visit(address) for each element; the tensor lies in memory.
template <class Visit>
void for_each_element(const fulmen_tensor& tensor, const Visit& visit) {
  const i64 bytes = size_bytes(static_cast<DType>(tensor.dtype));
  i64 extent[kMaxRank] = {1, 1, 1, 1}, stride[kMaxRank] = {}, at[kMaxRank];
  for (int axis = 0; axis < tensor.rank; ++axis) {
    extent[axis] = tensor.shape[axis];
    stride[axis] = tensor.shape[axis] > 1 ? tensor.strides[axis] : 0;
  }
  for (at[0] = 0; at[0] < extent[0]; ++at[0]) {
    for (at[1] = 0; at[1] < extent[1]; ++at[1]) {
      for (at[2] = 0; at[2] < extent[2]; ++at[2]) {
        for (at[3] = 0; at[3] < extent[3]; ++at[3]) {
          i64 index = 0;
          for (int axis = 0; axis < kMaxRank; ++axis) index += at[axis] * stride[axis];
          visit(static_cast<char*>(tensor.data) + index * bytes);
        }
      }
    }
  }
}

}  // namespace fulmen::test
