// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of the sm90 implementation: what it refuses, and the config, launches, workspace
// and parameters that a problem gets on a card. plan.cpp decides, and launches
// kernels/forward_sm90/forward_sm90.cuh.
#pragma once

#include <vector>

#include "gpu/call.h"
#include "gpu/driver/launch.h"
#include "gpu/gpu_plan.h"
#include "gpu/jit/kernel_spec.h"
#include "gpu/tile_lists.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::gpu {

PlanOrRefusal plan_forward_sm90(const Problem& problem, const Gpu& gpu);

// The optimisations whose switch changes the config: d 64 full, say, has no overlap to leave out.
u32 forward_sm90_switches(const Problem& problem, const Gpu& gpu);

class ForwardSm90Plan final : public GpuPlan {
 public:
  ForwardSm90Config config;
  ForwardParams params;  // but for pointers
  // The workspace: a counter of work tiles at 0, where they are more than multiprocessors; the
  // documents of each block of keys; lists of tiles.
  bool counts_tiles = false;
  size_t num_key_ranges = 0;
  TileListsParams tile_lists{};  // with config.score.has_tile_lists()
  size_t tile_lists_at = 0;
  i64 value_blocks = 0;  // of e4m3: 128 keys each, transposed; they lie behind that
  static constexpr size_t kKeyRangesOffset = 16;
  static constexpr size_t kConditionOffset = 8;  // of a u32, with config.conditional
  static u32* condition(char* workspace) {
    return reinterpret_cast<u32*>(workspace + kConditionOffset);
  }

  void run(const Call& call) const override;
};

// ---- What the backward pass and the tests ask as well ------------------------------------------

// A plan of this kernel alone. conditional: it computes where a kernel before it wrote 1 at
// kConditionOffset of its workspace, which is 0 before.
PlanOrRefusal plan_tiles_sm90(const Problem& problem, const Gpu& gpu, bool conditional);

// The same for 16-bit inputs that precision "fp8" permits to be rounded to e4m3 (fp8.cpp).
PlanOrRefusal plan_fp8_sm90(const Problem& problem, const Gpu& gpu);

// Why tensor cores do not multiply quantised q, k and v as they are, in the forward kernels of
// Hopper and of mma.sync; "" where they do, and of others.
std::string refusal_of_8_bits(const Problem& problem);

// Why no config of this kernel computes a problem; "" where one does.
std::string forward_sm90_refusal(const Problem& problem, const Gpu& gpu);
// Why the config that was made for it does not.
std::string forward_sm90_refusal(const Problem& problem, const ForwardSm90Config& config);

// Why the copy engine cannot read or write an array; "" when it can.
std::string sm90_layout_refusal(const Problem& problem, Array array);

// The config of a problem that is not refused; `compared`: the tiles that were looked at.
ForwardSm90Config forward_sm90_config(const Problem& problem, const Gpu& gpu,
                                      std::vector<TileCandidate>* compared = nullptr);

// Work tiles of a run at most, over all heads and sequences.
i64 max_work_tiles(const Problem& problem, const ForwardSm90Config& config);

// Heads whose query blocks are handed out together, so that their keys and values stay in the L2.
i32 heads_per_group(const Problem& problem, const ForwardSm90Config& config, const Gpu& gpu);

// Everything but pointers.
ForwardParams forward_sm90_params(const Problem& problem, const ForwardSm90Config& config,
                                  const Gpu& gpu);

// Whether the copy engine brings an array over pairs: where not all rows are the same, and blocks
// of keys come one after the other.
bool comes_in_tiles(const Problem& problem, const ScoreOptions& score, Array array);

// What its map is made of: boxes of so many rows and keys, or 128 bytes of those.
TensorBox pair_box(const Problem& problem, Array array, i32 rows, u32 keys);

// The maps of bias and mask, as far as they come in tiles.
template <class Config, class Maps>
void encode_pairs(const Call& call, const Config& config, i32 rows, u32 keys, Maps& maps) {
  const auto map = [&](Array array, TensorMap& map) {
    encode(call.driver, pair_box(call.problem, array, rows, keys), map);
  };
  if (config.tiled_bias) map(Array::kBias, maps.bias);
  if (config.tiled_mask) map(Array::kMask, maps.mask);
}

// Which of bias and mask come in tiles.
void set_tiled_pairs(ForwardSm90Config& config, const Problem& problem);

// As many stages of bias and mask as there is room for; where there is none, their elements are
// loaded one by one.
void set_pair_stages(ForwardSm90Config& config);

// Blocks of keys whose documents document_ranges_sm90 finds.
size_t num_key_ranges(const Problem& problem, const ForwardSm90Config& config);

KernelSpec forward_sm90_spec(const ForwardSm90Config& config);

// The kernel before it that finds the documents of each block of keys.
KernelSpec sm90_key_ranges_spec(const ForwardSm90Config& config);

// The kernel before it that transposes V of e4m3.
KernelSpec sm90_values_spec(const ForwardSm90Config& config);

// Adds it to a plan, and its place in the workspace; and V^T of each block of keys and key head.
void add_transposed_values(ForwardSm90Plan& plan, const Problem& problem);
TensorBox value_box(const ForwardSm90Plan& plan, u8* values);

// Kernels that CI compiles for Hopper: every config that plans choose, in groups.
std::vector<std::vector<KernelSpec>> forward_sm90_specs();

inline constexpr i64 kShortRows = 1024;  // lengths up to this take the configs with a quick start

// The config with a tile, from one that has the options of the problem. compared: what was looked
// at, if not null.
ForwardSm90Config with_tile(const ForwardSm90Config& options, const Problem& problem,
                            const Gpu& gpu, std::vector<TileCandidate>* compared);

}  // namespace fulmen::gpu
