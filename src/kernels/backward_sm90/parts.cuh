// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Items of equal length leave the last round of a grid mostly idle, so the items of that round are
// taken in parts of their queries by as many thread blocks. All parts but the last leave their sums
// of dK and dV in global memory, float32 in the order of fragments, and the last adds them to its
// own. Must hold: parts are claimed in order, the last behind the others.
#pragma once

#include "kernels/backward_sm90/warpgroup.cuh"
#include "kernels/ptx/grid.cuh"

namespace fulmen {

template <BackwardConfig kConfig>
struct BackwardParts {
  using Own = BackwardWarpgroup<kConfig>;
  using Sums = typename Own::Sums;
  static constexpr i32 kSumFloats = 64 * kConfig.dims;

  const Own& own;

  // Whether this warpgroup's sums are now those of the whole item.
  bool gather(Sums& dK, Sums& dV, const BackwardItem& item) const {
    const i32 number = split_number<kConfig>(own.params, item);
    if (number < 0) return true;
    const i32 others = own.params.num_parts - 1;
    u32* const done = own.params.parts_done + 2 * number + own.warpgroup;
    if (item.part < others) {
      leave(dK, place(number * others + item.part, 0));
      leave(dV, place(number * others + item.part, 1));
      own.meet();
      if (own.thread == 0) ptx::announce(done);
      return false;
    }
    if (own.thread == 0) ptx::await(done, others);
    own.meet();
#pragma unroll 1
    for (i32 part = 0; part < others; ++part) {
      add(dK, place(number * others + part, 0));
      add(dV, place(number * others + part, 1));
    }
    return true;
  }

 private:
  float* place(i32 part, i32 which) const {
    const i64 at = (i64{part} * 2 + own.warpgroup) * 2 + which;
    return own.params.part_sums + at * kSumFloats + own.thread * 4;
  }
  void leave(const Sums& sums, float* to) const {
#pragma unroll
    for (i32 j = 0; j < kConfig.dims / 8; ++j) {
      ptx::store_l2_x4(to + j * 512,
                       {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]});
    }
  }
  void add(Sums& sums, const float* from) const {
#pragma unroll
    for (i32 j = 0; j < kConfig.dims / 8; ++j) {
      const ptx::F32x4 x = ptx::load_l2_x4(from + j * 512);
#pragma unroll
      for (i32 e = 0; e < 4; ++e) sums[4 * j + e] += x.word[e];
    }
  }
};

}  // namespace fulmen
