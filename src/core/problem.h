// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One attention problem, from the caller to the kernel: options, arrays and sizes.
//
// A Request is what the caller said, array by array. validate() (validate.h) turns it into a
// Problem, in which everything is checked and normal: every array has four axes in the order given
// below, defaults are filled in, broadcast axes have stride 0. Backends read Problems only.
// Packed sequences are one tensor batch; Problem::sequence says which rows belong to which entry.
#pragma once

#include <array>

#include "core/tensor.h"
#include "core/tile_choice.h"
#include "kernels/attention/dropout.cuh"
#include "kernels/attention/mask.cuh"
#include "kernels/attention/score_mod.cuh"
#include "kernels/attention/sequence.cuh"

namespace fulmen {

// The arrays of a call, with their axes in a Problem.
enum class Array : int {
  kQ,            // (batch, head, q_row, dim_qk)
  kK,            // (batch, kv_head, kv_row, dim_qk)
  kV,            // (batch, kv_head, kv_row, dim_v)
  kBias,         // (batch, head, q_row, kv_row)    broadcast: stride 0
  kMask,         // (batch, head, q_row, kv_row)    broadcast: stride 0
  kAlibiSlopes,  // (batch, head, 1, 1)    broadcast: stride 0
  kSinks,        // (1, head, 1, 1)
  kQLengths,     // (1, 1, 1, sequence)
  kKvLengths,    // (1, 1, 1, sequence)
  kCuQ,          // (1, 1, 1, sequence + 1)
  kCuKv,         // (1, 1, 1, sequence + 1)
  kQIds,         // (batch, 1, 1, q_row)    broadcast: stride 0
  kKvIds,        // (batch, 1, 1, kv_row)    broadcast: stride 0
  kRng,          // (1, 1, 1, 2)    seed, offset
  kO,            // (batch, head, q_row, dim_v)
  kLse,          // (batch, head, q_row, 1)
  kStats,        // (batch, head, q_row, 2)
  kDOut,         // as kO
  kDLse,         // as kLse
  kDQ,           // as kQ
  kDK,           // as kK
  kDV,           // as kV
  kDBias,        // (batch, head, q_row, kv_row)    extents as given: 1 where reduced
  kDSinks,       // (1, head, 1, 1)
  kCount
};

inline constexpr int kNumArrays = static_cast<int>(Array::kCount);

// Outside of name(), which is called on the path of every call: no copy of the table there.
inline constexpr const char* kArrayNames[] = {
    "q",          "k",    "v",     "bias",  "mask",   "alibi_slopes", "sinks", "q_lengths",
    "kv_lengths", "cu_q", "cu_kv", "q_ids", "kv_ids", "rng",          "o",     "lse",
    "stats",      "dout", "dlse",  "dq",    "dk",     "dv",           "dbias", "dsinks"};
static_assert(sizeof(kArrayNames) / sizeof(kArrayNames[0]) == kNumArrays);

constexpr const char* name(Array array) { return kArrayNames[static_cast<int>(array)]; }

struct Arrays {
  std::array<Tensor, kNumArrays> tensors;

