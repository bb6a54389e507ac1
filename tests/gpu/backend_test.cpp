// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Simple calls of the C ABI on arrays in device memory, against the fake driver: what is launched,
// where and with which parameters.
#include "gpu/backend.h"

#include <algorithm>
#include <thread>

#include "device_call.h"
#include "gpu/driver/device.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::gpu {
namespace {

AttentionParams params_of(const FakeLaunch& launch) {
  AttentionParams params;
  std::memcpy(&params, launch.params, sizeof(params));
  return params;
}

bool is_kernel(const FakeLaunch& launch, const char* begin) {
  return std::string(launch.kernel).rfind(begin, 0) == 0;
}

TEST(SimpleCall, RunsWhereTheArraysAreOnTheCallersStream) {
  DeviceCall call(1);
  const int before = num_launches();
  int local = 0;
  ASSERT_EQ(call.forward(&local), FULMEN_OK) << fulmen_last_error();
  ASSERT_EQ(num_launches(), before + 1);
  const FakeLaunch seen = last_launch();
  EXPECT_EQ(seen.device, 1);
  EXPECT_EQ(static_cast<void*>(seen.config.stream), &local);
  EXPECT_TRUE(is_kernel(seen, "forward_simt_float32")) << seen.kernel;
  const AttentionParams params = params_of(seen);
  EXPECT_EQ(params.q.data, call.tensors.q.data);
  EXPECT_EQ(params.o.data, call.tensors.o.data);
  EXPECT_EQ(params.stats.data, call.tensors.stats.data);
  EXPECT_EQ(params.q_rows, 96);
  EXPECT_EQ(params.faults, device(1).faults());
  CUcontext context = nullptr;
  driver()->cuCtxGetCurrent(&context);
  EXPECT_EQ(context, nullptr);  // the caller's, as it was
}

TEST(SimpleCall, BackwardLaunchesAKernelForEachPart) {
  DeviceCall call;
  call.add_backward();
  const int before = num_launches();
  ASSERT_EQ(call.backward(), FULMEN_OK) << fulmen_last_error();
  ASSERT_EQ(num_launches(), before + 2);  // dQ is added up beside dK and dV
  EXPECT_TRUE(is_kernel(launch_number(before), "backward_simt_rows_float32"));
  EXPECT_TRUE(is_kernel(launch_number(before + 1), "backward_simt_dkdv_float32"));
  call.problem.implementation = FULMEN_NAIVE;
  ASSERT_EQ(call.backward(), FULMEN_OK) << fulmen_last_error();
  ASSERT_EQ(num_launches(), before + 4);
  EXPECT_TRUE(is_kernel(launch_number(before + 2), "backward_naive_dq_float32"));
  EXPECT_TRUE(is_kernel(launch_number(before + 3), "backward_naive_dkdv_float32"));
}

TEST(SimpleCall, ADeterministicBackwardHasAPassForDq) {
  DeviceCall call;
  call.add_backward();
  call.problem.deterministic = 1;
  const int before = num_launches();
  ASSERT_EQ(call.backward(), FULMEN_OK) << fulmen_last_error();
  ASSERT_EQ(num_launches(), before + 3);
  EXPECT_TRUE(is_kernel(launch_number(before), "backward_simt_rows_float32"));
  EXPECT_TRUE(is_kernel(launch_number(before + 1), "backward_simt_dq_float32"));
  EXPECT_TRUE(is_kernel(launch_number(before + 2), "backward_simt_dkdv_float32"));
}

TEST(SimpleCall, ALaterCallFindsThePlanOfAnEarlierOne) {
  DeviceCall call;
  call.problem.causal = 1;
  ASSERT_EQ(call.forward(), FULMEN_OK);
  DeviceCall other;  // the same but for its pointers and its seed
  other.problem.causal = 1;
  const int compilations = num_compilations();
  const int modules = num_calls("cuModuleLoadData");
  ASSERT_EQ(other.forward(), FULMEN_OK);
  EXPECT_EQ(num_compilations(), compilations);
  EXPECT_EQ(num_calls("cuModuleLoadData"), modules);
  EXPECT_EQ(params_of(last_launch()).v.data, other.tensors.v.data);
}

TEST(SimpleCall, DropoutIsThatOfTheCallAndNotOfThePlan) {
  DeviceCall call;
  call.problem.dropout_p = 0.5;
  for (const uint64_t seed : {uint64_t{7}, uint64_t{8}}) {
    call.problem.rng_seed = seed;
    call.problem.rng_offset = 3 * seed;
    ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
    const AttentionParams params = params_of(last_launch());
    EXPECT_EQ(params.dropout.seed, seed);
    EXPECT_EQ(params.dropout.offset, 3 * seed);
    EXPECT_EQ(params.rng, nullptr);
  }
  call.problem.rng_offset = uint64_t{1} << 32;
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT, {"rng_offset is 4294967296"});
  call.add(&fulmen_tensors::rng, FULMEN_INT64, {2});
  call.problem.rng_offset = 0;
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT, {"rng is given beside rng_seed = 8"});
  call.problem.rng_seed = 0;
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(params_of(last_launch()).rng, call.tensors.rng.data);
}

