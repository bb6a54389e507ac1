// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a caller may do wrong, at random: fields of structs, pointers, contents of index arrays.
// What no library can notice is left out: a tensor that says that its memory reaches further than
// it does.
#pragma once

#include <string>

#include "fuzz/drawn_call.h"

namespace fulmen::test {

// Spoils one thing, and says which. What is left may still be a good call.
std::string damage(DrawnCall& call);

// Why a call with these tensors must be refused, whatever else it says; "" where nothing is seen.
// Every array of the struct is looked at, also those that the call does not read.
std::string why_refused(const DrawnCall& call);

// The memory of a tensor whose elements all lie in one block; null: there is none.
const Block* block_of(const DrawnCall& call, const fulmen_tensor& tensor);

}  // namespace fulmen::test
