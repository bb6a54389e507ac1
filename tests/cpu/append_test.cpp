// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU's append and rotary embedding, of drawn problems; and that an entry out of range leaves
// everything as it was.
#include <gtest/gtest.h>

#include "core/error.h"
#include "cpu/backend.h"
#include "drawn_append.h"

namespace fulmen::test {
namespace {

TEST(Append, RowsGoWhereTheyShould) {
  for (unsigned seed = 0; seed < 120; ++seed) {
    const DrawnAppend drawn(seed, true);
    cpu::append(validate_append(drawn.given, true));
    ASSERT_EQ(drawn.wrong(), "") << "seed " << seed;
  }
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
