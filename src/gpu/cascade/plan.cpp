// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two problems that a cascade consists of, as any other, with arrays of their own in the
// workspace; and its run: prepare, own keys, shared keys, combine.

#include "gpu/cascade/plan.h"

#include <numeric>

#include "core/tensor.h"
#include "gpu/call.h"
#include "gpu/decode_sm80/plan.h"
#include "gpu/params.h"
#include "kernels/cascade/params.h"

namespace fulmen::gpu {
namespace {

// Below, the passes took longer than reading the keys again: 8 requests of 1,280 keys 19 us and 53,
// 64 of 2,560 104 and 109; 8 of 16,896 96 and 76 (H200, 2026-11-29). Of a bound, where lengths are
// known to the device alone.
constexpr i64 kFewestRequests = 8, kFewestKeys = 4096, kFewestReads = i64{1} << 17;

constexpr i64 kFewRowsOfAll = 64;  // bound by the memory: decode_sm80 has them
constexpr i64 kTileRows = 128;     // of a block of the pass over shared keys
constexpr i64 kBlockKeys = 128;    // and the most keys that it takes at a time
constexpr int kPrepareThreads = 256;
constexpr int kCombineThreads = 128;

i64 all_rows(const Problem& problem) { return problem.batch_extent() * problem.q_rows; }

// Contiguous, in the workspace.
Tensor made_tensor(DType dtype, i64 a, i64 b, i64 c, i64 d) {
  return {nullptr, dtype, kMaxRank, {a, b, c, d}, {b * c * d, c * d, d, 1}};
}

// So many parts that each multiprocessor has a tile of rows over one of them; decode_sm80 divides
// keys itself.
i64 num_parts(const Problem& problem, const Gpu& gpu) {
  const i64 rows = all_rows(problem) * problem.group_size();
  if (rows <= kFewRowsOfAll) return 1;
  const i64 tiles = ceil_div(rows, kTileRows) * problem.heads_kv;
  return clamp<i64>(gpu.num_multiprocessors / tiles, 1, CascadeParams::kMaxParts);
}

// What both passes leave: float32, and row max and row sum apart.
void leave_parts(Problem& problem) {
  const i64 batch = problem.batch_extent(), heads = problem.heads_q, rows = problem.q_rows;
  problem.arrays[Array::kSinks] = problem.arrays[Array::kLse] = problem.arrays[Array::kKvShared] =
      Tensor{};
  problem.arrays[Array::kO] = made_tensor(DType::kFloat32, batch, heads, rows, problem.dim_v);
  problem.arrays[Array::kStats] = made_tensor(DType::kFloat32, batch, heads, rows, 2);
}

// Heads outside of batch entries, so that rows of all requests lie together.
void put_heads_outside(Tensor& tensor) {
  tensor.strides[1] = tensor.shape[0] * tensor.strides[0] / max<i64>(tensor.shape[1], 1);
  tensor.strides[0] = tensor.shape[2] * tensor.strides[2];
}

Problem of_own_keys(const Problem& problem) {
  Problem own = problem;
  leave_parts(own);
  put_heads_outside(own.arrays[Array::kO]);
  put_heads_outside(own.arrays[Array::kStats]);
  own.arrays[Array::kKvStart] = made_tensor(DType::kInt32, 1, 1, 1, problem.num_sequences);
  return own;
}

// One sequence for each part of the shared keys, whose rows are all there are: of a group of heads
// one behind the other. Each sees all of the keys.
Problem of_shared_keys(const Problem& problem, i64 parts) {
  Problem shared = problem;
  shared.num_sequences = parts;
  shared.heads_q = problem.heads_kv;
  shared.q_rows = shared.max_q = all_rows(problem) * problem.group_size();
  shared.packed = {};
  shared.mask = {};
  leave_parts(shared);
  for (const Array array : {Array::kQLengths, Array::kCuQ, Array::kTree}) {
    shared.arrays[array] = Tensor{};
  }
  shared.arrays[Array::kQ] =
      made_tensor(problem.dtype, parts, shared.heads_q, shared.q_rows, problem.dim_qk);
  shared.arrays[Array::kKvLengths] = made_tensor(DType::kInt32, 1, 1, 1, parts);
  shared.arrays[Array::kPageIndptr] = made_tensor(DType::kInt32, 1, 1, 1, parts + 1);
  Tensor& table = shared.arrays[Array::kPageTable];  // as one list
  table.shape[3] += (table.shape[0] - 1) * table.strides[0];
  table.shape[0] = parts;
  table.strides[0] = 0;
  return shared;
}

class CascadePlan final : public GpuPlan {
 public:
  CascadePlan(const Problem& problem, const Gpu& gpu, Problem own, Problem shared,
              std::unique_ptr<GpuPlan> of_own, std::unique_ptr<GpuPlan> of_shared)
      : own_(std::move(own)),
        shared_(std::move(shared)),
        of_own_(std::move(of_own)),
        of_shared_(std::move(of_shared)) {
    params_.attention = attention_params(problem);
    params_.kv_shared = view_of(problem.arrays[Array::kKvShared]);
    params_.num_parts = static_cast<i32>(shared_.num_sequences);
    params_.chunk_pages = static_cast<i32>(kBlockKeys / std::gcd(kBlockKeys, problem.page_rows));
    tile = of_own_->tile;
    compared = of_shared_->compared;
    alignment_bytes = max(of_own_->alignment_bytes, of_shared_->alignment_bytes);
    zeroed_bytes = of_shared_->zeroed_bytes;
    take(of_shared_->workspace_bytes);  // at 0, where it may want zeros
    own_at_ = take(of_own_->workspace_bytes);
    place(own_, Array::kKvStart, own_arrays_);
    for (const Array array : {Array::kO, Array::kStats}) place(own_, array, own_arrays_);
    for (const Array array :
         {Array::kPageIndptr, Array::kKvLengths, Array::kQ, Array::kO, Array::kStats}) {
      place(shared_, array, shared_arrays_);
    }
    launches = {prepare_launch(problem, gpu)};
    for (const GpuPlan* const pass : {of_own_.get(), of_shared_.get()}) {
      launches.insert(launches.end(), pass->launches.begin(), pass->launches.end());
    }
    const i64 rows = all_rows(problem) * problem.heads_q;
    launches.push_back({combine_spec(problem.dtype), ceil_div(rows, i64{kCombineThreads} / 32)});
  }

