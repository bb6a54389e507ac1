// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The copy engine. Boxes of a 4-dimensional tensor of elements of 16 or 8 bits, rows of 128 bytes
// with or without the 128-byte swizzle, or of 16 without. A copy is only noted when asked for; the
// scheduler carries it out at some later time, in any order. The same for bulk copies and st.async.
//
// And cp.async: copies of 4, 8 or 16 bytes that a thread asks for and waits for itself. The source
// is read when the copy is asked for. Half of the copies land at once, half as late as the thread's
// waits allow, so that a missing wait shows as old data or NaN even where the checker is off; the
// checker sees a write by an engine of the thread's own, over once its group has been waited for.
#pragma once

#include "emulator/accesses.h"

namespace fulmen::emulator {

// What the emulator keeps in a TensorMap. Axes are dim, row, head, batch.
struct HostTensorMap {
  u8* data;
  i64 strides_bytes[4];
  i32 extents[4];
  i32 box_rows;
  i32 box_columns = 64;
  bool swizzled = true;  // rows of 64 bytes as such, others as rows of 128

  u32 element_bytes() const { return static_cast<u32>(strides_bytes[0]); }
};
static_assert(sizeof(HostTensorMap) <= sizeof(TensorMap));

// Where a box begins; its elements out of range are 0 on the way in and not written on the way out.
struct BoxOrigin {
  i32 dim;
  i32 row;
  i32 head;
  i32 batch;
};

TensorMap encode(const HostTensorMap& map);
HostTensorMap decode(const TensorMap& map);

void tensor_load(u32 shared, const TensorMap& map, u32 barrier, const BoxOrigin& origin, Site site);
// Into every block of the cluster whose rank is a bit of `ranks`.
void tensor_load_multicast(u32 shared, const TensorMap& map, u32 barrier, const BoxOrigin& origin,
                           u32 ranks, Site site);
void tensor_store(const TensorMap& map, u32 shared, const BoxOrigin& origin, Site site);
void tensor_store_commit();
void tensor_store_wait();  // for all committed stores of this thread

// cp.async.bulk from global memory; from shared memory to a block of the cluster; st.async. They
// count towards the barrier, which is in the block that they land in.
void bulk_load(u32 shared, const void* source, u32 num_bytes, u32 barrier, Site site);
void bulk_store_cluster(u32 address, u32 source, u32 num_bytes, u32 barrier, Site site);
void store_async(u32 address, const void* words, u32 num_bytes, u32 barrier, Site site);

// Zeros where `global` is null.
void thread_copy(u32 shared, const u8* global, u32 num_bytes, Site site);
void thread_copy_commit();
void thread_copy_wait(u32 pending_groups);

}  // namespace fulmen::emulator
