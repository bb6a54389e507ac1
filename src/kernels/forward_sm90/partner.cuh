// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Of heads wider than registers hold O of 64 rows: two thread blocks of a cluster share their query
// rows. A warpgroup and its partner, the same one of the other block, have the same 64 rows, each
// with half of the keys of every block for S, and half of the columns of O. So nothing is computed
// twice, and each block loads half of K and half of V. Each thread sends its partner, the same one
// of the other block, its rounded weights, and where a maximum is taken that; at the end its sums.
#pragma once

#include "kernels/forward_sm90/config.h"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// Each sends a message and receives one, in turns: number n lies in slot n % 2. With number n + 1 a
// warp says that it has read n, so that its partner may send n + 2.
template <ForwardSm90Config kConfig>
struct Partner {
  ForwardStorage<kConfig> shared;
  u32 number = 0;

  // The first half of the weights; into the second.
  void send(const u32 (&P)[kConfig.weight_words()]) {
    if constexpr (kConfig.paired) send_vectors<kConfig.own_keys() / 16>(P);
  }
  void receive(u32 (&P)[kConfig.weight_words()]) {
    if constexpr (kConfig.paired) {
      receive_vectors<kConfig.own_keys() / 16>(P + kConfig.weight_words() / 2);
    }
  }

  // Makes the maxima of two rows those of both halves.
  auto maximum() {
    return [this](float (&block_max)[2]) {
      if constexpr (kConfig.paired) {
        float others[4];
        exchange({block_max[0], block_max[1], 0, 0}, others);
        for (i32 r = 0; r < 2; ++r) block_max[r] = ptx::max(block_max[r], others[r]);
      }
    };
  }

  // Adds what the partner has of two rows: sums of weights, and whether O is finite.
  void add(float (&sum)[2]) {
    float probe[2] = {};
    add(sum, probe);
  }
  void add(float (&sum)[2], float (&probe)[2]) {
    if constexpr (kConfig.paired) {
      float others[4];
      exchange({sum[0], sum[1], probe[0], probe[1]}, others);
      for (i32 r = 0; r < 2; ++r) {
        sum[r] += others[r];
        probe[r] += others[2 + r];
      }
    }
  }

 private:
  static u32 warpgroup() { return ptx::thread_index() / 128; }
  static u32 thread() { return ptx::thread_index() % 128; }

  void exchange(const float (&own)[4], float (&others)[4]) {
    u32 words[4];
    for (i32 i = 0; i < 4; ++i) words[i] = __builtin_bit_cast(u32, own[i]);
    send_vectors<1>(words);
    receive_vectors<1>(words);
    for (i32 i = 0; i < 4; ++i) others[i] = __builtin_bit_cast(float, words[i]);
  }

  template <i32 kVectors>
  void send_vectors(const u32* words) {
    const u32 slot = number % 2;
    const u32 arrived = shared.message_arrived(warpgroup(), slot);
    if (thread() == 0) ptx::mbarrier_arrive_expect(arrived, 2048 * kVectors);
    const u32 other = ptx::cluster_rank() ^ 1;
    const u32 to = ptx::map_shared(shared.message(warpgroup(), slot), other) + thread() * 16;
    const u32 tells = ptx::map_shared(arrived, other);
    ptx::warp_sync();  // all lanes have read the message before
    if (thread() % 32 == 0) ptx::mbarrier_arrive_read(tells);
#pragma unroll
    for (i32 v = 0; v < kVectors; ++v) {
      const u32* const w = words + 4 * v;
      ptx::store_async_x4(to + u32(2048 * v), {{w[0], w[1], w[2], w[3]}}, tells);
    }
  }

  template <i32 kVectors>
  void receive_vectors(u32* words) {
    const u32 slot = number % 2;
    ptx::mbarrier_wait_copies(shared.message_arrived(warpgroup(), slot), number / 2 % 2);
    const u32 from = shared.message(warpgroup(), slot) + thread() * 16;
#pragma unroll
    for (i32 v = 0; v < kVectors; ++v) {
      const ptx::U32x4 x = ptx::load_shared_x4(from + u32(2048 * v));
#pragma unroll
      for (i32 w = 0; w < 4; ++w) words[4 * v + w] = x.word[w];
    }
    ++number;
  }
};

}  // namespace fulmen