  static KernelSpec prepare_spec(DType dtype) {
    const CascadeConfig config{dtype, kPrepareThreads};
    KernelSpec spec =
        spec_of<CascadeParams>("cascade/cascade", "prepare_cascade", name(dtype), config);
    spec.num_threads = kPrepareThreads;
    spec.shared_bytes = kPrepareThreads / 32 * 8;
    return spec;
  }
  static KernelSpec combine_spec(DType dtype) {
    const CascadeConfig config{dtype, kCombineThreads};
    KernelSpec spec =
        spec_of<CascadeParams>("cascade/cascade", "combine_cascade", name(dtype), config);
    spec.num_threads = kCombineThreads;
    return spec;
  }

  void run(const Call& call) const override {
    Problem own = own_, shared = shared_;
    for (const Array array :
         {Array::kK, Array::kV, Array::kPageTable, Array::kKScale, Array::kVScale}) {
      shared.arrays[array].data = call.problem.arrays[array].data;
    }
    for (int index = 0; index < kNumArrays; ++index) {
      const auto array = static_cast<Array>(index);
      own.arrays[array].data = call.problem.arrays[array].data;
    }
    for (const auto& [array, at] : own_arrays_) own.arrays[array].data = call.workspace + at;
    for (const auto& [array, at] : shared_arrays_) shared.arrays[array].data = call.workspace + at;
    CascadeParams params = params_;
    bind_params(params.attention, call.problem, nullptr);
    params.kv_shared.data = static_cast<u8*>(call.problem.arrays[Array::kKvShared].data);
    const auto numbers = [](const Problem& problem, Array array) {
      return static_cast<i32*>(problem.arrays[array].data);
    };
    const auto reals = [](const Problem& problem, Array array) {
      return static_cast<const float*>(problem.arrays[array].data);
    };
    params.kv_start = numbers(own, Array::kKvStart);
    params.page_begin = numbers(shared, Array::kPageIndptr);
    params.kv_lengths = numbers(shared, Array::kKvLengths);
    params.q = static_cast<u16*>(shared.arrays[Array::kQ].data);
    params.shared_o = reals(shared, Array::kO);
    params.shared_stats = reals(shared, Array::kStats);
    params.own_o = reals(own, Array::kO);
    params.own_stats = reals(own, Array::kStats);
    call.launch(0, params);
    const size_t of_own = of_own_->launches.size(), last = call.kernels.size() - 1;
    of_own_->run({own, call.driver, call.kernels.subspan(1, of_own), call.workspace + own_at_,
                  call.faults, call.stream});
    of_shared_->run({shared, call.driver, call.kernels.subspan(1 + of_own, last - 1 - of_own),
                     call.workspace, call.faults, call.stream});
    call.launch(last, params);
  }