TEST(SimpleCall, SixteenThreadsAtOnce) {
  std::vector<std::unique_ptr<DeviceCall>> calls;
  for (int i = 0; i < 16; ++i) calls.push_back(std::make_unique<DeviceCall>(i % 2));
  const int before = num_launches();
  std::vector<std::thread> threads;
  std::atomic<int> num_ok{0};
  for (const auto& call : calls) {
    threads.emplace_back([&call, &num_ok] {
      call->problem.softcap = 3;
      for (int i = 0; i < 8; ++i) num_ok += call->forward() == FULMEN_OK;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_ok, 128);
  EXPECT_EQ(num_launches(), before + 128);
}

TEST(SimpleCall, EmptyProblemsLaunchNothingAndSucceed) {
  DeviceCall call;
  for (const Member member : {&fulmen_tensors::q, &fulmen_tensors::o}) {
    call.add(member, FULMEN_FLOAT32, {2, 4, 0, 64});
  }
  call.add(&fulmen_tensors::lse, FULMEN_FLOAT32, {2, 4, 0});
  call.add(&fulmen_tensors::stats, FULMEN_FLOAT32, {2, 4, 0, 2});
  const int before = num_launches();
  EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(num_launches(), before);
}

TEST(SimpleCall, ManagedMemoryIsOnTheDeviceAndPinnedMemoryOnTheHost) {
  DeviceCall call(1);
  const auto set_managed = fake_driver<FakeSetManaged>("fake_set_managed");
  for (const Member member : {&fulmen_tensors::q, &fulmen_tensors::o}) {
    set_managed(reinterpret_cast<CUdeviceptr>((call.tensors.*member).data), 1);
  }
  EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(last_launch().device, 1);
  call.problem.device = 0;  // another device may use what is managed, not the rest
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT, {"k is on device 1", "runs on device 0"});
  void* pinned = nullptr;
  {
    const CurrentContext current(device(0));
    ASSERT_EQ(driver()->cuMemHostAlloc(&pinned, 1 << 20, 0), kCudaSuccess);
  }
  EXPECT_EQ(memory_space_of(pinned).kind, MemorySpace::kPinned);
  call.problem.device = -1;
  call.tensors.q.data = pinned;
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT, {"k is in the memory of device 1", "CPU"});
  call.problem.backend = FULMEN_BACKEND_CUDA;
  call.problem.device = 1;
  EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();  // kernels see pinned memory
}

