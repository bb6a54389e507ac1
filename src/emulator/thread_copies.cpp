// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// cp.async and its groups: PTX ISA 9.0, section 9.7.9.25.3.
#include "emulator/copies.h"

#include <utility>

#include "emulator/order.h"
#include "emulator/shared_memory.h"

namespace fulmen::emulator {
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
