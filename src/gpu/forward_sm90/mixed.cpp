// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Chunks of prompts and single rows in one call. Each request belongs to one of two kernels by its
// number of rows, which both read on the device: decode_sm80, bound by the memory, begins on a part
// of the card; forward_sm90, bound by the tensor cores, fills the rest at once and the part when
// that is done, since its blocks take work tiles as they come. Neither waits for the other but at
// the end, so that what follows in the stream waits for both.

#include "gpu/call.h"
#include "gpu/decode_sm80/plan.h"
#include "gpu/forward_sm90/plan.h"
#include "kernels/common/sequences.cuh"

namespace fulmen::gpu {
namespace {

// Of the multiprocessors, for decode_sm80. Its speed goes with their number nearly to the last:
// with 3/8 of them 128 decodes and a chunk took 2,332 us, with 6/8 1,482, one after the other 1,528
// (H200, 2026-11-29).
constexpr i64 kDecodeShare[] = {6, 8};

Problem of_few_rows(Problem problem) {
  problem.max_q = kFewRows / problem.group_size();
  return problem;
}

class MixedPlan final : public GpuPlan {
 public:
  MixedPlan(std::unique_ptr<GpuPlan> decodes, std::unique_ptr<GpuPlan> chunks)
      : decodes_(std::move(decodes)), chunks_(std::move(chunks)) {
    tile = chunks_->tile;
    compared = chunks_->compared;
    alignment_bytes = max(decodes_->alignment_bytes, chunks_->alignment_bytes);
    zeroed_bytes = chunks_->zeroed_bytes;
    decodes_at_ = (chunks_->workspace_bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment *
                  kWorkspaceAlignment;
    workspace_bytes = decodes_at_ + decodes_->workspace_bytes;
    launches = decodes_->launches;
    launches.insert(launches.end(), chunks_->launches.begin(), chunks_->launches.end());
  }

  void run(const Call& call) const override {
    const size_t of_decodes = decodes_->launches.size();
    decodes_->run({call.problem, call.driver, call.kernels.first(of_decodes),
                   call.workspace + decodes_at_, call.faults, call.stream});
    chunks_->run({call.problem, call.driver, call.kernels.subspan(of_decodes), call.workspace,
                  call.faults, call.stream});
  }

 private:
  std::unique_ptr<GpuPlan> decodes_;
  std::unique_ptr<GpuPlan> chunks_;
  size_t decodes_at_;  // of the workspace
};

}  // namespace

bool mixes_with_decode(const Problem& problem, const Gpu& gpu) {
  return problem.implementation == Implementation::kAuto && problem.packed.q &&
         problem.has_caches() && problem.num_sequences > 1 &&
         prefers_decode_sm80(of_few_rows(problem), gpu);
}

std::unique_ptr<GpuPlan> beside_decode(std::unique_ptr<GpuPlan> chunks, const Problem& problem,
                                       const Gpu& gpu) {
  Gpu part = gpu;
  part.num_multiprocessors =
      static_cast<int>(gpu.num_multiprocessors * kDecodeShare[0] / kDecodeShare[1]);
  return std::make_unique<MixedPlan>(plan_decode_beside(of_few_rows(problem), part),
                                     std::move(chunks));
}

}  // namespace fulmen::gpu
