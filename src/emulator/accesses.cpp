// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From accesses to findings, and from findings to sentences.
#include "emulator/accesses.h"

#include <cstring>

#include "emulator/cluster.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "emulator/order.h"
#include "emulator/shared_memory.h"
#include "emulator/wgmma.h"

namespace fulmen::emulator {
namespace {

constexpr u32 kMbarrierBytes = 8;

// "sK[3], byte 12" or "shared byte 1036", and of which block where it is not the running one.
std::string name_shared(const Block& owner, u32 offset) {
  std::string name = "shared byte " + std::to_string(offset);
  for (const SharedArray& array : world().grid->shared_arrays) {
    if (offset < array.begin || offset - array.begin >= array.bytes) continue;
    const u32 byte = offset - array.begin;
    name = array.name + "[" + std::to_string(byte / array.row_bytes) + "], byte " +
           std::to_string(byte % array.row_bytes);
    break;
  }
  return &owner == current_block ? name : name + " of block " + std::to_string(owner.index);
}

const char* verb(Kind kind) {
  if (kind == Kind::kRead || kind == Kind::kMatrixRead) return "reads";
  return kind == Kind::kWrite ? "writes" : "adds to";
}
const char* past_verb(Kind kind) {
  if (kind == Kind::kRead || kind == Kind::kMatrixRead) return "read";
  return kind == Kind::kWrite ? "wrote" : "added to";
}

std::string name_earlier(const Access& earlier) {
  const std::string who = earlier.world == world().number        ? world().name_agent(earlier.agent)
                          : earlier.world < world().before.first ? "a launch before"
                                                                 : "another block";
  return who + " " + past_verb(earlier.kind) + " at " + earlier.site.text();
}

std::string describe(const Finding& finding, const std::string& subject, const std::string& what,
                     Kind kind) {
  const std::string does = subject + verb(kind) + " " + what + ", which ";
  switch (finding.fault) {
    case Fault::kUninitialised:
      return "uninitialised: " + does + "no thread wrote";
    case Fault::kProxy:
      return "missing fence.proxy.async: " + does + name_earlier(finding.earlier);
    default:
      return "race: " + does + name_earlier(finding.earlier) +
             " without a barrier or wait in between";
  }
}

// Whether two writes without order are right if both store the same.
bool may_be_same_value(const Finding& finding, Kind kind, bool async) {
  return finding.fault == Fault::kRace && kind == Kind::kWrite && !async &&
         finding.earlier.kind == Kind::kWrite && !finding.earlier.async;
}

void remember_value(const void* address, u64 bytes, std::string complaint) {
  SameValue& same = self().same_value;
  const u8* const begin = static_cast<const u8*>(address);
  same = {address, {begin, begin + bytes}, std::move(complaint)};
}

void on_shared_as(const Engine& engine, bool async, const std::string& subject, Block& here,
                  u32 offset, u32 bytes, Kind kind, Site site) {
  if (u64{offset} + bytes > here.shared_bytes) {
    fail("out of bounds: " + subject + verb(kind) + " shared bytes " + std::to_string(offset) +
         " to " + std::to_string(u64{offset} + bytes - 1) + " of " +
         std::to_string(here.shared_bytes));
  }
  if (!checking()) return;
  for_each_granule(offset, bytes, [&](u64 number, u16 bits) {
    const Access access{
        engine.time, static_cast<u16>(engine.agent), bits, world().number, kind, async, site};
    const Finding finding = here.shadow[number].touch(access, engine.clock, world().before,
                                                      static_cast<u32>(world().random()));
    if (finding.fault == Fault::kNone) return;
    const u32 first = static_cast<u32>(std::countr_zero(finding.bytes));
    const std::string what = name_shared(here, static_cast<u32>(number) * kGranuleBytes + first);
    std::string complaint = describe(finding, subject, what, kind);
    if (!may_be_same_value(finding, kind, async)) fail(complaint);
    remember_value(here.shared + offset, bytes, std::move(complaint));
  });
}

Engine running_thread() {
  const Thread& thread = self();
  return {thread.agent, thread.clock.seen[thread.agent], thread.clock};
}

void touch_shared(const Engine& who, Block& owner, u32 offset, u32 bytes, Kind kind, Site site) {
  check_same_value();
  at(site);
  on_shared_as(who, false, "", owner, offset, bytes, kind, site);
  if (kind == Kind::kWrite && checking()) {
    owner.layouts[offset / kLayoutBytes] = Layout::kUnknown;
  }
}

// The warp among all that run together.
u32 warp_of_world() { return self().agent / kWarpSize; }

}  // namespace

void copy_bytes(void* to, const void* from, u64 bytes) { std::memcpy(to, from, bytes); }

void check_same_value() {
  SameValue& same = self().same_value;
  if (same.address == nullptr) [[likely]]
    return;
  const bool changed = std::memcmp(same.address, same.before.data(), same.before.size()) != 0;
  same.address = nullptr;
  if (changed) fail(same.complaint);
}

void on_shared(u32 offset, u32 bytes, Kind kind, Site site) {
  if (Counters* counters = world().grid->counters) {
    counters->shared_access(offset, bytes, {warp_of_world(), self().lane(), site});
  }
  touch_shared(running_thread(), block(), offset, bytes, kind, site);
}

void on_cluster(const Location& to, u32 bytes, Kind kind, Site site) {
  const u32 offset = to.address - kSharedBase;
  if (to.block == current_block) return on_shared(offset, bytes, kind, site);
  reach(to, kind, site);
  count(kind == Kind::kRead ? &Counters::cluster_loaded_bytes : &Counters::cluster_stored_bytes,
        bytes);
  touch_shared(running_thread(), *to.block, offset, bytes, kind, site);
}

void on_mbarrier(const Location& at, Kind kind, Site site, const Engine* init) {
  const Engine who = init != nullptr ? *init : running_thread();
  touch_shared(who, *at.block, at.address - kSharedBase, kMbarrierBytes, kind, site);
}

void set_layout(const Location& to, u32 bytes, Layout layout) {
  if (!checking()) return;
  const u32 offset = to.address - kSharedBase;
  for (u32 at = offset; at < offset + bytes; at += kLayoutBytes) {
    to.block->layouts[at / kLayoutBytes] = layout;
  }
}

void expect_layout(const Engine& engine, u32 offset, Layout layout, Site site) {
  const Layout found = block().layouts[offset / kLayoutBytes];
  if (found == Layout::kUnknown || found == layout) return;
  at(site);
  const auto adverb = [](Layout l) { return l == Layout::kSwizzled ? " with" : " without"; };
  fail("wrong swizzle: " + world().name_agent(engine.agent) + " reads " +
       name_shared(block(), offset) + adverb(layout) + " the 128-byte swizzle, a copy wrote it" +
       adverb(found));
}

void on_shared_by(const Engine& engine, bool async, u32 offset, u32 bytes, Kind kind, Site site) {
  on_cluster_by(engine, async, own(kSharedBase + offset), bytes, kind, site);
}

void on_cluster_by(const Engine& engine, bool async, const Location& to, u32 bytes, Kind kind,
                   Site site) {
  at(site);
  const std::string subject =
      checking() ? world().name_agent(engine.agent) + " " : std::string("an engine ");
  on_shared_as(engine, async, subject, *to.block, to.address - kSharedBase, bytes, kind, site);
}

void on_global(const void* address, u64 bytes, Kind kind, Site site) {
  check_same_value();
  GlobalMemory* const memory = world().grid->memory;
  if (memory == nullptr) return;
  const u8* const begin = static_cast<const u8*>(address);
  const GlobalMemory::Array*& last = self().last_array;
  const GlobalMemory::Array* near = nullptr;
  if (last == nullptr || !last->has(begin, bytes)) last = memory->find(begin, bytes, near);
  if (last == nullptr) {
    if (near == nullptr || !checking()) return;
    at(site);
    fail("out of bounds: " + std::string(verb(kind)) + " " + std::to_string(bytes) + " bytes at " +
         near->name_element(begin));
  }
  at(site);
  if (Counters* counters = world().grid->counters) {
    counters->global_access(last->name(), reinterpret_cast<u64>(begin), bytes, kind != Kind::kRead,
                            {warp_of_world(), self().lane(), site});
  }
  if (!checking()) return;
  if (!last->writable()) {
    if (kind != Kind::kRead) fail("writes an input: " + last->name_element(begin));
    return;
  }
  if (kind == Kind::kAtomic && last->ordered()) kind = Kind::kOrdered;
  const Thread& thread = self();
  const Access access{thread.clock.seen[thread.agent],
                      static_cast<u16>(thread.agent),
                      0,
                      world().number,
                      kind,
                      false,
                      site};
  const Finding finding = const_cast<GlobalMemory::Array*>(last)->touch(
      begin, bytes, access, thread.clock, world().before, static_cast<u32>(world().random()));
  if (finding.fault == Fault::kNone) return;
  std::string complaint = describe(finding, "", last->name_element(begin), kind);
  if (!may_be_same_value(finding, kind, false)) fail(complaint);
  remember_value(address, bytes, std::move(complaint));
}

void on_pointer(const void* address, u64 bytes, Kind kind, Site site) {
  Thread& thread = self();
  const u8* const begin = static_cast<const u8*>(address);
  if (begin >= thread.stack_begin && begin < thread.stack_end) {
    if (!thread.wgmma.accumulators.empty()) wgmma_touch(begin, bytes, kind, site);
    return;
  }
  const u64 offset = reinterpret_cast<u64>(begin) - reinterpret_cast<u64>(block().shared);
  if (offset < block().shared_bytes) {
    on_shared(static_cast<u32>(offset), static_cast<u32>(bytes), kind, site);
  } else {
    on_global(address, bytes, kind, site);
  }
}

}  // namespace fulmen::emulator
