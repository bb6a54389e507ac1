// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// In how many schedules a case runs, by seed from 1 on: two, the first of them with the checker on;
// with FULMEN_TEST_FULL set, twenty, all checked. Of drawn problems two in five run, at least one,
// or all, and the checker looks at every fourth, or at all.
#pragma once

#include <cstdlib>

#include "kernels/base.cuh"

namespace fulmen::test {

inline bool tests_everything() { return std::getenv("FULMEN_TEST_FULL") != nullptr; }
inline u32 num_schedules() { return tests_everything() ? 20 : 2; }
inline u32 num_drawn(u32 all) { return tests_everything() ? all : max(1u, all * 2 / 5); }
inline bool is_checked(u32 seed) { return seed == 1 || tests_everything(); }
inline bool is_sampled(u32 seed) { return seed % 4 == 1 || tests_everything(); }

}  // namespace fulmen::test
