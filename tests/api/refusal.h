// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A precondition of fulmen.h as a row of a table: how a good call is spoilt, the status, and words
// that the sentence must hold (what was wrong, what was given, what is allowed). No output byte may
// change. A row whose call succeeds, or fails for another reason, fails the test.
#pragma once

#include <vector>

#include "api/test_call.h"

namespace fulmen::test {

struct Refusal {
  const char* label;
  void (*spoil)(TestCall& call);
  fulmen_status status;
  std::vector<const char*> words;
};

void expect_refused(const TestCall& call, const Refusal& row, fulmen_status got);

// A dense forward call that the row spoils is refused ...
void expect_call_refuses(const Refusal& row);

// ... and a plan for it too, unless the row is about what a plan cannot see: pointers and contents.
void expect_plan_refuses(const Refusal& row);

// Two sequences of 2 and 4 query rows, 3 and 5 keys.
TestCall packed_call();

// Other extents over the same memory.
void set_shape(fulmen_tensor& tensor, const Shape& shape);

// A number that may be none of the enumeration's.
template <class Enum>
void set_number(Enum& enumerator, int number) {
  static_assert(sizeof(Enum) == sizeof(int));
  std::memcpy(&enumerator, &number, sizeof(int));
}

}  // namespace fulmen::test
