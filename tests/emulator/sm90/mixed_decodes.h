// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// decode_sm80 as it runs beside forward_sm90, in a file of its own: the two have types of the same
// names.
#pragma once

#include "core/problem.h"

namespace fulmen::test {

// The requests of few rows of a problem of 64 dims, causal, in pages.
void run_decodes(const Problem& problem, u32 seed);

}  // namespace fulmen::test