// A workspace that holds something else is no counter: a run that clears nothing names none.
TEST(SimpleCall, DocumentsInOneWaveAreNotDealtByACounter) {
  DeviceCall call(0, FULMEN_BFLOAT16);
  call.add(&fulmen_tensors::q_ids, FULMEN_INT32, {96});
  call.add(&fulmen_tensors::kv_ids, FULMEN_INT32, {96});
  const int clears = num_calls("cuMemsetD8Async");
  EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(num_calls("cuMemsetD8Async"), clears);
  const FakeLaunch seen = last_launch();
  ASSERT_TRUE(holds(seen.kernel, "forward_sm90")) << seen.kernel;
  EXPECT_EQ(static_cast<const ForwardArguments*>(seen.params)->params.next_block, nullptr);
}

// The driver is asked once about arrays of one allocation, and again about one outside of it.
TEST(SimpleCall, ArraysOfOneAllocationAreLookedUpOnce) {
  DeviceCall call;
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  char* memory = static_cast<char*>(call.allocate(8 * kBytes, 0));
  for (const Member member : {&fulmen_tensors::q, &fulmen_tensors::k, &fulmen_tensors::v,
                              &fulmen_tensors::o, &fulmen_tensors::lse, &fulmen_tensors::stats}) {
    (call.tensors.*member).data = memory += kBytes;
  }
  EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  int before = num_calls("cuPointerGetAttributes");
  EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(num_calls("cuPointerGetAttributes"), before + 1);
  call.tensors.v.data = call.allocate(kBytes, 1);
  before = num_calls("cuPointerGetAttributes");
  expect_refused(call.forward(), FULMEN_ERROR_ARGUMENT, {"v is on device 1", "runs on device 0"});
  EXPECT_EQ(num_calls("cuPointerGetAttributes"), before + 2);
}

// Hopper's forward pass counts blocks of queries in a workspace where there are more of them than
// multiprocessors.
TEST(SimpleCall, WorkspaceIsOfTheStreamAndGivenBack) {
  DeviceCall call(1, FULMEN_BFLOAT16);
  const int allocations = num_calls("cuMemAllocFromPoolAsync");
  const int clears = num_calls("cuMemsetD8Async");
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(num_calls("cuMemAllocFromPoolAsync"), allocations);
  EXPECT_EQ(num_calls("cuMemsetD8Async"), clears);
  for (const Member member :
       {&fulmen_tensors::q, &fulmen_tensors::k, &fulmen_tensors::v, &fulmen_tensors::o}) {
    call.add(member, FULMEN_BFLOAT16, {50, 4, 96, 64}, 1);
  }
  call.add(&fulmen_tensors::lse, FULMEN_FLOAT32, {50, 4, 96}, 1);
  call.add(&fulmen_tensors::stats, FULMEN_FLOAT32, {50, 4, 96, 2}, 1);
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_TRUE(is_kernel(last_launch(), "forward_sm90_bfloat16")) << last_launch().kernel;
  EXPECT_EQ(num_calls("cuMemAllocFromPoolAsync"), allocations + 1);
  EXPECT_EQ(num_calls("cuMemsetD8Async"), clears + 1);
  EXPECT_EQ(fake_driver<FakeNumBytesInStreams>("fake_num_bytes_in_streams")(), 0u);
  {
    const ScopedVariable broken("FAKE_CUDA_cuLaunchKernelEx", "700");
    EXPECT_EQ(call.forward(), FULMEN_ERROR_DEVICE);
    EXPECT_EQ(fake_driver<FakeNumBytesInStreams>("fake_num_bytes_in_streams")(), 0u);
  }
  const ScopedVariable full("FAKE_CUDA_cuMemAllocFromPoolAsync", "2");
  const int launches = num_launches();
  expect_refused(call.forward(), FULMEN_ERROR_OUT_OF_MEMORY,
                 {"allocate a workspace of", "device 1", "free device memory"});
  EXPECT_EQ(num_launches(), launches);
}

