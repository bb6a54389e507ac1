// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Reading the assembler's log, and the gate that rests on it.
#include "gpu/jit/module.h"
#include "support.h"

namespace fulmen::gpu {
namespace {

constexpr const char* kLog =
    "ptxas info    : 0 bytes gmem\n"
    "ptxas info    : Compiling entry function 'fulmen_kernel' for 'sm_90a'\n"
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized "
    "due to a call in function 'fulmen_kernel'\n"
    "ptxas info    : Function properties for fulmen_kernel\n"
    "    24 bytes stack frame, 20 bytes spill stores, 36 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 7 barriers, 24 bytes cumulative stack size\n";

TEST(ParseLog, FindsWhatTheAssemblerReports) {
  const ResourceUse use = parse_log(kLog);
  EXPECT_EQ(use.registers, 168);
  EXPECT_EQ(use.stack_bytes, 24u);
  EXPECT_EQ(use.spill_store_bytes, 20u);
  EXPECT_EQ(use.spill_load_bytes, 36u);
  ASSERT_EQ(use.findings.size(), 1u);
  EXPECT_EQ(use.findings[0].rfind("C7510: Potential Performance Loss", 0), 0u);
}

TEST(ParseLog, AnEmptyLogReportsNothing) {
  const ResourceUse use = parse_log("");
  EXPECT_EQ(use.registers, 0);
  EXPECT_TRUE(use.findings.empty());
}

TEST(Gate, RejectsEveryFindingThatSerialises) {
  for (const int number : {7508, 7510, 7511, 7512, 7513, 7514, 7515, 7517}) {
    const std::string log = sentence("ptxas info : (C", number, ") text of it");
    EXPECT_NE(gate(small_spec("k"), parse_log(log)).find(sentence("C", number)), std::string::npos);
  }
  for (const int number : {7509, 7516, 7519}) {
    EXPECT_EQ(gate(small_spec("k"), parse_log(sentence("(C", number, ") text"))), "");
  }
}

TEST(Gate, SpillsCountForTensorCoresAboveTheAllowance) {
  ResourceUse use;
  use.spill_load_bytes = 36;
  KernelSpec spec = small_spec("k");
  EXPECT_EQ(gate(spec, use), "");  // naive and simt kernels may spill
  spec.tensor_cores = true;
  EXPECT_EQ(gate(spec, use), "k spills 36 bytes of registers; 0 are allowed");
  spec.spill_allowance_bytes = 36;
  EXPECT_EQ(gate(spec, use), "");
}

TEST(Gate, LetsAblationsPass) {
  ResourceUse use = parse_log("ptxas info : (C7510) text of it");
  use.spill_load_bytes = 36;
  KernelSpec spec = small_spec("k");
  spec.tensor_cores = true;
  EXPECT_NE(gate(spec, use), "");
  spec.is_ablation = true;
  EXPECT_EQ(gate(spec, use), "");
}

}  // namespace
}  // namespace fulmen::gpu
