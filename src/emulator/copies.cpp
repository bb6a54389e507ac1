// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The copy engine, and cp.async.

#include "emulator/copies.h"

#include <utility>

#include "emulator/barriers.h"
#include "emulator/order.h"
#include "emulator/shared_memory.h"

namespace fulmen::emulator {
namespace {

u32 box_bytes(const HostTensorMap& map) {
  return static_cast<u32>(map.box_rows * map.box_columns) * map.element_bytes();
}

// One element of the tensor, or null if it is out of range.
u8* element(const HostTensorMap& map, const BoxOrigin& origin, i32 row, i32 column) {
  const i32 at[4] = {origin.dim + column, origin.row + row, origin.head, origin.batch};
  u8* pointer = map.data;
  for (i32 axis = 0; axis < 4; ++axis) {
    if (at[axis] < 0 || at[axis] >= map.extents[axis]) return nullptr;
    pointer += at[axis] * map.strides_bytes[axis];
  }
  return pointer;
}

u32 swizzled(const HostTensorMap& map, u32 address) {
  if (!map.swizzled) return address;
  const bool is_narrow = static_cast<u32>(map.box_columns) * map.element_bytes() == 64;
  return is_narrow ? swizzled_64(address) : swizzled_128(address);
}

template <class Move>
void for_each_element(const HostTensorMap& map, u32 shared, const BoxOrigin& origin, Move move) {
  for (i32 row = 0; row < map.box_rows; ++row) {
    for (i32 column = 0; column < map.box_columns; ++column) {
      const u32 at = static_cast<u32>(row * map.box_columns + column);
      move(swizzled(map, shared + at * map.element_bytes()), element(map, origin, row, column));
    }
  }
}

// The engine of a copy that lands in a block of the cluster, and the checker's view of that.
Engine begin_copy(const Location& to, u32 num_bytes, const Location& barrier, bool async,
                  Site site) {
  at(site);
  expect_reachable(*barrier.block);
  const Engine engine = mbarrier_engine(barrier);
  on_cluster_by(engine, async, to, num_bytes, Kind::kWrite, site);
  if (to.block != current_block) note_far_access(*to.block, engine, Kind::kWrite, site);
  return engine;
}

// A box into one block; what it reads was looked at.
void load_box(const Location& to, const HostTensorMap& map, const Location& barrier,
              const BoxOrigin& origin, Site site) {
  const u32 num_bytes = box_bytes(map);
  bytes_at(to, num_bytes, 128);
  begin_copy(to, num_bytes, barrier, true, site);
  set_layout(to, num_bytes, map.swizzled ? Layout::kSwizzled : Layout::kPlain);
  ask_for_copy([=, origin_block = current_block] {
    expect_running(*to.block);
    for_each_element(map, to.address, origin, [&](u32 address, const u8* source) {
      const u32 size = map.element_bytes();
      u32 x = 0;
      if (source != nullptr) std::memcpy(&x, source, size);
      std::memcpy(bytes_at({to.block, address}, size, size), &x, size);
    });
    mbarrier_complete_bytes(barrier, *origin_block, num_bytes);
  });
}

// The checker's view of a box in global memory: its rows, as far as they are in range.
void on_rows(const HostTensorMap& map, const BoxOrigin& origin, Kind kind, Site site) {
  const i32 columns = min(map.box_columns, map.extents[0] - origin.dim);
  if (columns <= 0 || origin.dim < 0) return;
  for (i32 row = 0; row < map.box_rows; ++row) {
    const u8* const begin = element(map, origin, row, 0);
    if (begin != nullptr)
      on_global(begin, static_cast<u64>(columns) * map.element_bytes(), kind, site);
  }
}

class StoreWait final : public Wait {
 public:
  explicit StoreWait(const Thread& thread) : thread_(thread) {}
  bool over() const override {
    const std::set<u32>& running = thread_.stores_running;
    return running.empty() || *running.begin() > thread_.stores_committed;
  }
  std::string reason() const override { return "cp.async.bulk.wait_group"; }

