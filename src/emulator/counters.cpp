// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Shared memory has 32 banks of 4 bytes. Of a warp's access, words in one bank come one after the
// other, the same word for several lanes once: so ncu counts it on an H200, for accesses of 16
// bytes too (docs/en/contributing/emulator.md). Global memory comes in sectors of 32 bytes.
#include <algorithm>
#include <set>
#include <utility>

#include "emulator/launch.h"

namespace fulmen::emulator {
namespace {

constexpr u32 kBanks = 32;
constexpr u64 kSectorBytes = 32;
constexpr u64 kLaneBytes = 16;  // the most that a lane moves at once

u64 sectors_between(u64 begin, u64 end) {
  return (end + kSectorBytes - 1) / kSectorBytes - begin / kSectorBytes;
}

}  // namespace

void Counters::global_access(const std::string& array, u64 address, u64 bytes, bool stores,
                             const Who& who) {
  Traffic& traffic = arrays[array];
  (stores ? traffic.stored_bytes : traffic.loaded_bytes) += bytes;
  u64& sectors = stores ? traffic.stored_sectors : traffic.loaded_sectors;
  if (bytes > kLaneBytes) {  // an engine's, for all
    sectors += sectors_between(address, address + bytes);
  } else {
    add({who.site.key(), who.warp, static_cast<u32>(bytes), &sectors}, who.lane, address);
  }
}

void Counters::shared_access(u32 offset, u32 bytes, const Who& who) {
  sites_.try_emplace(who.site.key(), who.site);
  add({who.site.key(), who.warp, bytes, nullptr}, who.lane, offset);
}

void Counters::add(const AccessSite& where, u32 lane, u64 address) {
  Queue& queue = queues_[where];
  const u64 number = queue.came[lane]++;
  while (queue.waiting.size() <= number - queue.first) queue.waiting.emplace_back();
  WarpAccess& access = queue.waiting[number - queue.first];
  access.lanes |= 1u << lane;
  access.addresses[lane] = address;
  while (!queue.waiting.empty() && queue.waiting.front().lanes == ~0u) {
    count(where, queue.waiting.front());
    queue.waiting.pop_front();
    ++queue.first;
  }
}

void Counters::count(const AccessSite& where, const WarpAccess& access) {
  if (where.sectors == nullptr) return count_shared(where, access);
  std::set<u64> sectors;
  for (u32 lane = 0; lane < 32; ++lane) {
    if ((access.lanes >> lane & 1) == 0) continue;
    const u64 begin = access.addresses[lane];
    for (u64 at = begin / kSectorBytes; at * kSectorBytes < begin + where.bytes; ++at) {
      sectors.insert(at);
    }
  }
  *where.sectors += sectors.size();
}

void Counters::count_shared(const AccessSite& where, const WarpAccess& access) {
  SharedSite& site = by_site_[where.site];
  ++site.accesses;
  const u32 lanes = where.bytes == kLaneBytes ? 16 : 32;  // of a request
  for (u32 first = 0; first < 32; first += lanes) {
    std::array<std::set<u64>, kBanks> wanted;
    std::set<u64> all;
    for (u32 lane = first; lane < first + lanes; ++lane) {
      if ((access.lanes >> lane & 1) == 0) continue;
      for (u32 w = 0; w < std::max(where.bytes / 4, 1u); ++w) {
        const u64 word = access.addresses[lane] / 4 + w;
        wanted[word % kBanks].insert(word);
        all.insert(word);
      }
    }
    size_t most = 0;
    for (const auto& bank : wanted) most = std::max(most, bank.size());
    site.wavefronts += most;
    site.needed += (all.size() + kBanks - 1) / kBanks;
  }
}

void Counters::finish_blocks() {
  for (const auto& [where, queue] : queues_) {
    for (const WarpAccess& access : queue.waiting) count(where, access);
  }
  queues_.clear();
  for (const auto& [key, counted] : std::exchange(by_site_, {})) {
    SharedSite& site = shared[sites_.at(key).text()];
    site.accesses += counted.accesses;
    site.wavefronts += counted.wavefronts;
    site.needed += counted.needed;
  }
}

}  // namespace fulmen::emulator
