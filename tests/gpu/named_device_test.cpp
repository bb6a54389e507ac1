// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Plans for GPUs that are not here, what plans explain, and machine code in bundles and caches.
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "device_call.h"
#include "gpu/backend.h"
#include "gpu/jit/bundle.h"
#include "gpu/jit/cache_file.h"

namespace fulmen::gpu {
namespace {

// Arrays without memory.
class Phantom : public DeviceCall {
 public:
  explicit Phantom(const char* device_name, fulmen_dtype type = FULMEN_FLOAT32)
      : DeviceCall(0, type) {
    for (const Member member : {&fulmen_tensors::q, &fulmen_tensors::k, &fulmen_tensors::v,
                                &fulmen_tensors::o, &fulmen_tensors::lse, &fulmen_tensors::stats}) {
      (tensors.*member).data = nullptr;
    }
    problem.device_name = device_name;
  }
};

TEST(NamedDevice, ExplainsAndCompilesButDoesNotRun) {
  Phantom call("a100");
  fulmen_plan* const plan = call.plan();
  ASSERT_NE(plan, nullptr) << fulmen_last_error();
  const std::string text = call.explanation();
  for (const char* part :
       {"\"implementation\": \"simt\"", "\"backend\": \"cuda\"", "\"name\": \"a100\"",
        "\"arch\": \"sm_80\"", "\"index\": null", "\"multiprocessors\": 108", "\"registers\": 32",
        "\"bound\": \"compute\"",
        "\"implementation\": \"naive\", \"reason\": \"slower than simt"}) {
    EXPECT_TRUE(holds(text, part)) << part << " is missing in " << text;
  }
  const DeviceCall arrays;
  expect_refused(fulmen_forward(plan, &arrays.tensors, nullptr, 0, nullptr),
                 FULMEN_ERROR_UNSUPPORTED, {"'a100'", "does not run", "device"});
  fulmen_plan_destroy(plan);
  DeviceCall simple;
  simple.problem.device_name = "a100";
  expect_refused(simple.forward(), FULMEN_ERROR_UNSUPPORTED, {"'a100'", "does not run"});
}

TEST(NamedDevice, ArchitecturesAreNamesToo) {
  for (const char* name :
       {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120", "h100", "t4"}) {
    Phantom call(name);
    EXPECT_TRUE(holds(call.explanation(), "\"implementation\": \"simt\"")) << name;
  }
  Phantom call("k80");
  EXPECT_EQ(call.plan(), nullptr);
  EXPECT_TRUE(holds(fulmen_last_error(), "device_name is 'k80'; known are t4, a100"));
}

TEST(Explain, OfADeviceThatIsHere) {
  DeviceCall call(1);
  call.problem.implementation = FULMEN_NAIVE;
  const std::string text = call.explanation();
  for (const char* part :
       {"\"implementation\": \"naive\"", "asked for by name", "\"name\": \"Fake GPU 1\"",
        "\"arch\": \"sm_90a\"", "\"index\": 1", "\"blocks_per_multiprocessor\": 4",
        "\"implementation\": \"simt\", \"reason\": \"not the one asked for", "\"tile\": null"}) {
    EXPECT_TRUE(holds(text, part)) << part << " is missing in " << text;
  }
}

TEST(Gate, ARejectedKernelIsPassedOverAndExplained) {
  DeviceCall call;
  call.problem.device = 0;
  for (const Member member :
       {&fulmen_tensors::q, &fulmen_tensors::k, &fulmen_tensors::v, &fulmen_tensors::o}) {
    call.add(member, FULMEN_FLOAT32, {1, 2, 32, 200});  // no other test compiles for these
  }
  call.add(&fulmen_tensors::lse, FULMEN_FLOAT32, {1, 2, 32});
  call.add(&fulmen_tensors::stats, FULMEN_FLOAT32, {1, 2, 32, 2});
  const ScopedVariable log("FAKE_NVRTC_LOG", "ptxas info : (C7510) Potential \"loss\"");
  const ScopedVariable of("FAKE_NVRTC_LOG_OF", "forward_simt_float32");
  const std::string text = call.explanation();
  EXPECT_TRUE(holds(text, "\"implementation\": \"naive\"")) << text;
  EXPECT_TRUE(holds(text, "is rejected by the assembler's finding C7510: Potential \\\"loss\\\""))
      << text;
  EXPECT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(std::string(last_launch().kernel), "forward_naive_float32");
  call.problem.implementation = FULMEN_SIMT;
  expect_refused(call.forward(), FULMEN_ERROR_UNSUPPORTED,
                 {"no such implementation", "Fake GPU 0", "simt: ", "C7510"});
}

TEST(CacheClear, TheNextPlanCompilesAgain) {
  DeviceCall call;
  ASSERT_EQ(call.forward(), FULMEN_OK);
  const int before = num_compilations();
  ASSERT_EQ(call.forward(), FULMEN_OK);
  EXPECT_EQ(num_compilations(), before);
  fulmen_plan* const old = call.plan();
  ASSERT_EQ(fulmen_cache_clear(), FULMEN_OK);
  ASSERT_EQ(call.forward(), FULMEN_OK);
  EXPECT_EQ(num_compilations(), before + 1);
  EXPECT_EQ(fulmen_forward(old, &call.tensors, nullptr, fulmen_plan_workspace_bytes(old), nullptr),
            FULMEN_OK)
      << fulmen_last_error();  // plans stay valid
  fulmen_plan_destroy(old);
}

class Bundle : public testing::Test {
 protected:
  std::string path() const { return folder_.path() + "/kernels.bundle"; }

  // Of one plan for the architecture of the fake devices: of a kernel that no other test compiles,
  // since what is loaded stays loaded.
  void write() {
    Phantom call("sm_90a", FULMEN_BFLOAT16);
    call.problem.implementation = FULMEN_NAIVE;
    const fulmen_plan* const plan = call.plan();
    ASSERT_NE(plan, nullptr) << fulmen_last_error();
    EXPECT_EQ(fulmen_bundle_write(&plan, 1, path().c_str()), FULMEN_OK) << fulmen_last_error();
    fulmen_plan_destroy(const_cast<fulmen_plan*>(plan));
  }

  void overwrite(const std::string& bytes) const {
    std::ofstream(path(), std::ios::binary) << bytes;
  }

  void expect_load_refused(const char* word) const {
    expect_refused(fulmen_bundle_load(path().c_str()), FULMEN_ERROR_ARGUMENT,
                   {path().c_str(), word, "make it again"});
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(Bundle, DamageIsFound) {
  expect_load_refused("cannot be read");
  write();
  const std::string whole = *read_file(path(), Trust::kNamed, 1 << 24).bytes;
  for (const std::size_t at : {std::size_t{20}, whole.size() / 2, whole.size() - 1}) {
    std::string changed = whole;
    changed[at] ^= 1;
    overwrite(changed);
    expect_load_refused("is damaged");
    overwrite(whole.substr(0, at));
    expect_load_refused("is damaged");
  }
  overwrite("something else");
  expect_load_refused("is no bundle");
}

TEST_F(Bundle, WhatIsNoFileIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  ::alarm(20);  // ends the test where a read waits for a writer
  expect_load_refused("it is no regular file");
  ::alarm(0);
  ASSERT_EQ(::unlink(path().c_str()), 0);
  overwrite("");
  ASSERT_EQ(::truncate(path().c_str(), off_t{1} << 40), 0);
  expect_load_refused("it has 1099511627776 bytes");
}

TEST_F(Bundle, RefusesWhatMakesNone) {
  DeviceCall call;
  call.problem.backend = FULMEN_BACKEND_CPU;
  for (const Member member : {&fulmen_tensors::q, &fulmen_tensors::k, &fulmen_tensors::v,
                              &fulmen_tensors::o, &fulmen_tensors::lse, &fulmen_tensors::stats}) {
    (call.tensors.*member).data = nullptr;
  }
  const fulmen_plan* const plan = call.plan();
  expect_refused(fulmen_bundle_write(&plan, 1, path().c_str()), FULMEN_ERROR_ARGUMENT,
                 {"plans[0] is for the CPU", "device_name"});
  expect_refused(fulmen_bundle_write(&plan, 0, path().c_str()), FULMEN_ERROR_ARGUMENT,
                 {"num_plans is 0"});
  expect_refused(fulmen_bundle_write(&plan, 1, nullptr), FULMEN_ERROR_ARGUMENT, {"path is null"});
  fulmen_plan_destroy(const_cast<fulmen_plan*>(plan));
  Phantom gpu("h100");
  const fulmen_plan* const other = gpu.plan();
  expect_refused(fulmen_bundle_write(&other, 1, "/no/such/folder/file"), FULMEN_ERROR_ARGUMENT,
                 {"/no/such/folder/file", "could not be written"});
  fulmen_plan_destroy(const_cast<fulmen_plan*>(other));
}

// A server has no compiler for what it does beside attention either.
TEST_F(Bundle, OfACacheHoldsAppendsAndMerges) {
  Phantom call("sm_90a", FULMEN_BFLOAT16);
  call.problem.implementation = FULMEN_NAIVE;
  int32_t starts[64] = {};
  const int64_t batch = call.tensors.q.shape[0];
  ASSERT_LE(batch, 64);
  ASSERT_EQ(fulmen_tensor_init(&call.tensors.kv_start, starts, FULMEN_INT32, 1, &batch), FULMEN_OK);
  const fulmen_plan* const plan = call.plan();
  ASSERT_NE(plan, nullptr) << fulmen_last_error();
  ASSERT_EQ(fulmen_bundle_write(&plan, 1, path().c_str()), FULMEN_OK) << fulmen_last_error();
  fulmen_plan_destroy(const_cast<fulmen_plan*>(plan));
  const auto before = bundle_info().num_kernels;
  ASSERT_EQ(fulmen_bundle_load(path().c_str()), FULMEN_OK) << fulmen_last_error();
  constexpr auto kAppends = 2 * (1 + 2 * 2);  // vectors or not; no rotation, or two with two tables
  EXPECT_EQ(bundle_info().num_kernels, before + 1 + kAppends + merge_specs().size());
}

TEST_F(Bundle, ServesWithoutCompiling) {
  write();
  ASSERT_EQ(fulmen_cache_clear(), FULMEN_OK);
  ASSERT_EQ(fulmen_bundle_load(path().c_str()), FULMEN_OK) << fulmen_last_error();
  const std::size_t num_kernels = bundle_info().num_kernels;  // those of other tests too
  EXPECT_GE(num_kernels, 1u);
  DeviceCall call(0, FULMEN_BFLOAT16);
  call.problem.implementation = FULMEN_NAIVE;
  const int before = num_compilations();
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(num_compilations(), before);
  EXPECT_TRUE(holds(call.explanation(), "\"origin\": \"bundle\""));
  std::string info(1 << 14, '\0');
  ASSERT_EQ(fulmen_gpu_info(info.data(), info.size(), nullptr), FULMEN_OK);
  const std::string of_bundle = sentence("kernels.bundle\", \"kernels\": ", num_kernels);
  for (const char* part : {of_bundle.c_str(), "\"version\": \"13.0\"", "\"name\": \"Fake GPU 1\"",
                           "\"archs\": [75, 80"}) {
    EXPECT_TRUE(holds(info, part)) << part << " is missing in " << info;
  }
}

}  // namespace
}  // namespace fulmen::gpu
