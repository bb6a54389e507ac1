// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// precision "fp8" on Hopper: 16-bit q, k and v become e4m3 in the workspace (kernels/quantise), the
// kernels of e4m3 compute o, and where the numbers were none for e4m3, which the device alone
// knows, the kernel of 16 bits computes it again. Which calls are worth it is decided here; those
// that save statistics for gradients are not, since gradients are of the scores in 16 bits.

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/params.h"
#include "kernels/quantise/config.h"

namespace fulmen::gpu {
namespace {

constexpr i64 kDimUnit = 16;
constexpr DType kE4M3 = DType::kFloat8E4M3;

// The arrays that e4m3 has instead of q, k and v, in the order of their memory.
constexpr Array kOperands[] = {Array::kQ, Array::kK, Array::kV};

Tensor rows_of_e4m3(const Tensor& of) {
  Tensor tensor{nullptr, kE4M3, 4};
  std::copy(of.shape, of.shape + 4, tensor.shape);
  tensor.strides[3] = 1;
  for (int axis = 2; axis >= 0; --axis) {
    tensor.strides[axis] = tensor.strides[axis + 1] * tensor.shape[axis + 1];
  }
  return tensor;
}

Tensor scales_of_heads(const Tensor& of) {
  return {nullptr, DType::kFloat32, 4, {of.shape[0], of.shape[1], 1, 1}, {of.shape[1], 1, 0, 0}};
}

// The problem that the kernels of e4m3 are given: with arrays that the workspace has.
Problem problem_of_e4m3(const Problem& problem) {
  Problem eight = problem;
  eight.precision = Precision::kFloat32;
  eight.implementation = Implementation::kSm90;
  for (int i = 0; i < 3; ++i) {
    eight.arrays[kOperands[i]] = rows_of_e4m3(problem.arrays[kOperands[i]]);
    eight.arrays[kScaleArrays[i]] = scales_of_heads(problem.arrays[kOperands[i]]);
  }
  return eight;
}

i64 bytes_of(const Tensor& tensor) {
  i64 count = size_bytes(tensor.dtype);
  for (int axis = 0; axis < tensor.rank; ++axis) count *= tensor.shape[axis];
  return count;
}

// Why e4m3 does not serve a call of 16-bit q, k and v; "" where it does.
std::string refusal_of_fp8(const Problem& problem, const Gpu& gpu) {
  if (problem.has(Array::kStats)) return "gradients take the statistics of scores in 16 bits";
  if (problem.dim_qk % kDimUnit != 0 || problem.dim_v % kDimUnit != 0) {
    return sentence("it takes head dimensions that are multiples of ", kDimUnit, "; they are ",
                    problem.dim_qk, " and ", problem.dim_v);
  }
  if (problem.batch_invariant) {
    return "all entries have one answer to whether e4m3 serves them, and bits must not depend on "
           "others";
  }
  if (problem.packed.q != problem.packed.kv) return "queries and keys are not packed alike";
  const std::string refusal = forward_sm90_refusal(problem_of_e4m3(problem), gpu);
  return refusal.empty() ? "" : sentence("its kernel ", refusal);
}

// Where 16 bits are as fast, with what quantisation takes (H200, 2026-11-30, TFLOP/s of 16k rows
// full and causal: d 256 1,049 and 937 where bfloat16 has 819 and 802, d 128 980 and 921 for 863
// and 867, d 192 and 128 921 for 839, causal; d 64 667 and 613 for 671 and 650; d 256 4k 821 and
// 596 for 850 and 786).
std::string loses_to_16_bits(const Problem& problem) {
  if (problem.implementation == Implementation::kSm90) return "";
  constexpr i64 kManyKeys = 16384, kWide = 128;
  if (problem.dim_v < kWide) {
    return sentence("16 bits are as fast for values of fewer than ", kWide, " dims");
  }
  if (problem.max_kv >= kManyKeys && problem.max_q >= kManyKeys) return "";
  return sentence("16 bits are as fast below ", kManyKeys, " rows and keys");
}

size_t aligned(size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

class Fp8Plan final : public GpuPlan {
 public:
  Fp8Plan(const Problem& problem, std::unique_ptr<GpuPlan> eight, std::unique_ptr<GpuPlan> sixteen);
  void run(const Call& call) const override;

 private:
  // Takes so many bytes of the workspace.
  size_t take(i64 bytes) {
    const size_t at = workspace_bytes;
    workspace_bytes = aligned(at + static_cast<size_t>(bytes));
    return at;
  }
  void add_launches(const Problem& problem);

  std::unique_ptr<GpuPlan> eight_, sixteen_;
  QuantiseParams params_{};  // but for pointers
  size_t eight_at_;          // the workspace of one; that of the other is the first
  size_t operands_at_[3], scales_at_[3], constant_at_, difference_at_;
  bool restores_ = false;  // whether lse is asked for
};

Fp8Plan::Fp8Plan(const Problem& problem, std::unique_ptr<GpuPlan> eight,
                 std::unique_ptr<GpuPlan> sixteen)
    : eight_(std::move(eight)), sixteen_(std::move(sixteen)) {
  tile = eight_->tile;
  compared = eight_->compared;
  alignment_bytes = max(eight_->alignment_bytes, sixteen_->alignment_bytes);
  take(static_cast<i64>(sixteen_->workspace_bytes));
  eight_at_ = take(static_cast<i64>(eight_->workspace_bytes));
  zeroed_bytes = eight_at_ + eight_->zeroed_bytes;
  const Problem quantised = problem_of_e4m3(problem);
  for (int i = 0; i < 3; ++i) {
    operands_at_[i] = take(bytes_of(quantised.arrays[kOperands[i]]));
    scales_at_[i] = take(bytes_of(quantised.arrays[kScaleArrays[i]]));
  }
  const i64 float_bytes = size_bytes(DType::kFloat32);
  constant_at_ =
      take(problem.arrays[Array::kK].shape[0] * problem.heads_kv * problem.dim_qk * float_bytes);
  restores_ = problem.has(Array::kLse);
  difference_at_ =
      take(restores_ ? problem.batch_extent() * problem.heads_q * problem.q_rows * float_bytes : 0);
  params_.attention = attention_params(problem);
  params_.scale = static_cast<float>(problem.score_map.scale);
  // A sink stands beside scores as they are.
  params_.keeps_constant = problem.has(Array::kSinks);
  add_launches(problem);
  note =
      "precision fp8: q and k less a constant of each head and dim are rotated, and q, k and v "
      "rounded to e4m3 with a scale of each head; where numbers are not for e4m3, 16 bits";
}

void Fp8Plan::add_launches(const Problem& problem) {
  QuantiseConfig config;
  config.dtype = problem.dtype;
  config.d_qk = static_cast<i32>(problem.dim_qk);
  config.d_v = static_cast<i32>(problem.dim_v);
  config.varlen = score_options_of(problem).varlen;
  const auto add = [&](const char* entry, i64 blocks, i32 threads, i32 shared_bytes) {
    KernelSpec spec = spec_of<QuantiseParams>("quantise/quantise", entry,
                                              sentence(name(config.dtype), "_d", config.d_qk, "_",
                                                       config.d_v, config.varlen ? "_varlen" : ""),
                                              config);
    spec.num_threads = threads;
    spec.shared_bytes = static_cast<size_t>(shared_bytes);
    launches.push_back({std::move(spec), blocks});
  };
  const i64 kv_heads = problem.arrays[Array::kK].shape[0] * problem.heads_kv;
  const i64 q_heads = problem.batch_extent() * problem.heads_q;
  add("sample_operands", kv_heads + q_heads, RowLanes::kSampleThreads,
      RowLanes::sample_bytes(max(config.d_qk, config.d_v)));
  const auto blocks_of = [&](i64 heads, i64 rows, i32 dim) {
    return heads * ceil_div(rows, i64{RowLanes::block_rows(dim)});
  };
  add("quantise_operands",
      blocks_of(q_heads, problem.q_rows, config.d_qk) +
          blocks_of(kv_heads, problem.kv_rows, config.d_qk) +
          blocks_of(kv_heads, problem.kv_rows, config.d_v),
      RowLanes::kThreads, 0);
  launches.insert(launches.end(), eight_->launches.begin(), eight_->launches.end());
  if (restores_) {
    add("restore_constant", ceil_div(q_heads * problem.q_rows, i64{RowLanes::kThreads}),
        RowLanes::kThreads, 0);
  }
  launches.insert(launches.end(), sixteen_->launches.begin(), sixteen_->launches.end());
}

void Fp8Plan::run(const Call& call) const {
  if (sixteen_->launches.back().num_blocks == 0) return;
  const auto at = [&](size_t offset) { return reinterpret_cast<u8*>(call.workspace + offset); };
  const auto floats = [&](size_t offset) { return reinterpret_cast<float*>(at(offset)); };
  QuantiseParams params = params_;
  bind_params(params.attention, call.problem, call.faults);
  u8** const operands[] = {&params.q, &params.k, &params.v};
  float** const scales[] = {&params.q_scale, &params.k_scale, &params.v_scale};
  Problem quantised = problem_of_e4m3(call.problem);
  for (int i = 0; i < 3; ++i) {
    quantised.arrays[kOperands[i]].data = *operands[i] = at(operands_at_[i]);
    *scales[i] = floats(scales_at_[i]);
    quantised.arrays[kScaleArrays[i]].data = *scales[i];
  }
  params.constant = floats(constant_at_);
  params.difference = restores_ ? floats(difference_at_) : nullptr;
  params.unfit = ForwardSm90Plan::condition(call.workspace);
  size_t next = 0;
  call.launch(next++, params);
  call.launch(next++, params);
  const auto run = [&](const GpuPlan& plan, const Problem& problem, size_t workspace_at) {
    plan.run({problem, call.driver, call.kernels.subspan(next, plan.launches.size()),
              call.workspace + workspace_at, call.faults, call.stream});
    next += plan.launches.size();
  };
  run(*eight_, quantised, eight_at_);
  if (restores_) call.launch(next++, params);
  run(*sixteen_, call.problem, 0);
}

}  // namespace

PlanOrRefusal plan_fp8_sm90(const Problem& problem, const Gpu& gpu) {
  Problem sixteen = problem;
  sixteen.precision = Precision::kFloat32;
  std::string why_not = refusal_of_fp8(problem, gpu);
  if (why_not.empty()) why_not = loses_to_16_bits(problem);
  if (!why_not.empty()) {
    PlanOrRefusal made = plan_forward_sm90(sixteen, gpu);
    if (made.plan != nullptr) made.plan->note = sentence("precision fp8 is not used: ", why_not);
    return made;
  }
  PlanOrRefusal otherwise = plan_tiles_sm90(sixteen, gpu, true);
  if (otherwise.plan == nullptr) return otherwise;
  PlanOrRefusal eight = plan_tiles_sm90(problem_of_e4m3(problem), gpu, false);
  if (eight.plan == nullptr) return eight;
  return std::make_unique<Fp8Plan>(problem, std::move(eight.plan), std::move(otherwise.plan));
}

}  // namespace fulmen::gpu
