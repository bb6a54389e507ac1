// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of 16 bits as threads have them side by side, and what a sample of the rows of a head says
// of it: a constant of each dim, the largest norm, the largest number.
#pragma once

#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/quantise/config.h"

namespace fulmen {

// The sum over neighbouring lanes, kLanes of them, a power of two.
template <i32 kLanes>
inline float sum_of_lanes(float x) {
#pragma unroll
  for (i32 distance = 1; distance < kLanes; distance *= 2) x += ptx::shuffle_xor(x, u32(distance));
  return x;
}
template <i32 kLanes>
inline float largest_of_lanes(float x) {
#pragma unroll
  for (i32 distance = 1; distance < kLanes; distance *= 2) {
    x = ptx::max(x, ptx::shuffle_xor(x, u32(distance)));
  }
  return x;
}

// What a thread has of a row.
struct RowPart {
  float x[QuantiseConfig::kElements];

  template <DType kDType>
  static RowPart load(const u16* pointer) {
    const ptx::U32x4 words = ptx::load_global_x4(pointer);
    RowPart part;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      const auto pair = ptx::unpack<kDType>(words.word[w]);
      part.x[2 * w] = pair.word[0];
      part.x[2 * w + 1] = pair.word[1];
    }
    return part;
  }
  float square() const {
    float sum = 0;
#pragma unroll
    for (i32 i = 0; i < QuantiseConfig::kElements; ++i) sum = ptx::fma(x[i], x[i], sum);
    return sum;
  }
  float largest() const {
    float most = 0;
#pragma unroll
    for (i32 i = 0; i < QuantiseConfig::kElements; ++i) most = ptx::max(most, ptx::abs(x[i]));
    return most;
  }
  float dot(const RowPart& other) const {
    float sum = 0;
#pragma unroll
    for (i32 i = 0; i < QuantiseConfig::kElements; ++i) sum = ptx::fma(x[i], other.x[i], sum);
    return sum;
  }
  void subtract(const RowPart& other) {
#pragma unroll
    for (i32 i = 0; i < QuantiseConfig::kElements; ++i) x[i] -= other.x[i];
  }

  // Hadamard's matrix of kDims, without its factor 1 / sqrt(kDims), on each kDims of a row.
  template <i32 kDims>
  void rotate() {
#pragma unroll
    for (i32 distance = 1; distance < QuantiseConfig::kElements; distance *= 2) {
#pragma unroll
      for (i32 i = 0; i < QuantiseConfig::kElements; ++i) {
        if (i & distance) continue;
        const float a = x[i], b = x[i + distance];
        x[i] = a + b;
        x[i + distance] = a - b;
      }
    }
#pragma unroll
    for (i32 distance = 1; distance < kDims / QuantiseConfig::kElements; distance *= 2) {
      const float sign = i32(ptx::thread_index()) & distance ? -1.f : 1.f;
#pragma unroll
      for (i32 i = 0; i < QuantiseConfig::kElements; ++i) {
        x[i] = ptx::fma(x[i], sign, ptx::shuffle_xor(x[i], u32(distance)));
      }
    }
  }
};

// Of up to kSamples rows of a head, which the threads of a block have side by side.
template <QuantiseConfig kConfig, i32 kDim>
struct RowSample {
  static constexpr i32 kLanes = kConfig.lanes(kDim);
  static constexpr i32 kSlots = kConfig.kSampleThreads / kLanes;
  static constexpr i32 kSteps = kConfig.kSamples / kSlots;
  static constexpr i32 kWarps = kConfig.kSampleThreads / 32;

  const u16* first;
  i64 stride;
  i32 rows;    // that count
  u32 shared;  // sample_bytes()

  i32 count() const { return min(rows, kConfig.kSamples); }
  i32 slot() const { return i32(ptx::thread_index()) / kLanes; }
  i32 column() const { return i32(ptx::thread_index()) % kLanes * kConfig.kElements; }

