// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The switches by which forward_sm90 leaves an idea out cost nothing where they are on: its machine
// code is bit by bit that of a text in which each switch is replaced by its value. Needs a real
// NVRTC (FULMEN_TEST_NVRTC, see compile_test.cpp) and no GPU.
#include <gtest/gtest.h>

#include <cstdlib>

#include "gpu/forward_sm90/plan.h"
#include "gpu/jit/compiler.h"

namespace fulmen::gpu {
namespace {

struct Replacement {
  std::string what, by;
};
const std::vector<Replacement> kSwitchesOn = {
    {"kConfig.swizzle", "true"},         {"kConfig.ping_pong", "true"},
    {"kConfig.overlap", "true"},         {"kConfig.folded_scale", "true"},
    {"kConfig.skip_full_masks", "true"}, {"kConfig.longest_first", "true"},
    {"kConfig.specialised", "true"},
};
const std::vector<Replacement> kTurnsOff = {{"kConfig.ping_pong", "false"}};

std::string replaced(std::string_view text, const std::vector<Replacement>& replacements,
                     std::vector<std::size_t>& counts) {
  std::string result(text);
  for (std::size_t i = 0; i < replacements.size(); ++i) {
    const auto& [what, by] = replacements[i];
    for (std::size_t at = 0; (at = result.find(what, at)) != std::string::npos; ++counts[i]) {
      result.replace(at, what.size(), by);
    }
  }
  return result;
}

// The machine code of forward_sm90 of the default config from a text with replacements.
std::string cubin_with(const Nvrtc& nvrtc, const std::vector<Replacement>& replacements) {
  std::vector<std::string> texts;
  std::vector<SourceFile> files;
  std::vector<std::size_t> counts(replacements.size());
  texts.reserve(kernel_sources().size());  // files point at them
  for (const SourceFile& file : kernel_sources()) {
    texts.push_back(replaced(file.text, replacements, counts));
    files.push_back({file.name, texts.back()});
  }
  for (std::size_t i = 0; i < counts.size(); ++i) {
    EXPECT_GT(counts[i], 0u) << "no text asks for " << replacements[i].what;
  }
  return compile(nvrtc, forward_sm90_spec({.score = {.mask_kind = MaskKind::kRight}}), "sm_90a",
                 files)
      .cubin;
}

TEST(Ablation, SwitchesThatAreOnLeaveNoTrace) {
  const char* named = std::getenv("FULMEN_TEST_NVRTC");
  if (named == nullptr) GTEST_SKIP() << "FULMEN_TEST_NVRTC names no compiler";
  ::setenv("FULMEN_NVRTC", named, 1);
  const Nvrtc nvrtc = find_nvrtc({});
  if (!nvrtc.knows(90)) GTEST_SKIP() << "this NVRTC does not know Hopper";
  const std::string cubin = cubin_with(nvrtc, {});
  EXPECT_TRUE(cubin == cubin_with(nvrtc, kSwitchesOn));
  EXPECT_FALSE(cubin == cubin_with(nvrtc, kTurnsOff)) << "what is compared does not differ";
}

}  // namespace
}  // namespace fulmen::gpu
