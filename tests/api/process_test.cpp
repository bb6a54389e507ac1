// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 8: the log callback and file, the number of threads, and a caller's own
// parallel_for. Calls that name a GPU, in a process that has none, and what needs none; and rng,
// which a device array exists for, in host memory. Calls on devices are tested in tests/gpu.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "api/boundary.h"
#include "api/refusal.h"
#include "api/test_call.h"
#include "core/error.h"

namespace fulmen::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using T = fulmen_tensors;

struct Log {
  std::vector<fulmen_log_level> levels;
  std::vector<std::string> messages;
};

void record(fulmen_log_level level, const char* message, void* user) {
  Log& log = *static_cast<Log*>(user);
  log.levels.push_back(level);
  log.messages.push_back(message);
}

TEST(LogFile, HearsWhatNoCallbackHears) {
  const std::string path = testing::TempDir() + "/fulmen-log-" + std::to_string(::getpid());
  api::log_to(path.c_str());
  TestCall call;
  call.problem.softcap = -1;
  EXPECT_EQ(call.forward(), FULMEN_ERROR_ARGUMENT);
  Log log;
  fulmen_set_log(record, &log);
  EXPECT_EQ(call.forward(), FULMEN_ERROR_ARGUMENT);
  fulmen_set_log(nullptr, nullptr);
  EXPECT_EQ(call.forward(), FULMEN_ERROR_ARGUMENT);
  api::log_to("/dev/null");
  std::ifstream file(path);
  int num_lines = 0;
  for (std::string line; std::getline(file, line); ++num_lines) {
    EXPECT_THAT(line, HasSubstr("fulmen error: softcap is -1"));
  }
  EXPECT_EQ(num_lines, 2);
  EXPECT_EQ(log.messages.size(), 1u);
  std::remove(path.c_str());
  try {
    api::log_to("/no/such/folder/log");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("FULMEN_LOG is '/no/such/folder/log'"));
  }
}

TEST(SetLog, HearsFailuresAndPlans) {
  TestCall call;
  Log log;
  fulmen_set_log(record, &log);
  fulmen_plan* plan = nullptr;
  EXPECT_EQ(fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &plan),
            FULMEN_OK);
  fulmen_plan_destroy(plan);
  call.problem.softcap = -1;
  EXPECT_EQ(call.forward(), FULMEN_ERROR_ARGUMENT);
  fulmen_set_log(nullptr, nullptr);
  EXPECT_EQ(call.forward(), FULMEN_ERROR_ARGUMENT);  // unheard
  ASSERT_THAT(log.levels, ElementsAre(FULMEN_LOG_INFO, FULMEN_LOG_ERROR));
  EXPECT_THAT(log.messages[0], HasSubstr("\"implementation\""));
  EXPECT_EQ(log.messages[1], fulmen_last_error());
}

constexpr Sizes kMedium{.batch = 2, .heads = 4, .q_rows = 70, .kv_rows = 90, .dim_qk = 16};

std::string forward_and_backward() {
  TestCall call(kMedium);
  call.problem.causal = 1;
  EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  call.add_backward();
  EXPECT_EQ(call.backward(), FULMEN_OK) << fulmen_last_error();
  std::string all;
  for (const Member member : {&T::o, &T::lse, &T::stats, &T::dq, &T::dk, &T::dv}) {
    all += call.bytes(member);
  }
  return all;
}

TEST(SetNumThreads, ResultsDoNotDependOnIt) {
  ASSERT_EQ(fulmen_set_num_threads(1), FULMEN_OK);
  const std::string one = forward_and_backward();
  for (const int32_t threads : {2, 3, 7, 0}) {
    ASSERT_EQ(fulmen_set_num_threads(threads), FULMEN_OK);
    EXPECT_TRUE(forward_and_backward() == one) << threads;
  }
  EXPECT_EQ(fulmen_set_num_threads(-1), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("num_threads is -1"));
}

// A pool that works alone, and backwards.
void alone(int64_t n, fulmen_body body, void* context, void* user) {
  ++*static_cast<int*>(user);
  for (int64_t index = n; index-- > 0;) body(context, index);
}

TEST(SetParallelFor, RunsOnTheCallersPool) {
  const std::string own = forward_and_backward();
  int calls = 0;
  ASSERT_EQ(fulmen_set_parallel_for(alone, 5, &calls), FULMEN_OK);
  EXPECT_TRUE(forward_and_backward() == own);
  EXPECT_GE(calls, 2);
  const int so_far = calls;
  ASSERT_EQ(fulmen_set_parallel_for(nullptr, 0, nullptr), FULMEN_OK);
  EXPECT_TRUE(forward_and_backward() == own);
  EXPECT_EQ(calls, so_far);
  EXPECT_EQ(fulmen_set_parallel_for(alone, 0, nullptr), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("max_threads is 0"));
}

bool has_driver() { return ::dlopen("libcuda.so.1", RTLD_NOW) != nullptr; }

bool is_loaded(const char* name) { return ::dlopen(name, RTLD_NOW | RTLD_NOLOAD) != nullptr; }

