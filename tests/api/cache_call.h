// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A call over a paged cache: pools whose rows that no request has are NaN, page tables whose
// entries past the lengths are garbage; and the same call over gathered keys.
#pragma once

#include "api/test_call.h"

namespace fulmen::test {

struct CacheSizes {
  Sizes call{.batch = 3, .q_rows = 3, .kv_rows = 0};
  int64_t page_rows = 3;
  int64_t num_pages = 9;
  std::vector<int64_t> lengths{7, 0, 5};  // of each request
  // Pages of each request, those past the length garbage.
  std::vector<std::vector<int64_t>> pages{{4, 0, 7, -5}, {-1, 1 << 20, 3, -9}, {0, 8, -1, 99}};
};

// q, o, lse and stats as of a dense call; k and v pools; page_table and kv_lengths.
TestCall paged_call(const CacheSizes& sizes = {}, fulmen_dtype dtype = FULMEN_FLOAT32);

// The dense call over the same keys: (batch, kv_head, longest, dim), with kv_lengths.
TestCall gathered_call(const TestCall& paged, const CacheSizes& sizes = {});

}  // namespace fulmen::test
