// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How often this program has called operator new: linking count_allocations.cpp replaces it.
#pragma once

namespace fulmen::test {

long num_allocations();

}  // namespace fulmen::test
