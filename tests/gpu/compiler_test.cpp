// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Names of architectures; machine code, its log, and compile errors.
#include "gpu/jit/compiler.h"

#include "plan/gpu.h"
#include "support.h"

namespace fulmen::gpu {
namespace {

TEST(ArchNames, GoBothWays) {
  EXPECT_EQ(arch_name(86), "sm_86");
  EXPECT_EQ(arch_name(90), "sm_90a");
  EXPECT_EQ(arch_number("sm_90a"), 90);
  EXPECT_EQ(arch_number("sm_120"), 120);
  for (const char* wrong : {"", "sm_", "90", "sm_x", "sm_90b", "sm_90aa", "sm_-1"}) {
    expect_error(Status::kArgument, {"sm_80"}, [&] { arch_number(wrong); });
  }
}

TEST(Compile, GivesTheCodeAndTheLog) {
  const CompiledKernel kernel = compile(Nvrtc::load(FAKE_NVRTC_FILE), small_spec("k"), "sm_90a");
  EXPECT_EQ(kernel.cubin.rfind("cubin sm_90a\n// k\n", 0), 0u);
  EXPECT_EQ(kernel.log, "ptxas info    : Used 32 registers");
}

TEST(Compile, AnErrorCarriesTheLog) {
  const Nvrtc nvrtc = Nvrtc::load(FAKE_NVRTC_FILE);
  const ScopedVariable fail("FAKE_NVRTC_FAIL", "1");
  expect_error(Status::kCompile, {"kernel k ", "sm_80", "NVRTC 13.0", "error: planted"},
               [&] { compile(nvrtc, small_spec("k"), "sm_80"); });
}

TEST(Compile, TheCompilerGetsALargeStackWhateverTheCallersIs) {
  const Nvrtc nvrtc = Nvrtc::load(FAKE_NVRTC_FILE);
  const ScopedVariable use("FAKE_NVRTC_STACK_MIB", "48");  // more than a thread of this test has
  const CompiledKernel kernel = compile(nvrtc, small_spec("k"), "sm_80");
  EXPECT_EQ(kernel.cubin.rfind("cubin sm_80\n", 0), 0u);
}

TEST(Compile, AnUnknownArchitectureIsRefusedWithTheKnownOnes) {
  const Nvrtc nvrtc = Nvrtc::load(FAKE_NVRTC_FILE);
  expect_error(Status::kUnsupported, {"sm_70", "NVRTC 13.0", "sm_75, sm_80"},
               [&] { compile(nvrtc, small_spec("k"), "sm_70"); });
}

}  // namespace
}  // namespace fulmen::gpu
