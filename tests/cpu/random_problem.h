// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention problems drawn from a seed: shapes, dtypes, strides, options and array contents, all
// that a Problem carries, so that implementations can be compared. Memory that no result may depend
// on (gaps between strides, rows past lengths) holds NaN.
#pragma once

#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/problem.h"
#include "core/validate.h"

namespace fulmen::test {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class RandomProblem {
 public:
  explicit RandomProblem(unsigned seed) : random_(seed) {}

  // A number in [low, high].
  i64 number(i64 low, i64 high) { return std::uniform_int_distribution<i64>(low, high)(random_); }
  // In [0, 1]. The standard's way to it computes two logarithms a number, which tests would wait
  // for.
  double fraction() {
    const double low = static_cast<double>(random_());
    return (low + 0x1p32 * static_cast<double>(random_())) * 0x1p-64;
  }
  bool chance(double probability) { return fraction() < probability; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[number(0, static_cast<i64>(choices.size()) - 1)];
  }
  // By Marsaglia's polar method.
  double normal() {
    double x, y, square;
    do {
      x = 2 * fraction() - 1;
      y = 2 * fraction() - 1;
      square = x * x + y * y;
    } while (square > 1 || square == 0);
    return y * std::sqrt(-2 * std::log(square) / square);
  }

  // Memory for an array of these extents, all NaN (of the byte pattern 0xff), in a random order of
  // axes, with gaps now and then.
  Tensor array(DType dtype, std::vector<i64> shape) {
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.rank = static_cast<int>(shape.size());
    std::vector<int> order(shape.size());
    for (size_t axis = 0; axis < order.size(); ++axis) order[axis] = static_cast<int>(axis);
    if (chance(0.5) && order.size() > 2) std::swap(order[order.size() - 2], order[1]);
    if (chance(0.15)) std::swap(order.back(), order[order.size() / 2]);
    i64 stride = chance(0.15) ? 2 : 1;
    for (size_t place = order.size(); place-- > 0;) {
      const int axis = order[place];
      tensor.shape[axis] = shape[static_cast<size_t>(axis)];
      tensor.strides[axis] = stride;
      stride *= max<i64>(tensor.shape[axis], 1);
      if (chance(0.2)) stride += number(1, 5);
    }
    tensor.data = memory(static_cast<size_t>(stride * size_bytes(dtype)));
    return tensor;
  }

  // The same without gaps, from a multiple of 16 bytes on.
  Tensor contiguous(DType dtype, std::vector<i64> shape);

  // A copy that begins one byte further, so that no element lies on a multiple of its size.
  Tensor misplaced(const Tensor& tensor);

  void fill_normal(const Tensor& tensor, double spread = 1) {
    for_each(tensor, [&](const i64* at) {
      store_real(address(tensor, at), tensor.dtype, spread * normal());
    });
  }

  // A contiguous row of numbers; the dtype is of an index.
  Tensor indices(DType dtype, const std::vector<i64>& values) {
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.rank = 1;
    tensor.shape[0] = static_cast<i64>(values.size());
    tensor.strides[0] = 1;
    tensor.data = memory(values.size() * 8);
    for (size_t i = 0; i < values.size(); ++i) {
      char* to = static_cast<char*>(tensor.data) + static_cast<i64>(i) * size_bytes(dtype);
      if (dtype == DType::kInt64) {
        store_bytes(to, values[i]);
      } else {
        store_bytes(to, static_cast<i32>(values[i]));
      }
    }
    return tensor;
  }

  template <class Visit>
  static void for_each(const Tensor& tensor, const Visit& visit) {
    i64 extent[kMaxRank] = {1, 1, 1, 1};
    for (int axis = 0; axis < tensor.rank; ++axis) extent[axis] = tensor.shape[axis];
    i64 at[kMaxRank];
    for (at[0] = 0; at[0] < extent[0]; ++at[0]) {
      for (at[1] = 0; at[1] < extent[1]; ++at[1]) {
        for (at[2] = 0; at[2] < extent[2]; ++at[2]) {
          for (at[3] = 0; at[3] < extent[3]; ++at[3]) visit(at);
        }
      }
    }
  }

