// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the forward kernel of Hopper and the copy engine cannot do, whatever the config.

#include "core/error.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/params.h"
#include "gpu/tile_lists.h"

namespace fulmen::gpu {
namespace {

constexpr i64 kMaxDim = 512;
constexpr i64 kMaxDimOf8Bits = 256;
constexpr i64 kCopyElements = 8;  // of 16 bits, in which the copy engine moves
constexpr i64 kMaxStrideBytes = i64{1} << 40;
constexpr i64 kMostCount = 0x7fffffff;

std::string refusal_of_caches(const Problem& problem) {
  if (!problem.has_caches()) return "";
  for (const Array array :
       {Array::kPositions, Array::kTree, Array::kBias, Array::kMask, Array::kQIds}) {
    if (!problem.has(array)) continue;
    return sentence("takes ", name(problem.cache_array()), " without ", name(array));
  }
  if (user_terms_of(problem).any()) return "takes caches without an expression";
  if (problem.has(Array::kBlocks)) return "takes caches without lists of blocks";
  if (!problem.is_paged()) return "";
  if (problem.num_pages == 0) return "needs at least one page";
  const i64 entries = problem.arrays[Array::kPageTable].shape[3];
  if (max(max(problem.num_pages, problem.page_rows), entries) >= kMostCount) {
    return "counts pages and their rows in 31 bits";
  }
  const bool by_rows = problem.page_rows % 8 != 0 || problem.has(Array::kKvStart);
  if (by_rows &&
      (problem.dim_qk % kCopyElements != 0 || max(problem.dim_qk, problem.dim_v) > 256)) {
    return sentence(
        "copies rows of small pages, and of pages with left padding, only where head dimensions "
        "are "
        "up to 256 and that of k a multiple of ",
        kCopyElements, "; they are ", problem.dim_qk, " and ", problem.dim_v);
  }
  return "";
}

}  // namespace

std::string refusal_of_8_bits(const Problem& problem) {
  if (!problem.is_quantised()) return "";
  if (problem.q_dtype() != DType::kFloat8E4M3) {
    return sentence("does not take k and v of ", name(problem.kv_dtype()), " beside q of ",
                    name(problem.q_dtype()), "; of 8 bits all three are float8_e4m3fn");
  }
  if (max(problem.dim_qk, problem.dim_v) > kMaxDimOf8Bits || problem.dim_v % 16 != 0) {
    return sentence("takes float8_e4m3fn in head dimensions up to ", kMaxDimOf8Bits,
                    ", that of v a multiple of 16; they are ", problem.dim_qk, " and ",
                    problem.dim_v);
  }
  for (const Array scale : kScaleArrays) {
    if (problem.arrays[scale].strides[2] == 0) continue;
    return sentence("takes scales of heads, and ", name(scale), " has one for each row");
  }
  const ScoreOptions score = score_options_of(problem);
  if (problem.has_caches() || score.has_pair_terms() || score.blocks || score.alibi ||
      score.score_mod || score.dropout || score.negative_scale) {
    return "takes float8_e4m3fn with positive scales, causal masks, windows, lengths and sinks "
           "alone";
  }
  return "";
}

std::string forward_sm90_refusal(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability != 90) return "needs compute capability 9.0 (Hopper)";
  if (problem.is_quantised() && user_terms_of(problem).any()) {
    return "takes k and v of 8 bits without an expression";
  }
  std::string refusal_8 = refusal_of_8_bits(problem);
  if (!refusal_8.empty()) return refusal_8;
  if (!problem.is_quantised() && problem.dtype != DType::kFloat16 &&
      problem.dtype != DType::kBFloat16) {
    return sentence("has no arithmetic for ", name(problem.dtype), ", only float16 and bfloat16");
  }
  if (problem.dim_qk < 1 || problem.dim_v < 1 || problem.dim_qk > kMaxDim ||
      problem.dim_v > kMaxDim || problem.dim_v % kCopyElements != 0) {
    return sentence("head dimensions must be 1 to ", kMaxDim, ", that of v a multiple of ",
                    kCopyElements, "; they are ", problem.dim_qk, " and ", problem.dim_v);
  }
  if (problem.kv_rows == 0) return "needs at least one key";
  if (problem.q_rows > kMostCount - 256 || problem.kv_rows > kMostCount - 256 ||
      problem.num_sequences > kMostCount) {
    return "counts rows in 31 bits";
  }
  std::string cache_refusal = refusal_of_caches(problem);
  if (!cache_refusal.empty()) return cache_refusal;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const std::string refusal = sm90_layout_refusal(problem, array);
    if (!refusal.empty()) return refusal;
  }
  const DType o = problem.arrays[Array::kO].dtype;
  if (o != problem.dtype && o != DType::kFloat32) return sentence("does not write ", name(o));
  return "";
}

std::string forward_sm90_refusal(const Problem& problem, const ForwardSm90Config& config) {
  if (problem.accumulate && (config.split_dims || config.paired)) {
    return sentence("merges parts of rows in head dimensions up to ",
                    problem.dim_v > 256 ? kMostWideDims : 256, "; they are ", problem.dim_qk,
                    " and ", problem.dim_v);
  }
  if (problem.tile.given() && !config.valid()) {
    return sentence(
        "a tile of ", config.q_rows(), " x ", config.kv_rows, " with ", config.stages,
        " stages and ", config.num_q_slots(), " slots of Q, ", config.shared_bytes(),
        " bytes of shared memory, is none that its kernel can have: ", config.why_invalid());
  }
  if (!fits_blocks(problem, {config.q_rows(), config.kv_rows, false})) {
    return sentence("tiles of ", config.kv_rows, " keys do not lie in blocks of ",
                    problem.block_kv);
  }
  return "";
}

std::string sm90_layout_refusal(const Problem& problem, Array array) {
  const Tensor& tensor = problem.arrays[array];
  if (tensor.strides[3] != 1 && tensor.shape[3] > 1) {
    return sentence(name(array), " has stride ", tensor.strides[3],
                    " along the head dimension; the copy engine needs 1");
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (tensor.shape[axis] <= 1) continue;
    const i64 stride = tensor.strides[axis];
    const i64 size = size_bytes(tensor.dtype);
    if (stride * size % 16 != 0 || stride <= 0 || stride * size >= kMaxStrideBytes) {
      return sentence(name(array), " has stride ", stride, " along axis ", axis,
                      "; the copy engine needs positive multiples of ", 16 / size);
    }
  }
  return "";
}

}  // namespace fulmen::gpu
