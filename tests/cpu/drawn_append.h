// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Appends and rotary embeddings drawn from a seed, and what becomes of their arrays: where each row
// goes is drawn first and slots, tables and lengths are made from it, so that nothing here follows
// the code that it tests. Rotations are judged against float64 (long double for float64), copies by
// their bits, and memory that no row goes to by being as it was.
#pragma once

#include <string>
#include <vector>

#include "core/append.h"
#include "random_problem.h"

namespace fulmen::test {

class DrawnAppend {
 public:
  // faulty: some entries are out of range.
  DrawnAppend(unsigned seed, bool has_caches, bool faulty = false);

  AppendProblem given;  // as a caller gives it
  bool has_caches;
  u32 faults = 0;  // bits of Fault that the drawn entries have

  // Empty, or what is wrong with the arrays that a run has written. `after`: `given`, or copies of
  // its arrays.
  std::string wrong_after(const AppendProblem& after) const;
  std::string wrong() const { return wrong_after(given); }

  // Whether nothing was written.
  bool is_untouched() const;

 private:
  struct Row {
    i64 batch = 0;
    i64 row = 0;
    i64 page = -1;
    i64 page_row = 0;
    i64 position = -1;
    bool has_q = false;
  };

  void draw_sizes();
  void draw_requests();
  void draw_slots();
  void draw_tables();
  void draw_rotation();
  void draw_caches();
  void spoil_slots(std::vector<i64>& slots);
  void spoil_positions(std::vector<i64>& positions);
  void drop_request(i64 request, u32 fault);
  void spoil_tables(std::vector<i64>& table, std::vector<i64>& indptr, std::vector<i64>& lengths);
  Tensor array(DType dtype, const std::vector<i64>& shape);
  Tensor new_rows(i64 heads, i64 dim);
  Tensor copy_of(const Tensor& tensor);
  std::string wrong_row(const Row& row, const Tensor& from, const Tensor& to, bool is_k) const;
  std::string wrong_head(const char* from, i64 from_stride, const char* to, i64 to_stride, i64 dim,
                         i64 position) const;

  RandomProblem random_;
  DType dtype_;
  DType index_;
  bool faulty_, in_vectors_ = false, packed_ = false, interleaved_ = false;
  i64 batch_ = 0, rows_ = 0, kv_heads_ = 0, heads_ = 0, dim_ = 0, dim_v_ = 0;
  i64 page_size_ = 1, pages_ = 0, rotary_dim_ = 0, positions_ = 0;
  std::vector<i64> begins_;  // of the requests in k, with the end of the last
  std::vector<i64> lengths_;
  std::vector<Row> drawn_;
  Tensor k_before_, q_before_, v_before_;
};

}  // namespace fulmen::test
