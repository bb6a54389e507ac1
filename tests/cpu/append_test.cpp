// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU's append and rotary embedding, of drawn problems; and that an entry out of range leaves
// everything as it was.
#include <gtest/gtest.h>

#include "core/error.h"
#include "cpu/backend.h"
#include "quantised_append.h"

namespace fulmen::test {
namespace {

TEST(Append, RowsGoWhereTheyShould) {
  for (unsigned seed = 0; seed < 120; ++seed) {
    const DrawnAppend drawn(seed, true);
    cpu::append(validate_append(drawn.given, true));
    ASSERT_EQ(drawn.wrong(), "") << "seed " << seed;
  }
}

TEST(Append, QuantisesWhatItRotated) {
  int quantised = 0;
  for (unsigned seed = 0; seed < 120; ++seed) {
    const DrawnAppend drawn(seed, true);
    if (drawn.given.k.dtype == DType::kFloat64) continue;
    ++quantised;
    for (const DType stored : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
      const QuantisedAppend call(seed, drawn.given, stored);
      cpu::append(validate_append(call.wide, true));
      cpu::append(validate_append(call.given, true));
      ASSERT_EQ(call.wrong(call.given), "") << "seed " << seed;
    }
  }
  EXPECT_GT(quantised, 60);
}

TEST(Append, ARotaryEmbeddingAlone) {
  for (unsigned seed = 0; seed < 80; ++seed) {
    const DrawnAppend drawn(seed, false);
    cpu::append(validate_append(drawn.given, false));
    ASSERT_EQ(drawn.wrong(), "") << "seed " << seed;
  }
}

TEST(Append, AnEntryOutOfRangeIsRefusedAndNothingWritten) {
  int refused = 0;
  for (unsigned seed = 0; seed < 120; ++seed) {
    const DrawnAppend drawn(seed, seed % 4 != 0, true);
    const AppendProblem problem = validate_append(drawn.given, seed % 4 != 0);
    if (drawn.faults == 0) continue;
    ++refused;
    EXPECT_THROW(cpu::append(problem), Error) << "seed " << seed;
    ASSERT_TRUE(drawn.is_untouched()) << "seed " << seed;
  }
  EXPECT_GT(refused, 60);
}

}  // namespace
}  // namespace fulmen::test
