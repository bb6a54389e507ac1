// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tensor copy engine, and cp.async.

#include "emulator/copies.h"

#include <utility>

#include "emulator/barriers.h"
#include "emulator/order.h"
#include "emulator/shared_memory.h"

namespace fulmen::emulator {
namespace {

u32 box_bytes(const HostTensorMap& map) {
  return static_cast<u32>(map.box_rows * map.box_columns) * 2;
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

template <class Move>
void for_each_element(const HostTensorMap& map, u32 shared, const BoxOrigin& origin, Move move) {
  for (i32 row = 0; row < map.box_rows; ++row) {
    for (i32 column = 0; column < map.box_columns; ++column) {
      const u32 address = shared + static_cast<u32>(row * map.box_columns + column) * 2;
      move(map.swizzled ? swizzled_128(address) : address, element(map, origin, row, column));
    }
  }
}

// The checker's view of a box in global memory: its rows, as far as they are in range.
void on_rows(const HostTensorMap& map, const BoxOrigin& origin, Kind kind, Site site) {
  const i32 columns = min(map.box_columns, map.extents[0] - origin.dim);
  if (columns <= 0 || origin.dim < 0) return;
  for (i32 row = 0; row < map.box_rows; ++row) {
    const u8* const begin = element(map, origin, row, 0);
    if (begin != nullptr) on_global(begin, static_cast<u64>(columns) * 2, kind, site);
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
  shared_at(shared, box_bytes(map), 128);
  const Engine engine = mbarrier_engine(barrier, mbarrier_count_copy(barrier));
  on_shared_by(engine, true, shared - kSharedBase, box_bytes(map), Kind::kWrite, site);
  set_layout(shared - kSharedBase, box_bytes(map),
             map.swizzled ? Layout::kSwizzled : Layout::kPlain);
  on_rows(map, origin, Kind::kRead, site);
  ask_for_copy([=] {
    for_each_element(map, shared, origin, [](u32 address, const u8* source) {
      u16 x = 0;
      if (source != nullptr) std::memcpy(&x, source, sizeof(x));
      store_raw(address, x);
    });
    mbarrier_complete_bytes(barrier, box_bytes(map));
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
    for_each_element(map, shared, origin, [](u32 address, u8* target) {
      const u16 x = load_raw<u16>(address);
      if (target != nullptr) std::memcpy(target, &x, sizeof(x));
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
