// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tensor loads and stores: PTX ISA 9.0, sections 5.5 and 9.7.9.25.
#include "emulator/tensor_copies.h"

#include "emulator/barriers.h"
#include "emulator/shared_memory.h"

namespace fulmen::emulator {
namespace {

HostTensorMap decode(const TensorMap& map) {
  HostTensorMap decoded;
  std::memcpy(&decoded, &map, sizeof(decoded));
  return decoded;
}

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

TensorMap encode(const HostTensorMap& map) {
  TensorMap encoded{};
  std::memcpy(&encoded, &map, sizeof(map));
  return encoded;
}

void tensor_load(u32 shared, const TensorMap& encoded, u32 barrier, const BoxOrigin& origin) {
  const HostTensorMap map = decode(encoded);
  shared_at(shared, box_bytes(map), 128);
  ask_for_copy([=] {
    for_each_element(map, shared, origin, [](u32 address, const u8* source) {
      u16 x = 0;
      if (source != nullptr) std::memcpy(&x, source, sizeof(x));
      store_shared(address, x);
    });
    mbarrier_complete_bytes(barrier, box_bytes(map));
  });
}

void tensor_store(const TensorMap& encoded, u32 shared, const BoxOrigin& origin) {
  const HostTensorMap map = decode(encoded);
  shared_at(shared, box_bytes(map), 128);
  Thread& thread = self();
  const u32 number = ++thread.stores_issued;
  thread.stores_running.insert(number);
  ask_for_copy([=, &thread] {
    for_each_element(map, shared, origin, [](u32 address, u8* target) {
      const u16 x = load_shared<u16>(address);
      if (target != nullptr) std::memcpy(target, &x, sizeof(x));
    });
    thread.stores_running.erase(number);
  });
}

void tensor_store_commit() { self().stores_committed = self().stores_issued; }

void tensor_store_wait() { wait(StoreWait(self())); }

}  // namespace fulmen::emulator
