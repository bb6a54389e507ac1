// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The copy engine on plain rows of bytes, and its way to fetch a box of a tensor into the L2 alone.
// PTX ISA 9.0, section 9.7.9.25.
#pragma once

#include "kernels/forward_sm90/config.h"

namespace fulmen::ptx {

// cp.async.bulk, global to shared: `bytes` at `source` land at `shared` and count towards
// `barrier`. All three are multiples of 16.
inline void bulk_load(u32 shared, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// cp.async.bulk.prefetch.tensor.4d: the box will be asked for soon.
inline void tma_prefetch(const TensorMap& map, i32 dim, i32 row, i32 head, i32 batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map),
               "r"(dim), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

}  // namespace fulmen::ptx
