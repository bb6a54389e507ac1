// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Every precondition of a dense forward call on options, overlaps and lengths; for calls and for
// plans.
#include <gmock/gmock.h>

#include <cmath>
#include <cstring>

#include "api/refusal.h"
#include "fulmen/fulmen_experimental.h"

namespace fulmen::test {
namespace {

using T = fulmen_tensors;

const Refusal kRows[] = {
    // options
    {"infinite scale",
     [](TestCall& c) { c.problem.scale = HUGE_VAL; },
     FULMEN_ERROR_ARGUMENT,
     {"scale is inf", "finite"}},
    {"scale beyond float32 sums",
     [](TestCall& c) { c.problem.scale = 1e38; },
     FULMEN_ERROR_ARGUMENT,
     {"scale is 1e+38", "1.17549e-38 to 8.50706e+37", "float32 sums"}},
    {"scale that is 0 in float32 sums",
     [](TestCall& c) { c.problem.scale = -1e-46; },
     FULMEN_ERROR_ARGUMENT,
     {"scale is -1e-46", "0, or 1.17549e-38"}},
    {"softcap beyond float32 sums",
     [](TestCall& c) { c.problem.softcap = 3.5e38; },
     FULMEN_ERROR_ARGUMENT,
     {"softcap is 3.5e+38", "8.50706e+37"}},
    {"softcap that is off in float32 sums",
     [](TestCall& c) { c.problem.softcap = 1e-46; },
     FULMEN_ERROR_ARGUMENT,
     {"softcap is 1e-46", "0, or 1.17549e-38"}},
    {"scale over softcap beyond float32 sums",
     [](TestCall& c) {
       c.problem.scale = 1e19;
       c.problem.softcap = 1e-19;
     },
     FULMEN_ERROR_ARGUMENT,
     {"scale / softcap is 1e+38", "8.50706e+37"}},
    {"negative softcap",
     [](TestCall& c) { c.problem.softcap = -1; },
     FULMEN_ERROR_ARGUMENT,
     {"softcap is -1", "> 0, or 0"}},
    {"NaN softcap",
     [](TestCall& c) { c.problem.softcap = std::nan(""); },
     FULMEN_ERROR_ARGUMENT,
     {"softcap is nan"}},
    {"infinite softcap",
     [](TestCall& c) { c.problem.softcap = HUGE_VAL; },
     FULMEN_ERROR_ARGUMENT,
     {"softcap is inf"}},
    {"causal 2",
     [](TestCall& c) { c.problem.causal = 2; },
     FULMEN_ERROR_ARGUMENT,
     {"causal is 2", "0 or 1"}},
    {"alignment 7",
     [](TestCall& c) { set_number(c.problem.alignment, 7); },
     FULMEN_ERROR_ARGUMENT,
     {"alignment is 7", "0 to 1"}},
    {"causal with a right window",
     [](TestCall& c) {
       c.problem.causal = 1;
       c.problem.window_right = 3;
     },
     FULMEN_ERROR_ARGUMENT,
     {"window_right is 3", "causal", "window_right = 0"}},
    {"window_left -2",
     [](TestCall& c) { c.problem.window_left = -2; },
     FULMEN_ERROR_ARGUMENT,
     {"window_left is -2", "-1: no limit"}},
    {"window_right -2",
     [](TestCall& c) { c.problem.window_right = -2; },
     FULMEN_ERROR_ARGUMENT,
     {"window_right is -2"}},
    {"prefix without causal",
     [](TestCall& c) { c.problem.prefix = 2; },
     FULMEN_ERROR_ARGUMENT,
     {"prefix is 2 without causal", "set causal"}},
    {"negative prefix",
     [](TestCall& c) {
       c.problem.causal = 1;
       c.problem.prefix = -1;
     },
     FULMEN_ERROR_ARGUMENT,
     {"prefix is -1"}},
    {"negative chunk",
     [](TestCall& c) { c.problem.chunk = -4; },
     FULMEN_ERROR_ARGUMENT,
     {"chunk is -4"}},
    {"dropout_p 1.5",
     [](TestCall& c) { c.problem.dropout_p = 1.5; },
     FULMEN_ERROR_ARGUMENT,
     {"dropout_p is 1.5", "0 to 1"}},
    {"dropout_p -0.1",
     [](TestCall& c) { c.problem.dropout_p = -0.1; },
     FULMEN_ERROR_ARGUMENT,
     {"dropout_p is -0.1"}},
    {"dropout_p NaN",
     [](TestCall& c) { c.problem.dropout_p = std::nan(""); },
     FULMEN_ERROR_ARGUMENT,
     {"dropout_p is nan"}},
    {"rng_offset 2^32",
     [](TestCall& c) { c.problem.rng_offset = uint64_t{1} << 32; },
     FULMEN_ERROR_ARGUMENT,
     {"rng_offset is 4294967296", "4294967295"}},
    {"max_q of a dense problem",
     [](TestCall& c) { c.problem.max_q = 3; },
     FULMEN_ERROR_ARGUMENT,
     {"max_q is 3 without cu_q"}},
    {"max_kv of a dense problem",
     [](TestCall& c) { c.problem.max_kv = 3; },
     FULMEN_ERROR_ARGUMENT,
     {"max_kv is 3 without"}},
    {"deterministic 3",
     [](TestCall& c) { c.problem.deterministic = 3; },
     FULMEN_ERROR_ARGUMENT,
     {"deterministic is 3"}},
    {"batch_invariant -1",
     [](TestCall& c) { c.problem.batch_invariant = -1; },
     FULMEN_ERROR_ARGUMENT,
     {"batch_invariant is -1"}},
    {"slots 2", [](TestCall& c) { c.problem.slots = 2; }, FULMEN_ERROR_ARGUMENT, {"slots is 2"}},
    {"precision 4",
     [](TestCall& c) {
       const int beyond = 4;  // no constant: the enumeration has two bits
       std::memcpy(&c.problem.precision, &beyond, sizeof beyond);
     },
     FULMEN_ERROR_ARGUMENT,
     {"precision is 4"}},
    {"fp8 of float32 inputs",
     [](TestCall& c) { c.problem.precision = FULMEN_PRECISION_FP8; },
     FULMEN_ERROR_ARGUMENT,
     {"precision is fp8", "float16 and bfloat16", "are float32", "leave it float32"}},
    {"tf32 of 16-bit inputs",
     [](TestCall& c) {
       for (fulmen_tensor* x : {&c.tensors.q, &c.tensors.k, &c.tensors.v, &c.tensors.o}) {
         x->dtype = FULMEN_BFLOAT16;
       }
       c.problem.precision = FULMEN_PRECISION_TF32;
     },
     FULMEN_ERROR_ARGUMENT,
     {"precision is tf32", "are bfloat16", "leave it float32"}},
    {"a GPU's implementation on the CPU",
     [](TestCall& c) {
       c.problem.backend = FULMEN_BACKEND_CPU;
       c.problem.implementation = FULMEN_NAIVE;
     },
     FULMEN_ERROR_ARGUMENT,
     {"implementation naive computes on cuda", "backend is cpu"}},
    {"a CPU's implementation on a GPU",
     [](TestCall& c) {
       c.problem.backend = FULMEN_BACKEND_CUDA;
       c.problem.implementation = FULMEN_SCALAR;
     },
     FULMEN_ERROR_ARGUMENT,
     {"implementation scalar computes on cpu", "backend is cuda"}},
    {"device -2",
     [](TestCall& c) { c.problem.device = -2; },
     FULMEN_ERROR_ARGUMENT,
     {"device is -2", "-1"}},
    {"a device on the CPU",
     [](TestCall& c) {
       c.problem.backend = FULMEN_BACKEND_CPU;
       c.problem.device = 0;
     },
     FULMEN_ERROR_ARGUMENT,
     {"device names a GPU", "for the CPU"}},
    {"a device_name that is none",
     [](TestCall& c) { c.problem.device_name = "h10"; },
     FULMEN_ERROR_ARGUMENT,
     {"device_name is 'h10'", "h100", "sm_90a"}},
    {"rng beside a seed",
     [](TestCall& c) {
       c.indices(&fulmen_tensors::rng, {1, 2});
       c.problem.rng_seed = 3;
     },
     FULMEN_ERROR_ARGUMENT,
     {"rng is given beside rng_seed = 3"}},
    {"rng of int32",
     [](TestCall& c) { c.input(&fulmen_tensors::rng, FULMEN_INT32, {2}); },
     FULMEN_ERROR_DTYPE,
     {"rng is int32", "allowed is int64"}},
    {"rng of three",
     [](TestCall& c) { c.indices(&fulmen_tensors::rng, {1, 2, 3}); },
     FULMEN_ERROR_SHAPE,
     {"rng has shape (3)", "pair = 2"}},
    {"rng apart",
     [](TestCall& c) {
       c.indices(&fulmen_tensors::rng, {1, 2, 3}).shape[0] = 2, c.tensors.rng.strides[0] = 2;
     },
     FULMEN_ERROR_ARGUMENT,
     {"rng has stride 2", "neighbours"}},
    {"backend 9",
     [](TestCall& c) { set_number(c.problem.backend, 9); },
     FULMEN_ERROR_ARGUMENT,
     {"backend is 9", "0 to 2"}},
    {"implementation 9",
     [](TestCall& c) { set_number(c.problem.implementation, 9); },
     FULMEN_ERROR_ARGUMENT,
     {"implementation is 9", "0 to 6"}},

    // overlaps
    {"o on q",
     [](TestCall& c) { c.tensors.o.data = c.tensors.q.data; },
     FULMEN_ERROR_ARGUMENT,
     {"o overlaps q", "share no byte"}},
    {"lse on o",
     [](TestCall& c) { c.tensors.lse.data = c.tensors.o.data; },
     FULMEN_ERROR_ARGUMENT,
     {"o overlaps lse"}},
    {"lse on the last byte of o",
     [](TestCall& c) {
       c.tensors.lse.data = static_cast<char*>(c.tensors.o.data) + size_of(c.tensors.o) - 1;
       c.tensors.lse.strides[0] = c.tensors.lse.strides[1] = c.tensors.lse.strides[2] = 0;
       set_shape(c.tensors.lse, {2, 4, 3});
     },
     FULMEN_ERROR_ARGUMENT,
     {"o overlaps lse"}},
    {"o broadcast over the batch",
     [](TestCall& c) { c.tensors.o.strides[0] = 0; },
     FULMEN_ERROR_ARGUMENT,
     {"o has strides", "place of its own"}},
    {"rows of o that run into each other",
     [](TestCall& c) { c.tensors.o.strides[2] = 5; },
     FULMEN_ERROR_ARGUMENT,
     {"o has strides"}},

    // lengths
    {"negative length",
     [](TestCall& c) { c.indices(&T::q_lengths, {1, -1}); },
     FULMEN_ERROR_ARGUMENT,
     {"q_lengths[1] is -1", "3 rows of q", "0 to 3"}},
    {"length beyond the rows",
     [](TestCall& c) { c.indices(&T::kv_lengths, {6, 1}); },
     FULMEN_ERROR_ARGUMENT,
     {"kv_lengths[0] is 6", "5 rows of k", "0 to 5"}},
};

TEST(RefusalOfOptions, ByCalls) {
  for (const Refusal& row : kRows) expect_call_refuses(row);
}

TEST(RefusalOfOptions, ByPlans) {
  for (const Refusal& row : kRows) expect_plan_refuses(row);
}

struct ExperimentRow {
  uint32_t without;
  const char* tile;
  uint32_t reserved;
  std::vector<const char*> words;
};

TEST(RefusalOfExperiments, ByPlans) {
  const ExperimentRow rows[] = {
      {1024, nullptr, 0, {"without is 1024", "FULMEN_TENSOR_CORES = 512"}},
      {FULMEN_SWIZZLE, nullptr, 0, {"without is 1,", "for the CPU"}},
      {0, "kv_rows=80", 0, {"tile is 'kv_rows=80'", "for the CPU"}},
      {0, "kv_rows=8", 0, {"tile has 'kv_rows=8'", "kv_rows=16..256"}},
      {0, "rows=8", 0, {"tile has 'rows=8'", "allowed are warpgroups=1..3"}},
      {0, nullptr, 1, {"experiment.reserved is 1"}},
  };
  for (const ExperimentRow& row : rows) {
    SCOPED_TRACE(row.words.front());
    TestCall call;
    fulmen_experiment experiment;
    fulmen_experiment_init(&experiment);
    EXPECT_EQ(experiment.struct_size, sizeof experiment);
    experiment.without = row.without;
    experiment.tile = row.tile;
    experiment.reserved = row.reserved;
    fulmen_plan* plan = nullptr;
    const fulmen_status status = fulmen_plan_create_experimental(
        &call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &experiment, &plan);
    EXPECT_EQ(status, FULMEN_ERROR_ARGUMENT);
    EXPECT_EQ(plan, nullptr);
    for (const char* word : row.words) EXPECT_THAT(fulmen_last_error(), testing::HasSubstr(word));
  }
}

}  // namespace
}  // namespace fulmen::test
