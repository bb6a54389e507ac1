// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Lists of blocks, the array `blocks`: their options and extents, and what they say.

#include "core/arrays.h"
#include "core/error.h"
#include "core/validate.h"

namespace fulmen {
namespace {

void check_sizes(const Problem& problem) {
  const bool is_given = problem.has(Array::kBlocks);
  const auto check = [is_given](const char* option, i64 size) {
    if (is_given == (size > 0)) return;
    refuse(is_given ? sentence(option, " is 0 beside blocks; allowed is a multiple of 64")
                    : sentence(option, " is ", size,
                               " without blocks, the lists that it is of: pass them, or leave it "
                               "0"));
  };
  check("block_q", problem.block_q);
  check("block_kv", problem.block_kv);
}

}  // namespace

void apply_blocks(Problem& problem, const Request& request) {
  check_sizes(problem);
  const Tensor& lists = problem.arrays[Array::kBlocks];
  if (!lists.present()) return;
  const i64 heads = lists.shape[1];
  if (heads != 1 && heads != problem.heads_kv && heads != problem.heads_q) {
    throw Error(Status::kShape, sentence("blocks has ", heads, " heads, shape ",
                                         shape_text(request.arrays[Array::kBlocks]),
                                         "; allowed are 1, those of k, ", problem.heads_kv,
                                         ", and those of q, ", problem.heads_q));
  }
  const i64 rows = ceil_div(problem.max_q, problem.block_q);
  if (lists.shape[2] == rows) return;
  throw Error(Status::kShape,
              sentence("blocks has ", lists.shape[2], " lists a head, shape ",
                       shape_text(request.arrays[Array::kBlocks]), ", where up to ", problem.max_q,
                       " rows in blocks of ", problem.block_q, " need ", rows,
                       problem.packed.q ? ": max_q lowers the bound" : ""));
}

void check_blocks(const Problem& problem) {
  const Tensor& lists = problem.arrays[Array::kBlocks];
  if (!lists.present()) return;
  const i64 blocks = ceil_div(problem.max_kv, problem.block_kv);
  const i64 batch = lists.strides[0] == 0 ? min<i64>(lists.shape[0], 1) : lists.shape[0];
  for (i64 index = 0; index < batch; ++index) {
    for (i64 head = 0; head < lists.shape[1]; ++head) {
      for (i64 row = 0; row < lists.shape[2]; ++row) {
        for (i64 entry = 0; entry < lists.shape[3]; ++entry) {
          const i64 id = lists.index(index, head, row, entry);
          if (!is_bad_block(id, blocks)) continue;
          refuse(sentence("blocks[", index, ", ", head, ", ", row, ", ", entry, "] is ", id,
                          ", but there are ", blocks, " blocks of ", problem.block_kv,
                          " keys; allowed is -1, or 0 to ", blocks - 1));
        }
      }
    }
  }
}

bool Problem::lists_block(i64 index, i64 head, i64 q_block, i64 kv_block) const {
  const Tensor& lists = arrays[Array::kBlocks];
  const i64 list = list_of_head(head, heads_q, lists.shape[1]);
  for (i64 entry = 0; entry < lists.shape[3]; ++entry) {
    if (lists.index(index, list, q_block, entry) == kv_block) return true;
  }
  return false;
}

}  // namespace fulmen
