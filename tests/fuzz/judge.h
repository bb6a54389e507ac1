// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What must hold of a call, whatever it was given: refused, it changed no byte and said one
// sentence; accepted, it wrote its outputs and nothing else, and does so again to the bit.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "fuzz/drawn_call.h"

namespace fulmen::test {

// A promise of fulmen.h that was not kept, as one sentence.
class Broken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

using Blocks = std::vector<const Block*>;

// The bytes of all blocks of a call.
class Snapshot {
 public:
  explicit Snapshot(const DrawnCall& call);

  // Throws Broken where a byte differs outside the elements of `outputs`. Memory in `scratch` may
  // hold anything.
  void expect_kept(const std::vector<fulmen_tensor>& outputs, const Blocks& scratch) const;
  // Throws Broken where any byte differs.
  void expect_same(const char* when, const Blocks& scratch) const;
  // All bytes as they were.
  void restore() const;

 private:
  const DrawnCall& call_;
  std::vector<std::string> bytes_;
};

// Present tensors that the operation writes.
std::vector<fulmen_tensor> outputs_of(const DrawnCall& call);

// All bytes of their elements 0xff.
void poison(const std::vector<fulmen_tensor>& tensors);

// Throws Broken unless the last failure of this thread has a status and a sentence as fulmen.h
// says. is_good: nothing was spoilt, so only the backend or the implementation may refuse it.
void expect_refusal(fulmen_status status, bool is_good);

}  // namespace fulmen::test
