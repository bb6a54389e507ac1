// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Solution of 10.1: entry key / PAGE of the request's table names the page, key % PAGE the row in
// it; the table is read only where it has such an entry.
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* rows;   // (request, new_rows, 32)
  float* pages;        // (page, PAGE, 32)
  const i32* table;    // (request, max_pages)
  const i32* lengths;  // (request)    keys before
  i32 new_rows;
  i32 max_pages;
};

extern "C" __global__ void fulmen_kernel(const Params p) {
  const i32 lane = static_cast<i32>(ptx::thread_index());
  const i32 block = static_cast<i32>(ptx::block_index());
  const i32 request = block / p.new_rows, row = block % p.new_rows;
  const i32 key = p.lengths[request] + row;
  if (key >= p.max_pages * PAGE) return;
  const i32 at = p.table[request * p.max_pages + key / PAGE] * PAGE + key % PAGE;
  p.pages[at * 32 + lane] = p.rows[block * 32 + lane];
}
