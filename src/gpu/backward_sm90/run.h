// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of the sm90 implementation, from a problem to its launches: what prepares,
// the kernel that computes dq, dk and dv, and the second attempt at what is not finite. Configs and
// sizes come from gpu/backward_sm90/plan.h.
#pragma once

#include <vector>

#include "gpu/backward_sm90/plan.h"
#include "gpu/call.h"
#include "gpu/gpu_plan.h"
#include "kernels/backward_sm90/config.h"
#include "kernels/dq_sm90/config.h"

namespace fulmen::gpu {

std::vector<KernelLaunch> sm90_backward_launches(const Problem& problem, const Gpu& gpu);
void sm90_backward_run(const Call& call);

// What the kernels get, everything but the tensor maps; the workspace is as the plan says.
BackwardPreprocessParams sm90_preprocess_params(const Problem& problem,
                                                const Sm90BackwardPlan& plan, char* workspace,
                                                u32* faults);
BackwardParams sm90_backward_params(const Problem& problem, const Sm90BackwardPlan& plan,
                                    char* workspace);
BackwardDqParams sm90_dq_params(const Problem& problem, const Gpu& gpu,
                                const Sm90BackwardPlan& plan, char* workspace);
// Of document_ranges_sm90, with queries in the place of keys.
ForwardArguments sm90_query_ranges_arguments(const Problem& problem, const Sm90BackwardPlan& plan,
                                             char* workspace);

}  // namespace fulmen::gpu
