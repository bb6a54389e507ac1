// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows as threads have them side by side, and what a sample of the rows of a head says of it: a
// constant of each dim, the largest norm, the largest number.
#pragma once

#include "kernels/attention/quantisation.cuh"
#include "kernels/common/array_access.cuh"
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
template <i32 kElements>
struct RowPart {
  float x[kElements];

  // From memory that is aligned to 16 bytes.
  template <DType kDType>
  void load(const u8* address) {
    using T = typename ElementOf<kDType>::Type;
    constexpr i32 kOfVector = 16 / i32(sizeof(T));
#pragma unroll
    for (i32 v = 0; v < kElements / kOfVector; ++v) {
      const ptx::U32x4 words = ptx::load_global_x4(reinterpret_cast<const u16*>(address) + 8 * v);
#pragma unroll
      for (i32 w = 0; w < 4; ++w) {
        if constexpr (sizeof(T) == 4) {
          x[4 * v + w] = __builtin_bit_cast(float, words.word[w]);
        } else {
          const auto pair = ptx::unpack<kDType>(words.word[w]);
          x[8 * v + 2 * w] = pair.word[0];
          x[8 * v + 2 * w + 1] = pair.word[1];
        }
      }
    }
  }
  float square() const {
    float sum = 0;
#pragma unroll
    for (i32 i = 0; i < kElements; ++i) sum = ptx::fma(x[i], x[i], sum);
    return sum;
  }
  float largest() const {
    float most = 0;
#pragma unroll
    for (i32 i = 0; i < kElements; ++i) most = ptx::max(most, ptx::abs(x[i]));
    return most;
  }
  // The magnitudes of other's numbers that are finite, where they are larger.
  void raise_to(const RowPart& other) {
#pragma unroll
    for (i32 i = 0; i < kElements; ++i) {
      const float magnitude = ptx::abs(other.x[i]);
      if (magnitude > x[i] && magnitude <= kLargestFloat) x[i] = magnitude;
    }
  }
  float dot(const RowPart& other) const {
    float sum = 0;
#pragma unroll
    for (i32 i = 0; i < kElements; ++i) sum = ptx::fma(x[i], other.x[i], sum);
    return sum;
  }
  void subtract(const RowPart& other) {
#pragma unroll
    for (i32 i = 0; i < kElements; ++i) x[i] -= other.x[i];
  }

  // Hadamard's matrix of kDims, without its factor 1 / sqrt(kDims), on each kDims of a row.
  template <i32 kDims>
  void rotate() {
#pragma unroll
    for (i32 distance = 1; distance < min(kElements, kDims); distance *= 2) {
#pragma unroll
      for (i32 i = 0; i < kElements; ++i) {
        if (i & distance) continue;
        const float a = x[i], b = x[i + distance];
        x[i] = a + b;
        x[i + distance] = a - b;
      }
    }
#pragma unroll
    for (i32 distance = 1; distance < kDims / kElements; distance *= 2) {
      const float sign = i32(ptx::thread_index()) & distance ? -1.f : 1.f;
#pragma unroll
      for (i32 i = 0; i < kElements; ++i) {
        x[i] = ptx::fma(x[i], sign, ptx::shuffle_xor(x[i], u32(distance)));
      }
    }
  }
};

// Rows of a head in memory. kVectors: each begins at a multiple of 16 bytes, its elements lie side
// by side, and lanes have none or all of theirs.
template <DType kDType, i32 kDims, bool kVectors>
struct SourceRows {
  static constexpr i32 kDim = kDims;
  static constexpr i32 kElements = RowLanes::elements(kDim);
  using T = typename ElementOf<kDType>::Type;

  const u8* first;
  i64 stride;  // of rows, in elements
  i64 dim_stride = 1;

  // From dim `column` on; of lanes that have none zeros.
  RowPart<kElements> load(i64 row, i32 column) const {
    RowPart<kElements> part{};
    const u8* const address = first + (row * stride + column * dim_stride) * i64{sizeof(T)};
    if constexpr (kVectors) {
      if (column < kDim) part.template load<kDType>(address);
    } else {
#pragma unroll
      for (i32 i = 0; i < kElements; ++i) {
        if (column + i < kDim) {
          part.x[i] = widen(load_element<T>(address + i * dim_stride * i64{sizeof(T)}));
        }
      }
    }
    return part;
  }
};

