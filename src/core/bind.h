// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A problem again, with the arrays of another run: what a plan is made of is checked once, and each
// run is held against it.
#pragma once

#include "core/problem.h"

namespace fulmen {

// The same problem with other pointers: `arrays` must agree with the problem in everything else.
// Throws Error naming the array and what differs. pointer_alignment becomes that of `arrays`.
Problem rebind(const Problem& problem, const Arrays& arrays);

// Likewise where `arrays` are known to differ from those that the problem was made of by pointers
// alone (same_layout, or the key of request_key.h): only what pointers decide is checked.
Problem bind(const Problem& problem, const Arrays& arrays);

// Likewise, and with the seed and offset of the request.
Problem bind(const Problem& problem, const Request& request);

// Whether two sets of arrays, as callers gave them, differ by pointers alone.
bool same_layout(const Arrays& a, const Arrays& b);

}  // namespace fulmen