// Descriptions of arrays for the copy engine are remembered: by all that they are made of.
TEST(SimpleCall, DescribesAnArrayToTheCopyEngineOnce) {
  DeviceCall call(1, FULMEN_BFLOAT16);
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  const int encoded = num_calls("cuTensorMapEncodeTiled");
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(num_calls("cuTensorMapEncodeTiled"), encoded);
  fulmen_tensor& k = call.tensors.k;
  fulmen_tensor& v = call.tensors.v;
  k.shape[2] = v.shape[2] = 80;  // the same memory, read to another extent
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(num_calls("cuTensorMapEncodeTiled"), encoded + 2);
}

TEST(SimpleCall, PackedSequencesWithoutAQueryLaunchNothing) {
  DeviceCall call(1, FULMEN_BFLOAT16);
  call.problem.implementation = FULMEN_SM90;
  for (const Member member : {&fulmen_tensors::q, &fulmen_tensors::o}) {
    call.add(member, FULMEN_BFLOAT16, {4, 0, 64}, 1);
  }
  for (const Member member : {&fulmen_tensors::k, &fulmen_tensors::v}) {
    call.add(member, FULMEN_BFLOAT16, {4, 96, 64}, 1);
  }
  call.add(&fulmen_tensors::lse, FULMEN_FLOAT32, {4, 0}, 1);
  call.add(&fulmen_tensors::stats, FULMEN_FLOAT32, {4, 0, 2}, 1);
  call.add(&fulmen_tensors::cu_q, FULMEN_INT64, {3}, 1);
  call.add(&fulmen_tensors::cu_kv, FULMEN_INT64, {3}, 1);
  const int launches = num_launches();
  const int encoded = num_calls("cuTensorMapEncodeTiled");
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(num_launches(), launches);
  EXPECT_EQ(num_calls("cuTensorMapEncodeTiled"), encoded);
}

TEST(SimpleCall, MergeRunsOneKernelWhereItsArraysAre) {
  DeviceCall call(1);
  fulmen_merge_part part;
  fulmen_merge_part_init(&part);
  part.o = call.tensors.q;
  part.lse = call.tensors.lse;
  const fulmen_merge_part parts[2] = {part, part};
  const int before = num_launches();
  ASSERT_EQ(fulmen_merge(parts, 2, nullptr, &call.tensors.o, nullptr, nullptr), FULMEN_OK)
      << fulmen_last_error();
  ASSERT_EQ(num_launches(), before + 1);
  const FakeLaunch seen = last_launch();
  EXPECT_TRUE(is_kernel(seen, "merge_float32")) << seen.kernel;
  EXPECT_EQ(seen.device, 1);
  EXPECT_EQ(seen.config.grid_x, 2u * 4 * 96 / 4);
}

// 4 new rows of 4 heads of 64 numbers, into 96 pages of 2 rows.
fulmen_append append_of(DeviceCall& call, int ordinal) {
  fulmen_append append;
  fulmen_append_init(&append);
  append.k_cache = call.add(&fulmen_tensors::dk, FULMEN_FLOAT16, {96, 4, 2, 64}, ordinal);
  append.v_cache = call.add(&fulmen_tensors::dv, FULMEN_FLOAT16, {96, 4, 2, 64}, ordinal);
  append.k = call.add(&fulmen_tensors::k, FULMEN_FLOAT16, {4, 4, 1, 64}, ordinal);
  append.v = call.add(&fulmen_tensors::v, FULMEN_FLOAT16, {4, 4, 1, 64}, ordinal);
  append.slots = call.add(&fulmen_tensors::q_ids, FULMEN_INT64, {4, 1}, ordinal);
  return append;
}