// A sample of the rows of a head, which the threads of a block have side by side.
template <class Source>
struct RowSample {
  static constexpr i32 kDim = Source::kDim;
  static constexpr i32 kElements = Source::kElements;
  static constexpr i32 kLanes = RowLanes::lanes(kDim);
  static constexpr i32 kSlots = RowLanes::kSampleThreads / kLanes;
  static constexpr i32 kSteps = kSampledRows / kSlots;
  static constexpr i32 kWarps = RowLanes::kSampleThreads / 32;
  static_assert(kDim <= RowLanes::kSampleThreads);
  using Part = RowPart<kElements>;

  Source source;
  i32 rows;    // that count
  u32 shared;  // sample_bytes()

  i32 count() const { return i32(num_sampled(rows)); }
  i32 slot() const { return i32(ptx::thread_index()) / kLanes; }
  i32 column() const { return i32(ptx::thread_index()) % kLanes * kElements; }

  // Calls each(part) for the rows of this thread's slot; of lanes that have none, zeros.
  template <class Each>
  void for_each(const Each& each) const {
    constexpr i32 kAtOnce = min(4, kSteps);
    static_assert(kSteps % kAtOnce == 0);
    for (i32 step = 0; step < kSteps; step += kAtOnce) {
      Part parts[kAtOnce] = {};
#pragma unroll
      for (i32 s = 0; s < kAtOnce; ++s) {
        const i32 i = (step + s) * kSlots + slot();
        if (i < count()) parts[s] = source.load(sampled_row(i, rows), column());
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
  // it would take nothing off. In shared memory; the thread of each dim has its own.
  float find_constant(bool keeps) const {
    Part sum{};
    float square = 0;
    for_each([&](const Part& part) {
      const float own = part.square();
      if (!(sum_of_lanes<kLanes>(own) <= kLargestSquare)) return;
      square += own;
#pragma unroll
      for (i32 i = 0; i < kElements; ++i) sum.x[i] += part.x[i];
    });
#pragma unroll
    for (i32 i = 0; i < kElements; ++i) {
      store(slot() * kLanes * kElements + column() + i, sum.x[i]);
    }
    ptx::block_sync();
    const i32 dim = i32(ptx::thread_index());
    float mean = 0;
    if (dim < kDim) {
      for (i32 s = 0; s < kSlots; ++s) mean += load(s * kLanes * kElements + dim);
      mean /= float(max(count(), 1));
    }
    const float total =
        combined(gain_of_constant(mean, count()) - square, [](float a, float b) { return a + b; });
    ptx::block_sync();
    if (keeps || !(total >= 0)) mean = 0;
    if (dim < kDim) store(dim, mean);
    ptx::block_sync();
    return mean;
  }
  Part constant() const {
    Part part{};
    if (column() < kDim) {
#pragma unroll
      for (i32 i = 0; i < kElements; ++i) part.x[i] = load(column() + i);
    }
    return part;
  }

  // The largest norm, of rows that are finite, less a constant.
  float largest_norm(const Part& constant) const {
    float most = 0;
    for_each([&](Part part) {
      if (column() < kDim) part.subtract(constant);
      const float square = sum_of_lanes<kLanes>(part.square());
      if (square <= kLargestSquare) most = ptx::max(most, square);
    });
    return ptx::accurate_sqrt(combined(most, [](float a, float b) { return ptx::max(a, b); }));
  }
  float largest_number() const {
    float most = 0;
    for_each([&](const Part& part) {
      const float own = part.largest();
      if (own <= kLargestSquare) most = ptx::max(most, own);
    });
    return combined(most, [](float a, float b) { return ptx::max(a, b); });
  }

 private:
  void store(i32 at, float x) const {
    ptx::store_shared(shared + 4 * u32(at), __builtin_bit_cast(u32, x));
  }
  float load(i32 at) const {
    return __builtin_bit_cast(float, ptx::load_shared(shared + 4 * u32(at)));
  }
};

}  // namespace fulmen
