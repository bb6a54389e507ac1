// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a call costs the host beside its launches, against the fake driver: one config is derived
// for each pass that is planned; a run derives none and calls no operator new.
#include <memory>

#include "api/count_allocations.h"
#include "device_call.h"
#include "gpu/gpu_plan.h"

namespace fulmen::gpu {
namespace {

// Options that change which kernels and parameters there are.
enum class Options { kNone, kDocuments, kPacked, kDropout };

struct Case {
  const char* name;
  fulmen_implementation implementation;
  fulmen_dtype dtype;
  Options options;
  int forward_configs = 1;  // that a plan may derive
  int backward_configs = 1;
};

void pack(DeviceCall& call) {
  for (const Member member :
       {&fulmen_tensors::q, &fulmen_tensors::k, &fulmen_tensors::v, &fulmen_tensors::o,
        &fulmen_tensors::dout, &fulmen_tensors::dq, &fulmen_tensors::dk, &fulmen_tensors::dv}) {
    call.add(member, call.dtype, {4, 192, 64});
  }
  call.add(&fulmen_tensors::lse, FULMEN_FLOAT32, {4, 192});
  call.add(&fulmen_tensors::stats, FULMEN_FLOAT32, {4, 192, 2});
  call.add(&fulmen_tensors::cu_q, FULMEN_INT32, {3});
  call.add(&fulmen_tensors::cu_kv, FULMEN_INT32, {3});
}

void add_options(DeviceCall& call, const Case& which) {
  call.problem.implementation = which.implementation;
  call.add_backward();
  if (which.options == Options::kPacked) pack(call);
  if (which.options == Options::kDocuments) {
    call.add(&fulmen_tensors::q_ids, FULMEN_INT32, {2, 96});
    call.add(&fulmen_tensors::kv_ids, FULMEN_INT32, {2, 96});
  }
  if (which.options == Options::kDropout) call.problem.dropout_p = 0.5;
}

void expect_free_runs(DeviceCall& call, fulmen_operation operation, int num_configs) {
  const int before_plan = config_derivations();
  const std::unique_ptr<fulmen_plan, void (*)(fulmen_plan*)> plan(call.plan(operation),
                                                                  fulmen_plan_destroy);
  ASSERT_NE(plan, nullptr) << fulmen_last_error();
  EXPECT_EQ(config_derivations() - before_plan, num_configs);
  const std::size_t bytes = fulmen_plan_workspace_bytes(plan.get());
  void* const workspace = call.allocate(bytes + 1, 0);
  const auto run = [&] {
    return operation == FULMEN_OPERATION_FORWARD
               ? fulmen_forward(plan.get(), &call.tensors, workspace, bytes, nullptr)
               : fulmen_backward(plan.get(), &call.tensors, workspace, bytes, nullptr);
  };
  ASSERT_EQ(run(), FULMEN_OK) << fulmen_last_error();  // a thread's first run: tensor maps
  const int launches = num_launches();
  const int before_run = config_derivations();
  const long allocations = test::num_allocations();
  ASSERT_EQ(run(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(test::num_allocations() - allocations, 0);
  EXPECT_EQ(config_derivations() - before_run, 0);
  EXPECT_GT(num_launches(), launches);
}

class RunCosts : public testing::TestWithParam<Case> {};

TEST_P(RunCosts, OneConfigAPlanAndNoAllocationARun) {
  DeviceCall call(0, GetParam().dtype);
  add_options(call, GetParam());
  expect_free_runs(call, FULMEN_OPERATION_FORWARD, GetParam().forward_configs);
  expect_free_runs(call, FULMEN_OPERATION_BACKWARD, GetParam().backward_configs);
}

TEST_P(RunCosts, SimpleCallsAllocateNothingOnceTheyHaveAPlan) {
  DeviceCall call(0, GetParam().dtype);
  add_options(call, GetParam());
  for (const auto run : {&DeviceCall::forward, &DeviceCall::backward}) {
    ASSERT_EQ((call.*run)(nullptr), FULMEN_OK) << fulmen_last_error();
    const long allocations = test::num_allocations();
    ASSERT_EQ((call.*run)(nullptr), FULMEN_OK) << fulmen_last_error();
    EXPECT_EQ(test::num_allocations() - allocations, 0);
  }
}

constexpr Case kCases[] = {
    {"naive", FULMEN_NAIVE, FULMEN_FLOAT32, Options::kNone, 0, 0},
    {"naive_packed", FULMEN_NAIVE, FULMEN_FLOAT32, Options::kPacked, 0, 0},
    {"sm90", FULMEN_SM90, FULMEN_BFLOAT16, Options::kNone},
    {"sm90_documents", FULMEN_SM90, FULMEN_BFLOAT16, Options::kDocuments},
    {"sm90_packed", FULMEN_SM90, FULMEN_BFLOAT16, Options::kPacked},
    {"sm90_dropout", FULMEN_SM90, FULMEN_BFLOAT16, Options::kDropout},
    {"simt", FULMEN_SIMT, FULMEN_FLOAT32, Options::kNone},
    {"simt_documents", FULMEN_SIMT, FULMEN_FLOAT32, Options::kDocuments},
    {"simt_packed", FULMEN_SIMT, FULMEN_FLOAT32, Options::kPacked},
    {"simt_dropout", FULMEN_SIMT, FULMEN_FLOAT32, Options::kDropout},
    {"sm80", FULMEN_SM80, FULMEN_BFLOAT16, Options::kNone},
    {"sm80_documents", FULMEN_SM80, FULMEN_BFLOAT16, Options::kDocuments},
    {"sm80_packed", FULMEN_SM80, FULMEN_BFLOAT16, Options::kPacked},
    {"sm80_dropout", FULMEN_SM80, FULMEN_BFLOAT16, Options::kDropout},
};

INSTANTIATE_TEST_SUITE_P(Implementations, RunCosts, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fulmen::gpu
