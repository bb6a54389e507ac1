// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the arrays of an append hold, in host memory: where rows go, and what is out of range.

#include "core/append.h"
#include "core/error.h"

namespace fulmen {

AppendRequest request_of(const AppendProblem& problem, i64 sequence) {
  AppendRequest request{0, problem.extents.rows, 0, problem.extents.columns, 0, 0};
  if (problem.cu_new.present()) {
    request.begin = problem.cu_new.index(0, 0, 0, sequence);
    request.end = problem.cu_new.index(0, 0, 0, sequence + 1);
  }
  if (problem.page_indptr.present()) {
    request.table_begin = problem.page_indptr.index(0, 0, 0, sequence);
    request.table_end = problem.page_indptr.index(0, 0, 0, sequence + 1);
  }
  if (problem.kv_lengths.present()) request.length = problem.kv_lengths.index(0, 0, 0, sequence);
  return checked(request, problem.extents, problem.page_table.present());
}

AppendRow row_of(const AppendProblem& problem, const AppendRequest& request, i64 sequence,
                 i64 row) {
  const AppendExtents& extents = problem.extents;
  const i64 batch = problem.cu_new.present() ? 0 : sequence;
  const i64 place = request.length + row - request.begin;
  AppendRow found;
  if (problem.slots.present()) {
    found = row_at_slot(problem.slots.index(batch, 0, 0, row), extents);
  } else if (problem.page_table.present()) {
    const i64 column = request.table_begin + place / extents.page_size;
    if (column >= request.table_end) {
      found.faults = kFaultSlots;
    } else {
      const i64 entry_of = problem.page_indptr.present() ? 0 : sequence;
      found = row_at_page(problem.page_table.index(entry_of, 0, 0, column), place, extents);
    }
  }
  if (!problem.rotates() || found.faults != 0) return found;
  const i64 position =
      problem.positions.present() ? problem.positions.index(batch, 0, 0, row) : place;
  set_position(found, position, extents);
  return found;
}

namespace {

[[noreturn]] void refuse_request(const AppendProblem& problem, i64 sequence,
                                 const AppendRequest& request) {
  if (request.faults & kFaultKvOffsets) {
    const bool is_new =
        request.begin < 0 || request.begin > request.end || request.end > problem.extents.rows;
    const i64 begin = is_new ? request.begin : request.table_begin;
    const i64 end = is_new ? request.end : request.table_end;
    refuse(sentence(is_new ? "cu_new" : "page_indptr", " has ", begin, " and ", end, " at ",
                    sequence, "; offsets do not decrease and end at most at ",
                    is_new ? problem.extents.rows : problem.extents.columns));
  }
  refuse(sentence("kv_lengths[", sequence, "] is ", request.length, "; allowed is 0 to ",
                  problem.page_table.present()
                      ? (request.table_end - request.table_begin) * problem.extents.page_size
                      : i64{1} << 62,
                  ", the rows of the request's pages"));
}

[[noreturn]] void refuse_row(const AppendProblem& problem, i64 sequence,
                             const AppendRequest& request, i64 row, const AppendRow& found) {
  const AppendExtents& extents = problem.extents;
  const i64 batch = problem.cu_new.present() ? 0 : sequence;
  const std::string at = sentence("row ", row - request.begin, " of request ", sequence);
  const i64 place = request.length + row - request.begin;
  if (found.faults & kFaultSlots) {
    if (problem.slots.present()) {
      refuse(sentence("slots has ", problem.slots.index(batch, 0, 0, row), " for ", at,
                      "; allowed is 0 to ", extents.pages * extents.page_size - 1,
                      ", or -1 to skip the row"));
    }
    refuse(sentence("page_table has no page for ", at, ", which is key ", place,
                    " of its request; its pages have ",
                    (request.table_end - request.table_begin) * extents.page_size, " rows"));
  }
  if (found.faults & kFaultPages) {
    const i64 column = request.table_begin + place / extents.page_size;
    const i64 entry_of = problem.page_indptr.present() ? 0 : sequence;
    refuse(sentence("page_table has page ", problem.page_table.index(entry_of, 0, 0, column),
                    " for ", at, "; allowed is 0 to ", extents.pages - 1));
  }
  const bool has_positions = problem.positions.present();
  refuse(sentence(at, " stands at position ",
                  has_positions ? problem.positions.index(batch, 0, 0, row) : place, " by ",
                  has_positions                  ? "positions"
                  : problem.kv_lengths.present() ? "kv_lengths"
                                                 : "its number",
                  "; cos and sin have positions 0 to ", extents.positions - 1));
}

}  // namespace

i64 find_sequence(const AppendProblem& problem, i64 row) {
  i64 low = 0;
  i64 high = problem.extents.sequences - 1;
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (problem.cu_new.index(0, 0, 0, middle) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

void check_contents(const AppendProblem& problem) {
  for (i64 sequence = 0; sequence < problem.extents.sequences; ++sequence) {
    const AppendRequest request = request_of(problem, sequence);
    if (request.faults != 0) refuse_request(problem, sequence, request);
    for (i64 row = request.begin; row < request.end; ++row) {
      const AppendRow found = row_of(problem, request, sequence, row);
      if (found.faults != 0) refuse_row(problem, sequence, request, row, found);
    }
  }
}

}  // namespace fulmen
