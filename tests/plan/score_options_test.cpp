// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Options of scores: from a problem, in names of kernels, and nested in a config.
#include <gmock/gmock.h>

#include "gpu/jit/kernel_spec.h"
#include "gpu/params.h"

namespace fulmen {

// As every kernel's config is made.
struct ConfigOfTest {
  ScoreOptions score;
  i32 rows = 64;
};

template <class Each>
constexpr void for_each_field(const ConfigOfTest& config, Each each) {
  each("score", config.score);
  each("rows", config.rows);
}

namespace {

TEST(ScoreOptions, AreOffWhereTheProblemHasNone) {
  Problem plain;
  plain.score_map.scale = 0.5;
  EXPECT_TRUE(gpu::score_options_of(plain) == ScoreOptions{});
  EXPECT_EQ(gpu::name_suffix(ScoreOptions{}), "");
}

TEST(ScoreOptions, SayWhatTheProblemHas) {
  Problem problem;
  problem.score_map = {-1, 30};
  problem.mask.causal = true;
  problem.dropout.threshold = 1;
  problem.packed = {true, true};
  problem.accumulate = true;
  problem.arrays[Array::kBias].dtype = DType::kFloat16;
  for (const Array array :
       {Array::kMask, Array::kQIds, Array::kAlibiSlopes, Array::kSinks, Array::kStats, Array::kO}) {
    problem.arrays[array].dtype = DType::kFloat32;
  }
  const ScoreOptions score = gpu::score_options_of(problem);
  EXPECT_EQ(score.mask_kind, MaskKind::kRight);
  EXPECT_TRUE(score.has_pair_terms());
  EXPECT_EQ(gpu::name_suffix(score),
            "_right_mask_bias_float16_documents_alibi_score_mod_dropout_sinks_negative_scale_varlen"
            "_stats_fp32_out_accumulate");
  problem.mask.window_left = 3;
  EXPECT_EQ(gpu::score_options_of(problem).mask_kind, MaskKind::kBoth);
}

TEST(FieldsOf, NamesFieldsOfANestedStruct) {
  ConfigOfTest config;
  config.score.bias = DType::kBFloat16;
  std::vector<std::string> texts;
  for (const gpu::ConfigField& field : gpu::fields_of(config)) {
    texts.push_back(field.name + " = " + field.value);
  }
  EXPECT_THAT(texts, testing::IsSupersetOf({"score.mask_kind = fulmen::MaskKind::kNone",
                                            "score.bias = fulmen::DType::kBFloat16",
                                            "score.score_mod = false", "rows = 64"}));
}

TEST(FieldsOf, CountsMembersOfAConfig) {
  EXPECT_EQ(gpu::fields::num_members<ConfigOfTest>(), 2);
  EXPECT_EQ(gpu::fields::num_members<ScoreOptions>(), gpu::fields::num_listed<ScoreOptions>());
}

}  // namespace
}  // namespace fulmen
