// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The embedded text and what is generated around it.
#include <algorithm>

#include "gpu/jit/compiler.h"
#include "support.h"

namespace fulmen::gpu {
namespace {

bool holds(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST(KernelSources, AreEmbeddedWholeAndInOrder) {
  const std::vector<SourceFile>& files = kernel_sources();
  EXPECT_TRUE(std::is_sorted(files.begin(), files.end(),
                             [](const auto& a, const auto& b) { return a.name < b.name; }));
  for (const SourceFile& file : files) {
    EXPECT_EQ(file.text.substr(0, 28), "// SPDX-FileCopyrightText: f") << file.name;
    EXPECT_EQ(file.text.back(), '\n') << file.name;
  }
}

TEST(KernelSources, EveryIncludeIsAnEmbeddedFile) {
  for (const SourceFile& file : kernel_sources()) {
    EXPECT_NO_THROW(reachable_sources(kernel_sources(), file.name)) << file.name;
    EXPECT_EQ(file.text.find("#include <"), std::string_view::npos)
        << file.name << " needs a file that NVRTC does not have";
  }
}

TEST(ReachableSources, FollowsIncludesOnceAndOnlyThem) {
  const std::vector<SourceFile> files = {{"a", "#include \"b\"\n#include \"c\"\n"},
                                         {"b", "#include \"c\"\n"},
                                         {"c", "#include \"a\"\n// see #include \"d\"\n"},
                                         {"d", ""}};
  std::string names;
  for (const SourceFile& file : reachable_sources(files, "a")) names += file.name;
  EXPECT_EQ(names, "abc");
}

TEST(ReachableSources, NamesAMissingFile) {
  const std::vector<SourceFile> files = {{"a", "#include \"gone\"\n"}};
  expect_error(Status::kInternal, {"gone", "a"}, [&] { reachable_sources(files, "a"); });
}

TEST(WrapperText, SetsFieldsByNameAndAssertsSizes) {
  KernelSpec spec = small_spec("k");
  spec.shared_bytes = 4096;
  spec.shared_bytes_text = "bytes(kConfig)";
  const std::string text = wrapper_text(spec);
  EXPECT_TRUE(holds(text, "#include \"kernels/attention/mask.cuh\"\n"));
  EXPECT_TRUE(holds(text, "  config.causal = true;\n  config.chunk = 8;\n"));
  EXPECT_TRUE(holds(text, "static_assert(sizeof(fulmen::SequenceShape) == 12"));
  EXPECT_TRUE(holds(text, "static_assert(bytes(kConfig) == 4096"));
  EXPECT_TRUE(holds(text, "__launch_bounds__(128, 1)"));
  EXPECT_TRUE(holds(text, "fulmen::nothing<kConfig>(params);"));
}

}  // namespace
}  // namespace fulmen::gpu