 private:
  const Thread& thread_;
};

}  // namespace

constexpr u32 kUnitBytes = 16;  // moved as one by swizzles

HostTensorMap decode(const TensorMap& map) {
  HostTensorMap decoded;
  std::memcpy(static_cast<void*>(&decoded), &map, sizeof(decoded));
  return decoded;
}

TensorMap encode(const HostTensorMap& map) {
  TensorMap encoded{};
  std::memcpy(&encoded, &map, sizeof(map));
  return encoded;
}

void tensor_load(u32 shared, const TensorMap& encoded, u32 barrier, const BoxOrigin& origin,
                 Site site) {
  const HostTensorMap map = decode(encoded);
  on_rows(map, origin, Kind::kRead, site);
  load_box(own(shared), map, own(barrier), origin, site);
}

void tensor_load_multicast(u32 shared, const TensorMap& encoded, u32 barrier,
                           const BoxOrigin& origin, u32 ranks, Site site) {
  const HostTensorMap map = decode(encoded);
  const std::vector<Block*>& blocks = block().cluster->blocks;
  if (ranks == 0 || ranks >> blocks.size() != 0) {
    fail("multicast to blocks of bits " + std::to_string(ranks) + ", of a cluster of " +
         std::to_string(blocks.size()));
  }
  on_rows(map, origin, Kind::kRead, site);
  for (u32 rank = 0; rank < blocks.size(); ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    load_box({blocks[rank], shared}, map, {blocks[rank], barrier}, origin, site);
  }
}

void bulk_load(u32 shared, const void* source, u32 num_bytes, u32 barrier, Site site) {
  if (reinterpret_cast<u64>(source) % 16 != 0 || num_bytes % 16 != 0) {
    fail("cp.async.bulk from an address or of a size that is not a multiple of 16");
  }
  u8* const to = shared_at(shared, num_bytes, 16);
  begin_copy(own(shared), num_bytes, own(barrier), true, site);
  on_global(source, num_bytes, Kind::kRead, site);
  ask_for_copy([=, origin = current_block] {
    std::memcpy(to, source, num_bytes);
    mbarrier_complete_bytes(own(barrier), *origin, num_bytes);
  });
}

namespace {

struct FarCopy {
  Location to;
  Location barrier;
  u8* bytes;