TEST(CpuLoops, SayWhatTheyDid) {
  int64_t done = 0, twice = 0;
  ASSERT_EQ(fulmen_cpu_run_loop(FULMEN_LOOP_MULTIPLY_ADDS, 10, nullptr, 0, &done), FULMEN_OK);
  ASSERT_EQ(fulmen_cpu_run_loop(FULMEN_LOOP_MULTIPLY_ADDS, 20, nullptr, 0, &twice), FULMEN_OK);
  EXPECT_GT(done, 0);
  EXPECT_EQ(twice, 2 * done);
  const std::vector<char> buffer(1 << 16, 'x');
  ASSERT_EQ(fulmen_cpu_run_loop(FULMEN_LOOP_READ, 3, buffer.data(), 1 << 16, &done), FULMEN_OK);
  EXPECT_LE(done, 3 << 16);  // each thread whole steps of its part
  const bool has_pairs =
      fulmen_cpu_run_loop(FULMEN_LOOP_PAIR_PRODUCTS, 10, nullptr, 0, &twice) == FULMEN_OK;
  if (has_pairs) {
    EXPECT_GT(twice, 0);
  } else {
    EXPECT_THAT(fulmen_last_error(), HasSubstr("has no products of bfloat16"));
  }
}

TEST(CpuLoops, RefuseWhatIsNone) {
  int64_t done = -1;
  const auto refused = [&](int loop, int64_t steps, int64_t bytes, int64_t* to) {
    EXPECT_EQ(fulmen_cpu_run_loop(static_cast<fulmen_cpu_loop>(loop), steps, nullptr, bytes, to),
              FULMEN_ERROR_ARGUMENT);
    EXPECT_EQ(done, -1);
    return std::string(fulmen_last_error());
  };
  EXPECT_THAT(refused(4, 1, 0, &done), HasSubstr("loop is 4; allowed is 1"));
  EXPECT_THAT(refused(1, -1, 0, &done), HasSubstr("steps is -1"));
  EXPECT_THAT(refused(3, 1, -5, &done), HasSubstr("bytes -5"));
  EXPECT_THAT(refused(3, 1, 64, &done), HasSubstr("buffer"));
  EXPECT_THAT(refused(1, 1, 0, nullptr), HasSubstr("done"));
}

TEST(NoGpu, CallsOnTheCpuLoadNoDriver) {
  TestCall call;
  ASSERT_EQ(call.forward(), FULMEN_OK);
  EXPECT_FALSE(is_loaded("libcuda.so.1"));
  EXPECT_FALSE(is_loaded("libnvrtc.so.13") || is_loaded("libnvrtc.so.12"));
}

TEST(NoGpu, IsSaidWithTheWayOut) {
  if (has_driver()) GTEST_SKIP() << "this machine has a driver";
  for (const bool by_name : {false, true}) {
    TestCall call;
    if (by_name) {
      call.problem.implementation = FULMEN_SIMT;
    } else {
      call.problem.backend = FULMEN_BACKEND_CUDA;
    }
    const Refusal row{"no driver",
                      nullptr,
                      FULMEN_ERROR_NOT_FOUND,
                      {"libcuda.so.1", "install the NVIDIA driver", "backend='cpu'"}};
    expect_refused(call, row, call.forward());
    fulmen_plan* plan = nullptr;
    expect_refused(
        call, row,
        fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &plan));
    EXPECT_EQ(plan, nullptr);
  }
}

TEST(NoGpu, InfoIsAnAnswer) {
  std::string text(1 << 14, '\0');
  ASSERT_EQ(fulmen_gpu_info(text.data(), text.size(), nullptr), FULMEN_OK);
  for (const char* key : {"\"driver\": ", "\"devices\": [", "\"nvrtc\": ", "\"cache\": {\"folder\"",
                          "\"device_names\": [\"t4\", "}) {
    EXPECT_NE(text.find(key), std::string::npos) << key;
  }
}

TEST(Rng, InHostMemoryIsReadWhenTheCallRuns) {
  for (const fulmen_implementation implementation : {FULMEN_SCALAR, FULMEN_TILED}) {
    TestCall by_options;
    by_options.problem.implementation = implementation;
    by_options.problem.dropout_p = 0.5;
    by_options.problem.rng_seed = uint64_t{1} << 63;
    by_options.problem.rng_offset = 4294967295;
    ASSERT_EQ(by_options.forward(), FULMEN_OK);

    TestCall by_array;
    by_array.problem.implementation = implementation;
    by_array.problem.dropout_p = 0.5;
    fulmen_tensor& rng = by_array.indices(&fulmen_tensors::rng, {0, 0});
    fulmen_plan* plan = nullptr;
    ASSERT_EQ(
        fulmen_plan_create(&by_array.problem, &by_array.tensors, FULMEN_OPERATION_FORWARD, &plan),
        FULMEN_OK);
    std::vector<char> workspace(fulmen_plan_workspace_bytes(plan));
    const auto run = [&] {
      return fulmen_forward(plan, &by_array.tensors, workspace.data(), workspace.size(), nullptr);
    };
    EXPECT_EQ(run(), FULMEN_OK);
    EXPECT_NE(by_array.bytes(&fulmen_tensors::o), by_options.bytes(&fulmen_tensors::o));
    auto* const numbers = static_cast<int64_t*>(rng.data);
    numbers[0] = INT64_MIN;
    numbers[1] = 4294967295;
    EXPECT_EQ(run(), FULMEN_OK);
    EXPECT_EQ(by_array.bytes(&fulmen_tensors::o), by_options.bytes(&fulmen_tensors::o));
    for (const int64_t offset : {int64_t{-1}, int64_t{1} << 32}) {
      numbers[1] = offset;
      EXPECT_EQ(run(), FULMEN_ERROR_ARGUMENT);
      EXPECT_NE(std::string(fulmen_last_error()).find("rng[1], the offset"), std::string::npos);
    }
    fulmen_plan_destroy(plan);
  }
}

}  // namespace
}  // namespace fulmen::test
