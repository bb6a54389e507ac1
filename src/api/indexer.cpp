// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 6: which keys a row of sparse latent attention sees.

#include "core/indexer.h"

#include <iterator>

#include "api/boundary.h"
#include "cpu/backend.h"
#include "gpu/backend.h"
#include "gpu/driver/device.h"

namespace fulmen::api {
namespace {

constexpr const char* kIndexerInit = "fulmen_indexer_init";

// In the order of kIndexerArrays.
constexpr fulmen_tensor fulmen_indexer::* kIndexerMembers[] = {
    &fulmen_indexer::q,       &fulmen_indexer::k,          &fulmen_indexer::k_scale,
    &fulmen_indexer::weights, &fulmen_indexer::kv_lengths, &fulmen_indexer::page_table,
    &fulmen_indexer::indices};
static_assert(std::size(kIndexerMembers) == std::size(kIndexerArrays));

constexpr fulmen_indexer no_indexer() {
  fulmen_indexer indexer{};
  indexer.struct_size = sizeof(fulmen_indexer);
  for (const auto member : kIndexerMembers) indexer.*member = absent_tensor();
  return indexer;
}
constexpr fulmen_indexer kAbsentIndexer = no_indexer();

IndexerProblem to_indexer(const fulmen_indexer& known) {
  IndexerProblem given;
  for (size_t i = 0; i < std::size(kIndexerArrays); ++i) {
    const IndexerArray& array = kIndexerArrays[i];
    given.*array.member = to_tensor(known.*kIndexerMembers[i], array.name);
  }
  if (known.causal != 0 && known.causal != 1) {
    refuse(sentence("causal is ", known.causal, "; allowed is 0 or 1"));
  }
  given.extents.causal = known.causal == 1;
  return given;
}

void run(const IndexerProblem& problem, void* stream) {
  const int device = gpu::device_of(problem);
  if (device >= 0) return gpu::index_keys(problem, device, stream);
  for (const IndexerArray& array : kIndexerArrays) {
    gpu::require_host(problem.*array.member, array.name, "fulmen_mla_indexer");
  }
  require_no_stream(stream);
  cpu::index_keys(problem);
}

}  // namespace
}  // namespace fulmen::api

void fulmen_indexer_init_sized(fulmen_indexer* indexer, size_t struct_size) {
  fulmen::api::init_struct(indexer, struct_size, fulmen::api::kAbsentIndexer);
}

fulmen_status fulmen_mla_indexer(const fulmen_indexer* indexer, void* stream) {
  return fulmen::api::guarded([&] {
    fulmen::api::require_struct(indexer, "indexer", fulmen::api::kIndexerInit);
    fulmen_indexer room = fulmen::api::kAbsentIndexer;
    const fulmen_indexer& known =
        fulmen::api::known_struct(*indexer, "indexer", fulmen::api::kIndexerInit, room);
    fulmen::api::run(fulmen::validate_indexer(fulmen::api::to_indexer(known)), stream);
  });
}
