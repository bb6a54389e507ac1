// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// New rows of latent attention as records (kernels/attention/mla_record.cuh). A warp has a head of
// a row: before the 64 numbers that carry the position two runs of eight a lane, so that lanes side
// by side have what shares a scale, and of those 64 a pair a lane, which turns in registers. q goes
// the same way and stays in its own dtype.
#pragma once

#include "kernels/append/config.h"
#include "kernels/append/params.h"
#include "kernels/append/runs.cuh"
#include "kernels/append/targets.cuh"
#include "kernels/attention/mla_record.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// One head of a row, of k or of q.
template <AppendConfig kConfig>
struct RecordHead {
  using T = typename ElementOf<kConfig.dtype>::Type;
  using Table = typename ElementOf<kConfig.table>::Type;
  static constexpr i32 kLanes = 32;
  static constexpr i32 kRun = 8;
  static constexpr i32 kRuns = 2;
  static constexpr i32 kPairs = static_cast<i32>(kRecordRotary) / 2;
  static_assert(kPairs == kLanes && kRuns * kLanes * kRun >= kRecord656.stored());

  const AppendParams& p;
  i32 lane;
  bool is_q;
  i32 head;
  Run<T, kRun> run[kRuns];
  T pair[2];

  RecordHead(const AppendParams& params, i32 index, i32 own_lane)
      : p(params), lane(own_lane), is_q(index >= params.kv_pieces) {
    head = is_q ? index - p.kv_pieces : index;
  }

  i32 stored() const { return p.record_dims - static_cast<i32>(kRecordRotary); }
  i32 dim_of_run(i32 i) const { return kRun * (lane + kLanes * i); }
  bool has_run(i32 i) const { return dim_of_run(i) < stored(); }
  // Of the lane's pair, counted from the first that rotates.
  i32 dim_of_pair(i32 which) const {
    return kConfig.rotation == Rotation::kInterleaved ? 2 * lane + which : lane + kPairs * which;
  }

  void load(const RowNumber& number) {
    const ArrayView& from = is_q ? p.q : p.k;
    const auto at = [&](i32 dim) {
      return from.data + from.offset(number.batch, head, number.row, dim) * i64{sizeof(T)};
    };
#pragma unroll
    for (i32 i = 0; i < kRuns; ++i) {
      if (!has_run(i)) continue;
      if constexpr (kConfig.vectors) {
        load_run(run[i], at(dim_of_run(i)));
      } else {
        for (i32 j = 0; j < kRun; ++j) {
          run[i].element[j] = load_element<T>(at(dim_of_run(i) + j));
        }
      }
    }
    for (i32 which = 0; which < 2; ++which) {
      pair[which] = load_element<T>(at(stored() + dim_of_pair(which)));
    }
  }

  void store(const RowTarget& at) const {
    if (is_q ? at.position < 0 : at.page < 0) return;
    float x0 = widen(pair[0]), x1 = widen(pair[1]);
    if (kConfig.rotation != Rotation::kNone) {
      const auto column = [&](const ArrayView& table) {
        const i64 element = table.offset(0, 0, at.position, lane);
        return widen(load_element<Table>(table.data + element * i64{sizeof(Table)}));
      };
      rotate_pair<float>(x0, x1, column(p.cos), column(p.sin));
    }
    is_q ? store_q(at, x0, x1) : store_record(at, x0, x1);
  }

  void store_q(const RowTarget& row, float x0, float x1) const {
    const auto at = [&](i32 dim) {
      return p.q_out.data + p.q_out.offset(row.batch, head, row.row, dim) * i64{sizeof(T)};
    };
#pragma unroll
    for (i32 i = 0; i < kRuns; ++i) {
      if (!has_run(i)) continue;
      if constexpr (kConfig.vectors) {
        store_run(run[i], at(dim_of_run(i)));
      } else {
        for (i32 j = 0; j < kRun; ++j) store_element(at(dim_of_run(i) + j), run[i].element[j]);
      }
    }
    store_element(at(stored() + dim_of_pair(0)), narrow(x0, T{}));
    store_element(at(stored() + dim_of_pair(1)), narrow(x1, T{}));
  }

  void store_record(const RowTarget& row, float x0, float x1) const {
    u8* const page = p.k_cache.data + p.k_cache.offset(row.page, head, 0, 0);
    const RecordRow<u8> place(p.record_dims, page, row.page_row, p.extents.page_size,
                              p.k_cache.strides[2]);
    const u32 lanes_of_group = static_cast<u32>(place.layout.group) / kRun;
#pragma unroll
    for (i32 i = 0; i < kRuns; ++i) {
      float largest = 0;
      for (i32 j = 0; has_run(i) && j < kRun; ++j) {
        largest = ptx::larger(largest, ptx::magnitude(float{widen(run[i].element[j])}));
      }
#pragma unroll 1
      for (u32 distance = lanes_of_group / 2; distance > 0; distance /= 2) {
        largest = ptx::larger(largest, ptx::shuffle_xor(largest, distance));
      }
      if (has_run(i)) store_stored(place, i, record_exponent(largest));
    }
    store_element(place.rotary + 2 * dim_of_pair(0), to_bf16(x0));
    store_element(place.rotary + 2 * dim_of_pair(1), to_bf16(x1));
  }

  // A run, and the first lane of a group its scale: 2^(exponent - 127).
  void store_stored(const RecordRow<u8>& place, i32 i, u32 exponent) const {
    const float scale = power_of(static_cast<u8>(exponent));
    const i64 dim = dim_of_run(i);
    Run<e4m3, kRun> numbers;
    for (i32 j = 0; j < kRun; ++j) {
      numbers.element[j] = to_e4m3(widen(run[i].element[j]) / scale);
    }
    store_few(numbers, place.stored + dim);
    if (dim % place.layout.group != 0) return;
    const i64 group = dim / place.layout.group;
    if (place.layout.has_page_scales()) {
      place.scales[group] = static_cast<u8>(exponent);
    } else {
      store_element(place.scales + 4 * group, scale);
    }
  }
};

// The warps that move, `thread` of kConfig.movers(): p.pieces heads a row, those of k first.
template <AppendConfig kConfig>
void move_records(const AppendParams& p, const RowNumber& first, i32 rows, const RowTarget* targets,
                  i32 thread) {
  using Head = RecordHead<kConfig>;
  const i32 all_heads = rows * p.pieces;
  bool waits = true;  // for targets
#pragma unroll 1
  for (i32 index = thread / Head::kLanes;; index += kConfig.movers() / Head::kLanes) {
    const bool is_inside = index < all_heads;
    const i32 row = is_inside ? static_cast<i32>(u32(index) / u32(p.pieces)) : 0;
    Head head(p, index - row * p.pieces, thread % Head::kLanes);
    if (is_inside) head.load(first.plus(p, row));
    if (waits) ptx::block_sync();
    waits = false;
    if (!is_inside) return;
    head.store(targets[row]);
  }
}

}  // namespace fulmen
