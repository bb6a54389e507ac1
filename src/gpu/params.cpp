// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One line for each array, in the order of Array.

#include "gpu/params.h"

#include <algorithm>

namespace fulmen::gpu {
namespace {

struct ArrayMember {
  ArrayView AttentionParams::* view;
  Array array;
};

constexpr ArrayMember kMembers[] = {
    {&AttentionParams::q, Array::kQ},
    {&AttentionParams::k, Array::kK},
    {&AttentionParams::v, Array::kV},
    {&AttentionParams::bias, Array::kBias},
    {&AttentionParams::mask, Array::kMask},
    {&AttentionParams::alibi_slopes, Array::kAlibiSlopes},
    {&AttentionParams::sinks, Array::kSinks},
    {&AttentionParams::q_lengths, Array::kQLengths},
    {&AttentionParams::kv_lengths, Array::kKvLengths},
    {&AttentionParams::cu_q, Array::kCuQ},
    {&AttentionParams::cu_kv, Array::kCuKv},
    {&AttentionParams::q_ids, Array::kQIds},
    {&AttentionParams::kv_ids, Array::kKvIds},
    {&AttentionParams::o, Array::kO},
    {&AttentionParams::lse, Array::kLse},
    {&AttentionParams::stats, Array::kStats},
    {&AttentionParams::dout, Array::kDOut},
    {&AttentionParams::dlse, Array::kDLse},
    {&AttentionParams::dq, Array::kDQ},
    {&AttentionParams::dk, Array::kDK},
    {&AttentionParams::dv, Array::kDV},
    {&AttentionParams::dbias, Array::kDBias},
    {&AttentionParams::dsinks, Array::kDSinks},
};

}  // namespace

AttentionParams attention_params(const Problem& problem, u32* faults) {
  AttentionParams p{};
  for (const ArrayMember& member : kMembers) {
    const Tensor& tensor = problem.arrays[member.array];
    if (tensor.present()) p.*member.view = view_of(tensor);
  }
  p.num_sequences = problem.num_sequences;
  p.heads_q = problem.heads_q;
  p.heads_kv = problem.heads_kv;
  p.q_rows = problem.q_rows;
  p.kv_rows = problem.kv_rows;
  p.dim_qk = problem.dim_qk;
  p.dim_v = problem.dim_v;
  const Tensor& dbias = problem.arrays[Array::kDBias];
  std::copy(std::begin(dbias.shape), std::end(dbias.shape), p.dbias_extents);
  p.mask_options = problem.mask;
  p.score_map = problem.score_map;
  p.dropout = problem.dropout;
  p.rng = static_cast<const i64*>(problem.arrays[Array::kRng].data);
  p.packed = problem.packed;
  p.bottom_right = problem.alignment == Alignment::kBottomRight;
  p.faults = faults;
  return p;
}

void bind_params(AttentionParams& params, const Problem& problem, u32* faults) {
  for (const ArrayMember& member : kMembers) {
    ArrayView& view = params.*member.view;
    if (view.present()) view.data = static_cast<u8*>(problem.arrays[member.array].data);
  }
  params.dropout = problem.dropout;
  params.rng = static_cast<const i64*>(problem.arrays[Array::kRng].data);
  params.faults = faults;
}

AttentionParams side_gradient_params(const Problem& problem, u32* faults) {
  AttentionParams params = attention_params(problem, faults);
  params.dq = params.dk = params.dv = ArrayView{};
  return params;
}

}  // namespace fulmen::gpu