TEST(SimpleCall, AppendRunsOneKernelWhereItsArraysAre) {
  DeviceCall call(1);
  fulmen_append append = append_of(call, 1);
  const int before = num_launches();
  ASSERT_EQ(fulmen_append_kv(&append, nullptr), FULMEN_OK) << fulmen_last_error();
  ASSERT_EQ(num_launches(), before + 1);
  EXPECT_TRUE(is_kernel(last_launch(), "append_float16")) << last_launch().kernel;
  EXPECT_EQ(last_launch().device, 1);
  append.k.data = static_cast<char*>(append.k.data) + 2;  // no multiple of 16
  ASSERT_EQ(fulmen_append_kv(&append, nullptr), FULMEN_OK) << fulmen_last_error();
  EXPECT_TRUE(is_kernel(last_launch(), "append_float16_elements")) << last_launch().kernel;
  const fulmen_tensor table = call.add(&fulmen_tensors::mask, FULMEN_FLOAT32, {8, 32}, 1);
  const fulmen_tensor sine = call.add(&fulmen_tensors::bias, FULMEN_FLOAT32, {8, 32}, 1);
  ASSERT_EQ(fulmen_rotary(&append.v, nullptr, &table, &sine, 1, &append.v, nullptr), FULMEN_OK)
      << fulmen_last_error();
  EXPECT_TRUE(is_kernel(last_launch(), "append_float16_interleaved_table_float32"))
      << last_launch().kernel;
  EXPECT_EQ(num_launches(), before + 3);
}

TEST(SimpleCall, AppendOfArraysInTwoPlacesIsRefused) {
  DeviceCall call;
  fulmen_append append = append_of(call, 0);
  std::vector<char> host(1 << 16);
  fulmen_tensor k = append.k;
  append.k.data = host.data();
  expect_refused(fulmen_append_kv(&append, nullptr), FULMEN_ERROR_ARGUMENT,
                 {"k is in ordinary host memory"});
  append.k = k;
  append.k_cache.data = host.data();
  expect_refused(fulmen_append_kv(&append, nullptr), FULMEN_ERROR_UNSUPPORTED,
                 {"fulmen_append_kv", "v_cache", "copy it"});
}

TEST(SimpleCall, MisalignedArraysGoToAnImplementationThatTakesThem) {
  DeviceCall call(0, FULMEN_BFLOAT16);
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_TRUE(is_kernel(last_launch(), "forward_sm90_bfloat16")) << last_launch().kernel;
  fulmen_plan* const plan = call.plan();
  call.add(&fulmen_tensors::v, FULMEN_BFLOAT16, {2, 4, 96, 64}, 0, 2);
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_FALSE(is_kernel(last_launch(), "forward_sm90")) << last_launch().kernel;
  const std::size_t bytes = fulmen_plan_workspace_bytes(plan) + 16;
  void* const workspace = call.allocate(bytes, 0);
  const auto run = [&] { return fulmen_forward(plan, &call.tensors, workspace, bytes, nullptr); };
  expect_refused(run(), FULMEN_ERROR_ARGUMENT,
                 {"multiple of 2 bytes only", "(sm90) need multiples of 16"});
  call.problem.implementation = FULMEN_SM90;
  expect_refused(call.forward(), FULMEN_ERROR_UNSUPPORTED,
                 {"sm90: pointers must be multiples of 16 bytes"});
  call.add(&fulmen_tensors::v, FULMEN_BFLOAT16, {2, 4, 96, 64});
  EXPECT_EQ(run(), FULMEN_OK) << fulmen_last_error();
  std::vector<char> host(bytes);
  expect_refused(fulmen_forward(plan, &call.tensors, host.data(), host.size(), nullptr),
                 FULMEN_ERROR_ARGUMENT, {"workspace is in ordinary host memory"});
  fulmen_plan_destroy(plan);
}

TEST(SimpleCall, LengthsAreNotReadByTheHost) {
  DeviceCall call;
  fulmen_tensor& lengths = call.add(&fulmen_tensors::kv_lengths, FULMEN_INT32, {2});
  const int absurd[2] = {-5, 1 << 30};
  std::memcpy(lengths.data, absurd, sizeof(absurd));
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(params_of(last_launch()).kv_lengths.data, lengths.data);
}

}  // namespace
}  // namespace fulmen::gpu
