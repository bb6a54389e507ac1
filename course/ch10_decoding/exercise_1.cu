// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exercise 10.1: new keys go behind those of a request, wherever its pages are. A warp has one row,
// which becomes key lengths[request] + row of the request. Here it goes to the place that it would
// have without pages. Rows for which the table has no page left are not written.
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
  const i32 at = request * p.max_pages * PAGE + key;
  p.pages[at * 32 + lane] = p.rows[block * 32 + lane];
}