  // Calls each(part) for the rows of this thread's slot; of lanes that have none, zeros.
  template <class Each>
  void for_each(const Each& each) const {
    constexpr i32 kAtOnce = min(4, kSteps);
    static_assert(kSteps % kAtOnce == 0);
    for (i32 step = 0; step < kSteps; step += kAtOnce) {
      RowPart parts[kAtOnce] = {};
#pragma unroll
      for (i32 s = 0; s < kAtOnce; ++s) {
        const i32 i = (step + s) * kSlots + slot();
        if (i < count() && column() < kDim) {
          const i64 row = i64{i} * rows / count();
          parts[s] = RowPart::load<kConfig.dtype>(first + row * stride + column());
        }
      }
#pragma unroll
      for (i32 s = 0; s < kAtOnce; ++s) each(parts[s]);
    }
  }

  // Over all threads of the block.
  template <class Combine>
  float combined(float x, const Combine& combine) const {
#pragma unroll
    for (i32 distance = 1; distance < 32; distance *= 2) {
      x = combine(x, ptx::shuffle_xor(x, u32(distance)));
    }
    ptx::block_sync();
    if (ptx::thread_index() % 32 == 0) store(i32(ptx::thread_index()) / 32, x);
    ptx::block_sync();
    x = load(0);
    for (i32 w = 1; w < kWarps; ++w) x = combine(x, load(w));
    return x;
  }

  // The mean of each dim over rows that are finite, or 0 where it is less than half of a row: then
  // it would take nothing off. In shared memory, and in `constant`.
  void find_constant(float* constant, bool keeps) const {
    RowPart sum{};
    float square = 0;
    for_each([&](const RowPart& part) {
      const float own = part.square();
      if (!(sum_of_lanes<kLanes>(own) <= kLargestNorm)) return;
      square += own;
#pragma unroll
      for (i32 i = 0; i < kConfig.kElements; ++i) sum.x[i] += part.x[i];
    });
#pragma unroll
    for (i32 i = 0; i < kConfig.kElements; ++i) {
      store(slot() * kLanes * kConfig.kElements + column() + i, sum.x[i]);
    }
    ptx::block_sync();
    const i32 dim = i32(ptx::thread_index());
    float mean = 0;
    if (dim < kDim) {
      for (i32 s = 0; s < kSlots; ++s) mean += load(s * kLanes * kConfig.kElements + dim);
      mean /= float(max(count(), 1));
    }
    const float gain = 4 * mean * mean * float(count()) - square;
    const float total = combined(gain, [](float a, float b) { return a + b; });
    ptx::block_sync();
    if (keeps || !(total >= 0)) mean = 0;
    if (dim < kDim) {
      store(dim, mean);
      constant[dim] = mean;
    }
    ptx::block_sync();
  }
  RowPart constant() const {
    RowPart part{};
    if (column() < kDim) {
#pragma unroll
      for (i32 i = 0; i < kConfig.kElements; ++i) part.x[i] = load(column() + i);
    }
    return part;
  }

  // The largest norm, of rows that are finite, less a constant.
  float largest_norm(const RowPart& constant) const {
    float most = 0;
    for_each([&](RowPart part) {
      if (column() < kDim) part.subtract(constant);
      const float square = sum_of_lanes<kLanes>(part.square());
      if (square <= kLargestNorm) most = ptx::max(most, square);
    });
    return ptx::accurate_sqrt(combined(most, [](float a, float b) { return ptx::max(a, b); }));
  }
  float largest_number() const {
    float most = 0;
    for_each([&](const RowPart& part) {
      const float own = part.largest();
      if (own <= kLargestNorm) most = ptx::max(most, own);
    });
    return combined(most, [](float a, float b) { return ptx::max(a, b); });
  }

 private:
  static constexpr float kLargestNorm = 0x1p120f;
  void store(i32 at, float x) const {
    ptx::store_shared(shared + 4 * u32(at), __builtin_bit_cast(u32, x));
  }
  float load(i32 at) const {
    return __builtin_bit_cast(float, ptx::load_shared(shared + 4 * u32(at)));
  }
};

}  // namespace fulmen
