// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The part of validation that looks at where arrays lie: an output shares no byte with itself or
// with any other array. Each throws Error with one sentence.
#pragma once

#include "core/array_rules.h"

namespace fulmen {

// That no two elements of an output are one.
void check_outputs_nest(const Problem& problem, Call call);

// That no output overlaps another array. Fills pointer_alignment.
void check_pointers(Problem& problem, Call call);

}  // namespace fulmen