  Tensor& operator[](Array array) { return tensors[static_cast<size_t>(array)]; }
  const Tensor& operator[](Array array) const { return tensors[static_cast<size_t>(array)]; }
};

enum class Operation { kForward, kBackward };
enum class Alignment { kBottomRight, kTopLeft };
enum class Backend { kAuto, kCpu, kCuda };
enum class Implementation { kAuto, kScalar, kTiled, kNaive, kSimt, kSm80, kSm90 };

constexpr const char* name(Operation operation) {
  return operation == Operation::kForward ? "forward" : "backward";
}

constexpr const char* name(Implementation implementation) {
  constexpr const char* kNames[] = {"auto", "scalar", "tiled", "naive", "simt", "sm80", "sm90"};
  return kNames[static_cast<int>(implementation)];
}

// Where an implementation computes; kAuto where it is none.
constexpr Backend backend_of(Implementation implementation) {
  if (implementation == Implementation::kAuto) return Backend::kAuto;
  return implementation <= Implementation::kTiled ? Backend::kCpu : Backend::kCuda;
}

// What a GPU kernel can be made without, to measure what each idea buys; bits of Options::without.
enum class Optimisation : u32 {
  kSwizzle = 1,              // tiles in shared memory permuted, so that no banks collide
  kPipeline = 2,             // several stages of tiles in flight
  kOverlap = 4,              // products run under the softmax of another block
  kPingPong = 8,             // warpgroups take turns at the tensor cores
  kLazyRescale = 16,         // sums are rescaled only when a maximum grew much
  kWarpSpecialisation = 32,  // one warpgroup loads, the others compute
  kFoldedScale = 64,         // scale and shift of a score as one multiply-add
  kBlockOrder = 128,         // the longest blocks first
  kFullBlocks = 256,         // blocks that every row sees whole do no mask arithmetic
  kTensorCores = 512,        // products on tensor cores
};
inline constexpr u32 kAllOptimisations = 1023;

// The name of one optimisation.
constexpr const char* name(Optimisation optimisation) {
  constexpr const char* kNames[] = {"swizzle",      "pipeline",     "overlap",
                                    "ping_pong",    "lazy_rescale", "warp_specialisation",
                                    "folded_scale", "block_order",  "full_blocks",
                                    "tensor_cores"};
  return kNames[__builtin_ctz(static_cast<u32>(optimisation))];
}

constexpr const char* name(Precision precision) {
  constexpr const char* kNames[] = {"float32", "tf32", "3xtf32"};
  return kNames[static_cast<int>(precision)];
}

// The options as the caller gave them; fulmen.h documents each.
struct Options {
  double scale = 0;  // NaN: the default
  double softcap = 0;
  bool causal = false;
  Alignment alignment = Alignment::kBottomRight;
  i64 window_left = kNoLimit;
  i64 window_right = kNoLimit;
  i64 prefix = 0;
  i64 chunk = 0;
  double dropout_p = 0;
  u64 rng_seed = 0;
  u64 rng_offset = 0;
  i64 max_q = 0;
  i64 max_kv = 0;
  bool deterministic = false;
  bool batch_invariant = false;
  Backend backend = Backend::kAuto;
  Implementation implementation = Implementation::kAuto;
  i32 device = -1;
  const char* device_name = nullptr;
  u32 without = 0;  // of Optimisation
  Precision precision = Precision::kFloat32;
  const char* tile = nullptr;  // of fulmen_plan_create_tuned
};

struct Request {
  Operation operation = Operation::kForward;
  Options options;
  Arrays arrays;
};

// More than any kernel asks for.
inline constexpr i64 kMaxPointerAlignment = 128;

struct Problem {
  Operation operation = Operation::kForward;
  Arrays arrays;

  // Sizes. num_sequences is the batch; when packed, tensor extents of batch are 1.
  i64 num_sequences = 0;
  i64 heads_q = 0;
  i64 heads_kv = 0;
  i64 q_rows = 0;   // extent of the q_row axis: total rows when packed
  i64 kv_rows = 0;  // likewise
  i64 dim_qk = 0;
  i64 dim_v = 0;
  bool packed = false;

  // Upper bounds of a sequence's lengths; the extents themselves where nothing better is known.
  i64 max_q = 0;
  i64 max_kv = 0;

  DType dtype = DType::kNone;    // of q, k, v
  ScoreMap<double> score_map{};  // scale, softcap
  IntervalMask mask;
  Alignment alignment = Alignment::kBottomRight;
  Dropout dropout;
  bool deterministic = false;
  bool batch_invariant = false;
  Backend backend = Backend::kCpu;                        // kCpu or kCuda
  Implementation implementation = Implementation::kAuto;  // forced, or kAuto
  u32 without = 0;                                        // of Optimisation
  Precision precision = Precision::kFloat32;              // the least that products must have
  TileChoice tile;  // of a search; plans of other calls name none

  // What every pointer is a multiple of, as far as it is known and up to kMaxPointerAlignment.
  i64 pointer_alignment = kMaxPointerAlignment;

  // 1 without heads, so that an empty problem divides by nothing.
  i64 group_size() const { return heads_kv == 0 ? 1 : heads_q / heads_kv; }
  i64 kv_head(i64 head) const { return head / group_size(); }
  bool has(Array array) const { return arrays[array].present(); }

  // Reads lengths and offsets from memory. Entries that are out of range count as empty, exactly as
  // on a device; hosts that can see them check them first (check_lengths in validate.h).
  Sequence sequence(i64 index) const;

  // The Philox counter word of a head of a sequence.
  u32 batch_head(i64 sequence, i64 head) const {
    return static_cast<u32>(sequence * heads_q + head);
  }
};

}  // namespace fulmen
