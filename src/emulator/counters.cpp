// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Shared memory has 32 banks of 4 bytes. A warp's access of 4 bytes a lane or less is one request,
// of 8 bytes two (half-warps), of 16 bytes four (quarters): of each, words in one bank come one
// after the other, the same word for several lanes once.
#include "emulator/counters.h"

#include <algorithm>
#include <set>
#include <utility>

namespace fulmen::emulator {
namespace {

constexpr u32 kBanks = 32;

u64 wavefronts_of(const std::array<u32, 32>& offsets, u32 lanes, u32 first, u32 count, u32 words) {
  std::array<std::set<u32>, kBanks> wanted;
  for (u32 lane = first; lane < first + count; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    for (u32 w = 0; w < words; ++w) {
      const u32 word = offsets[lane] / 4 + w;
      wanted[word % kBanks].insert(word);
    }
  }
  size_t most = 0;
  for (const auto& bank : wanted) most = std::max(most, bank.size());
  return most;
}

}  // namespace

void Counters::global_access(const std::string& array, u64 bytes, Access::Kind kind) {
  Traffic& traffic = arrays[array];
  (kind == Access::Kind::kRead ? traffic.loaded_bytes : traffic.stored_bytes) += bytes;
}

void Counters::shared_access(u32 warp, u32 lane, u32 offset, u32 bytes, Access::Kind, Site site) {
  const Place place{site.key(), warp, bytes};
  sites_.try_emplace(site.key(), site);
  Queue& queue = queues_[place];
  const u64 number = queue.came[lane]++;
  while (queue.waiting.size() <= number - queue.first) queue.waiting.emplace_back();
  WarpAccess& access = queue.waiting[number - queue.first];
  access.lanes |= 1u << lane;
  access.offsets[lane] = offset;
  while (!queue.waiting.empty() && queue.waiting.front().lanes == ~0u) {
    count(place, queue.waiting.front());
    queue.waiting.pop_front();
    ++queue.first;
  }
}

void Counters::count(const Place& place, const WarpAccess& access) {
  const u32 words = std::max(place.bytes / 4, 1u);
  const u32 lanes = kBanks / words;  // of a request
  SharedSite& site = by_site_[place.site];
  ++site.accesses;
  for (u32 first = 0; first < kBanks; first += lanes) {
    const u64 taken = wavefronts_of(access.offsets, access.lanes, first, lanes, words);
    site.wavefronts += taken;
    site.needed += taken > 0 ? 1 : 0;
  }
}

void Counters::finish_blocks() {
  for (const auto& [place, queue] : queues_) {
    for (const WarpAccess& access : queue.waiting) count(place, access);
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