  static char* address(const Tensor& tensor, const i64* at) {
    i64 index = 0;
    for (int axis = 0; axis < tensor.rank; ++axis) index += at[axis] * tensor.strides[axis];
    return static_cast<char*>(tensor.data) + index * size_bytes(tensor.dtype);
  }

  // The same array elsewhere, all NaN again: for a second implementation to write. As far from a
  // multiple of its element's size.
  Tensor twin(const Tensor& tensor) {
    if (!tensor.present()) return tensor;
    Tensor other = tensor;
    other.data = memory(size_of(tensor) + misplacement(tensor)) + misplacement(tensor);
    return other;
  }

  // Before and behind every array: nobody may touch it.
  static constexpr size_t kMarginBytes = 64;

  char* memory(size_t bytes) {
    owned_.emplace_back(bytes + 2 * kMarginBytes, '\xff');
    return owned_.back().data() + kMarginBytes;
  }

  // Whether an array that twin() made was written nowhere but in its elements: what lies around
  // them and between them is as memory() left it.
  bool is_intact_around(const Tensor& tensor) const;

  // A forward request with q, k, v, o, lse, stats and whatever options the seed draws.
  Request draw();

  // The same over a cache: pages of 1, 3, 16 or 64 rows in any order, some shared, or left padding
  // alone; positions, trees, packed queries. What no request may read is NaN, or an id of no page.
  // is_plain: q, k, v, o without gaps and with dims in steps of 8.
  Request draw_cache(bool is_plain = false);

 private:
  // Bytes from the first element to the last.
  static size_t size_of(const Tensor& tensor) {
    i64 last = 0;
    for (int axis = 0; axis < tensor.rank; ++axis) {
      last += max<i64>(tensor.shape[axis] - 1, 0) * tensor.strides[axis];
    }
    return static_cast<size_t>((last + 1) * size_bytes(tensor.dtype));
  }
  static size_t misplacement(const Tensor& tensor) {
    return reinterpret_cast<u64>(tensor.data) % static_cast<u64>(size_bytes(tensor.dtype));
  }
  struct CacheRequest;
  Tensor draw_array(const CacheRequest& drawn, DType dtype, const std::vector<i64>& shape);
  void draw_pages(Request& request, CacheRequest& drawn);
  void draw_positions(Request& request, const CacheRequest& drawn);
  void draw_masks(Request& request, i64 q_rows, i64 kv_rows);
  void draw_score_terms(Request& request);

  std::mt19937 random_;
  std::deque<std::vector<char>> owned_;
  i64 batch_ = 0, heads_q_ = 0, longest_q_ = 0, longest_kv_ = 0;
  bool packed_ = false;
  DType dtype_ = DType::kNone;
};

// Adds dout, the gradients that `need` names by bit (q, k, v, bias, sinks), and dlse by chance.
Request to_backward(RandomProblem& random, const Request& forward, unsigned need);

// The same forward call over keys and values of a type of 8 bits, with scales of drawn extents.
// What was NaN stays so, by its scale where the type has none. with_q: over such queries as well.
Request quantised(RandomProblem& random, const Request& given, DType dtype, bool with_q = false);

// The same call with lists of blocks of 64 or 128 rows and keys, of drawn extents: entries in any
// order, some twice, some -1.
Request with_blocks(RandomProblem& random, const Request& given);

// The same call with the two numbers of its dropout in an array, as kernels may find them.
Request with_rng_array(RandomProblem& random, const Request& given);

// The largest |a - b| over two arrays of the same shape, infinite where one is NaN or infinite and
// the other is not the same, and where; and the largest finite |b|.
struct Difference {
  double largest = 0;
  double magnitude = 0;
  std::string place;  // (batch, head, row, dim), as many as the array has axes: "[0][1][17][4]"
};
Difference compare(const Tensor& a, const Tensor& b);

// What rounding may cost an array of that dtype, computed in float32 (float64): units of its
// magnitude.
double tolerance(DType computed, DType stored);

}  // namespace fulmen::test
