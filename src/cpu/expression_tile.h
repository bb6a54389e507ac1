// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A user's expression over a tile of pairs of one head: which pairs its mask hides, what its score
// makes of s, and the derivatives. Strips of kStepLanes pairs, along rows or along keys as the tile
// lies; what depends on one of the two alone is computed once along it.
#pragma once

#include "cpu/kernels.h"

namespace fulmen::cpu {

// Which way the neighbours of a tile lie: its lanes are query rows, or keys.
enum class Lanes { kRows, kKeys };

template <class Real>
class ExpressionTile {
 public:
  // slots: step_slots of the program, scratch.
  ExpressionTile(const Problem& problem, const CacheSequence& sequence, i64 index, i64 head,
                 char* slots);

  // addend[i][j] = -inf where the mask hides a pair; lanes are keys.
  void hide(Interval rows, Interval keys, Real* addend, i64 stride);

  // s becomes s', and slope (null: not wanted) is multiplied by d s' / d s.
  void map(Interval rows, Interval keys, Lanes lanes, Real* scores, Real* slope, i64 stride);

  // Of one derivative: its value, and which element of its array a pair reads, contiguous; from s.
  // Lanes are keys.
  void differentiate(const expression::Derivative& derivative, Interval rows, Interval keys,
                     const Real* scores, Real* values, i64* elements, i64 stride);

 private:
  // What changes from strip to strip: lines of lanes, one for each row, or key, across; of a narrow
  // tile several.
  struct Strip {
    Lanes lanes;
    Interval across;
    Interval along;
    Real* direct;  // scores of these lanes, where they need not be copied

    i64 line() const { return ceil_div(along.size(), kStepUnit) * kStepUnit; }  // lanes of one
    i64 count() const { return across.size() * line(); }                        // computed
  };

  template <class Load, class Store>
  void for_each_strip(const expression::Goal& goal, Interval rows, Interval keys, Lanes lanes,
                      const Load& load, const Store& store, Real* direct = nullptr);
  void run_constant(const std::vector<i32>& list);
  // flow: of the pairs' steps, see Goal.
  void run(const std::vector<i32>& list, const u8* flow, const Strip& strip);
  void fill_variable(i32 step, const Strip& strip);
  void read(i32 step, i64 count);
  template <class T>
  T* lanes_of(i32 step) const {
    return reinterpret_cast<T*>(slots_ + step * kStepBytes);
  }

  const Problem& problem_;
  const expression::Program& program_;
  const Kernels<Real>& kernels_;
  const CacheSequence& sequence_;
  i64 index_;
  i64 head_;
  char* slots_;
  expression::Value* values_;  // of constant steps
  i32 s_ = -1;                 // the step that is s
  // Steps whose lanes are the scores themselves; -1: none.
  i32 given_ = -1, made_ = -1;
};

extern template class ExpressionTile<float>;
extern template class ExpressionTile<double>;

}  // namespace fulmen::cpu