 private:
  struct Placed {
    Array array;
    size_t at;  // of the workspace
  };

  KernelLaunch prepare_launch(const Problem& problem, const Gpu& gpu) const {
    const i64 vectors = all_rows(problem) * problem.heads_q * problem.dim_qk / 8;
    const i64 blocks = min<i64>(ceil_div(vectors, i64{kPrepareThreads}), gpu.num_multiprocessors);
    return {prepare_spec(problem.dtype), blocks + 1};
  }

  size_t take(size_t bytes) {
    const size_t at = workspace_bytes;
    workspace_bytes =
        (at + bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return at;
  }
  void place(const Problem& problem, Array array, std::vector<Placed>& placed) {
    Tensor tensor = problem.arrays[array];
    size_t bytes = static_cast<size_t>(size_bytes(tensor.dtype));
    for (const i64 extent : tensor.shape) bytes *= static_cast<size_t>(extent);
    placed.push_back({array, take(bytes)});
  }

  Problem own_;
  Problem shared_;
  std::unique_ptr<GpuPlan> of_own_;
  std::unique_ptr<GpuPlan> of_shared_;
  CascadeParams params_{};  // but for pointers
  size_t own_at_ = 0;       // workspace of that pass
  std::vector<Placed> own_arrays_, shared_arrays_;
};

// Whether each query row sees all of the shared keys, wherever it stands, passes may differ from
// batch to batch, and the table is one list.
bool takes(const Problem& problem) {
  for (const Array array : {Array::kKvStart, Array::kPositions, Array::kAlibiSlopes}) {
    if (problem.has(array)) return false;
  }
  const Tensor& table = problem.arrays[Array::kPageTable];
  const i64 entries = table.shape[3] + (table.shape[0] - 1) * table.strides[0];
  return problem.num_sequences > 1 && problem.mask.is_at_most_causal() &&
         problem.alignment == Alignment::kBottomRight && problem.may_plan_by_lengths() &&
         table.strides[3] == 1 && entries < 0x7fffffff;
}

// An implementation that was asked for by name is not asked whether it gains.
bool gains(const Problem& problem) {
  if (problem.implementation != Implementation::kAuto) return true;
  return problem.num_sequences >= kFewestRequests && problem.max_kv >= kFewestKeys &&
         problem.num_sequences * problem.max_kv >= kFewestReads;
}

}  // namespace

std::unique_ptr<GpuPlan> plan_cascade(const Problem& problem, const Gpu& gpu,
                                      PlanOrRefusal (*plan_shared)(const Problem& problem,
                                                                   const Gpu& gpu)) {
  if (!takes(problem) || !gains(problem)) return nullptr;
  Problem own = of_own_keys(problem);
  if (!prefers_decode_sm80(own, gpu)) return nullptr;
  Problem shared = of_shared_keys(problem, num_parts(problem, gpu));
  PlanOrRefusal of_shared = plan_shared(shared, gpu);
  if (of_shared.plan == nullptr) return nullptr;
  PlanOrRefusal of_own = plan_decode_sm80(own, gpu);
  return std::make_unique<CascadePlan>(problem, gpu, std::move(own), std::move(shared),
                                       std::move(of_own.plan), std::move(of_shared.plan));
}

std::vector<KernelSpec> cascade_specs() {
  std::vector<KernelSpec> specs;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    specs.push_back(CascadePlan::prepare_spec(dtype));
    specs.push_back(CascadePlan::combine_spec(dtype));
  }
  return specs;
}

}  // namespace fulmen::gpu
