// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 6: scores and masks of the caller's.

#include "core/expression.h"

#include "api/boundary.h"

namespace fulmen::api {
namespace {

std::vector<std::string> names_of(const char* const* names, size_t count, const char* subject) {
  if (count > expression::kMaxNames) {
    refuse(sentence("num_", subject, " is ", count, "; allowed are up to ", expression::kMaxNames));
  }
  if (count > 0) require_pointer(names, subject, "their names");
  std::vector<std::string> all;
  for (size_t index = 0; index < count; ++index) {
    require_pointer(names[index], sentence(subject, "[", index, "]").c_str(), "a name");
    all.emplace_back(names[index]);
  }
  return all;
}

}  // namespace
}  // namespace fulmen::api

fulmen_status fulmen_expression_create(const char* score, const char* mask,
                                       const char* const* captures, size_t num_captures,
                                       const char* const* scalars, size_t num_scalars,
                                       uint64_t* expression) {
  using namespace fulmen::api;
  return guarded([&] {
    require_pointer(expression, "expression", "the address of a uint64_t");
    *expression = 0;
    *expression = fulmen::expression::make(
        score, mask,
        {names_of(captures, num_captures, "captures"), names_of(scalars, num_scalars, "scalars")});
  });
}

void fulmen_expression_destroy(uint64_t expression) {
  fulmen::api::guarded([&] { fulmen::expression::release(expression); });
}