  FarCopy(u32 address, u32 barrier_, u32 num_bytes, u32 alignment)
      : to(in_cluster(address)),
        barrier(in_cluster(barrier_)),
        bytes(bytes_at(to, num_bytes, alignment)) {
    if (to.block != barrier.block) fail("a copy to one block counts towards a barrier of another");
    count_far_bytes(to, &Counters::cluster_stored_bytes, num_bytes);
  }
};

}  // namespace

void bulk_store_cluster(u32 address, u32 source, u32 num_bytes, u32 barrier, Site site) {
  if (num_bytes % 16 != 0) fail("cp.async.bulk of a size that is not a multiple of 16");
  const FarCopy copy(address, barrier, num_bytes, 16);
  const u8* const from = shared_at(source, num_bytes, 16);
  const Engine engine = begin_copy(copy.to, num_bytes, copy.barrier, true, site);
  on_cluster_by(engine, true, own(source), num_bytes, Kind::kRead, site);
  note_far_access(block(), engine, Kind::kRead, site);
  ask_for_copy([=, origin = current_block] {
    expect_running(*copy.to.block);
    std::memcpy(copy.bytes, from, num_bytes);
    mbarrier_complete_bytes(copy.barrier, *origin, num_bytes);
  });
}

void store_async(u32 address, const void* words, u32 num_bytes, u32 barrier, Site site) {
  const FarCopy copy(address, barrier, num_bytes, num_bytes);
  begin_copy(copy.to, num_bytes, copy.barrier, false, site);
  std::array<u8, 16> bytes;
  copy_bytes(bytes.data(), words, num_bytes);
  ask_for_copy([=, origin = current_block] {
    expect_running(*copy.to.block);
    std::memcpy(copy.bytes, bytes.data(), num_bytes);
    mbarrier_complete_bytes(copy.barrier, *origin, num_bytes);
  });
}

void tensor_store(const TensorMap& encoded, u32 shared, const BoxOrigin& origin, Site site) {
  const HostTensorMap map = decode(encoded);
  shared_at(shared, box_bytes(map), 128);
  if (origin.dim < 0 || origin.row < 0 || origin.head < 0 || origin.batch < 0) {
    fail("a tensor store that begins before the tensor, which is illegal on an H200");
  }
  Thread& thread = self();
  if (thread.store_agent == kNoAgent) {
    thread.store_agent =
        world().new_engine("a tensor store of " + world().name_agent(thread.agent));
  }
  const u32 number = ++thread.stores_issued;
  const Engine engine = {thread.store_agent, number, thread.clock};
  for_each_element(map, shared, origin, [&](u32 address, const u8* target) {
    // What is out of range is not written, so it does not matter what lies there.
    if (target == nullptr || address % kUnitBytes != 0) return;
    on_shared_by(engine, true, address - kSharedBase, kUnitBytes, Kind::kRead, site);
  });
  on_rows(map, origin, Kind::kWrite, site);
  thread.stores_running.insert(number);
  ask_for_copy([=, &thread] {
    for_each_element(map, shared, origin, [&map](u32 address, u8* target) {
      const u32 size = map.element_bytes();
      if (target != nullptr) std::memcpy(target, shared_at(address, size, size), size);
    });
    thread.stores_running.erase(number);
  });
}

void tensor_store_commit() { self().stores_committed = self().stores_issued; }

void tensor_store_wait() {
  wait(StoreWait(self()));
  Thread& thread = self();
  if (checking() && thread.stores_committed > 0) {
    thread.clock.seen.raise(thread.store_agent, thread.stores_committed);
  }
}

namespace {

void land(const ThreadCopy& copy) {
  copy_bytes(shared_at(copy.shared, copy.num_bytes, copy.num_bytes), copy.bytes.data(),
             copy.num_bytes);
}

}  // namespace

void thread_copy(u32 shared, const u8* global, u32 num_bytes, Site site) {
  Thread& thread = self();
  ThreadCopies& own = thread.copies;
  at(site);
  shared_at(shared, num_bytes, num_bytes);
  if (reinterpret_cast<u64>(global) % num_bytes != 0) {
    fail("cp.async from an address that is not a multiple of its size");
  }
  ++own.issued;
  if (checking()) {
    if (own.agent == kNoAgent) {
      own.agent = world().new_engine("cp.async of " + world().name_agent(thread.agent));
    }
    // In the generic proxy, after all that its thread has done.
    on_shared_by({own.agent, own.issued, thread.clock}, false, shared - kSharedBase, num_bytes,
                 Kind::kWrite, site);
  }
  ThreadCopy copy{shared, num_bytes, {}};
  if (global != nullptr) {
    on_global(global, num_bytes, Kind::kRead, site);
    copy_bytes(copy.bytes.data(), global, num_bytes);
  }
  if (world().random() % 2 == 0) {
    land(copy);
  } else {
    own.open.push_back(copy);
  }
}

void thread_copy_commit() {
  ThreadCopies& own = self().copies;
  own.groups.push_back({std::exchange(own.open, {}), own.issued});
}

void thread_copy_wait(u32 pending_groups) {
  ThreadCopies& own = self().copies;
  while (own.groups.size() > pending_groups) {
    const ThreadCopyGroup& group = own.groups.front();
    for (const ThreadCopy& copy : group.copies) land(copy);
    if (checking() && group.last > 0) self().clock.seen.raise(own.agent, group.last);
    own.groups.pop_front();
  }
}

}  // namespace fulmen::emulator
