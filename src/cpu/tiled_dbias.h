// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a bias, reduced to the bias's own extents: a pass of its own, only where it is
// asked for. A task is a tile of dbias and sums dS over every (sequence, head, row, key) that
// shares it, in a fixed order; it costs two more products (S and dP), and no memory beyond the
// tile.
#pragma once

#include "plan/tiled_workspace.h"

namespace fulmen::cpu {

// Indices into dbias; an axis of extent 1 stands for all there is along it.
struct DBiasTile {
  Interval sequences;
  Interval heads;
  Interval rows;  // of dbias
  Interval columns;
  bool sums_rows;  // over the axis, extent 1
  bool sums_columns;
};

class DBiasTiles {
 public:
  DBiasTiles(const Problem& problem, const TileSizes& sizes);

  i64 size() const;
  DBiasTile at(i64 task) const;

 private:
  const Problem& problem_;
  const TileSizes& sizes_;
  i64 row_blocks_;
  i64 column_blocks_;
};

template <class Real>
void sum_dbias_tile(const Problem& problem, const TileSizes& sizes,
                    const BackwardShared<Real>& shared, const BackwardScratch<Real>& scratch,
                    const DBiasTile& at);

}  // namespace fulmen::cpu
