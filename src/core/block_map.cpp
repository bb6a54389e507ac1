// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One function for each sort of mask, and all of them together.

#include "core/block_map.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/arrays.h"
#include "core/box_bounds.h"
#include "core/error.h"
#include "core/validate.h"

namespace fulmen {

SeenKeys seen_keys(const Problem& problem, const CacheSequence& sequence, Interval rows) {
  const bool has_tree = problem.has(Array::kTree);
  const SequenceShape& shape = sequence.shape;
  if (!has_tree && !problem.has(Array::kPositions)) {  // ends never decrease from row to row
    const Interval first = visible_columns(problem.mask, shape, rows.begin);
    const Interval last = visible_columns(problem.mask, shape, rows.end - 1);
    return {{first.begin, last.end}, clamped(last.begin, first.end, last.end)};
  }
  SeenKeys seen{{shape.kv_len, 0}, {0, shape.kv_len}};
  for (i64 i = rows.begin; i < rows.end; ++i) {
    const i64 position = problem.position(sequence, i);
    const Interval row = visible_columns_at(problem.mask, shape.kv_len, position);
    seen.some = {min(seen.some.begin, row.begin), max(seen.some.end, row.end)};
    seen.all = {max(seen.all.begin, row.begin), min(seen.all.end, row.end)};
  }
  if (has_tree) {  // drafted keys stand at positions of their own: pair by pair
    const i64 drafted = max<i64>(first_drafted(shape), 0);
    seen.some = {min(seen.some.begin, drafted), shape.kv_len};
    seen.all.end = min(seen.all.end, drafted);
  }
  seen.some = clamped(seen.some.begin, seen.some.end, shape.kv_len);
  seen.all = clamped(max(seen.all.begin, seen.some.begin), seen.all.end, seen.some.end);
  return seen;
}

BlockKind kind_by_lists(const HeadOfSequence& at, Interval rows, Interval keys) {
  const Problem& problem = at.problem;
  if (!problem.has(Array::kBlocks)) return BlockKind::kFull;
  bool some = false, all = true;
  for (i64 row = rows.begin / problem.block_q; row * problem.block_q < rows.end; ++row) {
    for (i64 key = keys.begin / problem.block_kv; key * problem.block_kv < keys.end; ++key) {
      const bool is_listed = problem.lists_block(at.index, at.head, row, key);
      some |= is_listed;
      all &= is_listed;
    }
  }
  if (!some) return BlockKind::kEmpty;
  return all ? BlockKind::kFull : BlockKind::kPartial;
}

namespace {

using expression::Bounds;

// The mask of an expression over boxes, part by part: what depends on the rows or on the keys alone
// is found once for each of them.
class MaskBounds {
 public:
  MaskBounds(const HeadOfSequence& at, Bounds* values)
      : at_(at), program_(at.problem.program.get()), values_(values) {}

  void begin(Interval rows, Interval keys) {
    operands_ = expression::box_of(at_.problem, at_.sequence, at_.index, at_.head, rows, keys);
  }
  void run(const std::vector<i32>& steps) {
    for (const i32 step : steps) {
      values_[step] = expression::bounds_of(program_->step(step), values_, operands_);
    }
  }
  const expression::Goal& goal() const { return program_->mask_goal; }
  Bounds& operator[](i32 step) { return values_[step]; }

  BlockKind kind() const {
    const Bounds& shows = values_[program_->mask];
    if (shows.last == 0) return BlockKind::kEmpty;
    return shows.first == 1 ? BlockKind::kFull : BlockKind::kPartial;
  }

 private:
  HeadOfSequence at_;
  const expression::Program* program_;  // null without one: not to be run
  Bounds* values_;
  expression::BoxOperands operands_;
};

}  // namespace

BlockKind kind_by_expression(const HeadOfSequence& at, Interval rows, Interval keys,
                             char* scratch) {
  static_assert(sizeof(Bounds) <= expression::kStepBytes);
  if (!at.problem.has_mask_expression()) return BlockKind::kFull;
  MaskBounds mask(at, reinterpret_cast<Bounds*>(scratch));
  mask.begin(rows, keys);
  for (const auto* steps :
       {&mask.goal().constant, &mask.goal().row, &mask.goal().column, &mask.goal().pair}) {
    mask.run(*steps);
  }
  return mask.kind();
}

namespace {

constexpr const char* kKinds = "kinds";
constexpr AxisList kKindAxes{
    4, 4, 0, {Axis::kSequence, Axis::kHead, Axis::kListRow, Axis::kListEntry}, {0, 1, 2, 3}};

Tensor checked_kinds(const Problem& problem, BlockSizes sizes, const Tensor& kinds) {
  for (const i64 size : {sizes.rows, sizes.keys}) {
    if (size > 0) continue;
    throw Error(Status::kArgument, sentence("a block has ", sizes.rows, " rows and ", sizes.keys,
                                            " keys; at least 1 of each is allowed"));
  }
  if (!kinds.present()) {
    throw Error(Status::kArgument, "kinds is missing; it is the int8 array to write");
  }
  check_layout(kinds, kKinds, kKindAxes, {}, Pointers::kChecked);
  if (kinds.dtype != DType::kInt8) {
    throw Error(Status::kDType, sentence("kinds is ", name(kinds.dtype), "; allowed is int8"));
  }
  check_span(kinds, kKinds);
  const Tensor normal = normal_form(kinds, kKindAxes);
  Sizes extents = sizes_of(problem);
  extents[Axis::kListRow] = ceil_div(problem.max_q, sizes.rows);
  extents[Axis::kListEntry] = ceil_div(problem.max_kv, sizes.keys);
  check_shape(kinds, normal, kKinds, kKindAxes, extents);
  if (may_overlap_itself(normal)) {
    throw Error(Status::kArgument, "kinds has strides by which two of its elements are one");
  }
  return normal;
}

BlockKind kind_by_position(const SeenKeys& seen, Interval keys) {
  if (keys.end <= seen.some.begin || seen.some.end <= keys.begin) return BlockKind::kEmpty;
  const bool all = seen.all.begin <= keys.begin && keys.end <= seen.all.end;
  return all ? BlockKind::kFull : BlockKind::kPartial;
}

// Ends of the ids of rows or keys [first, first + count).
struct Ids {
  i64 least = 0;
  i64 most = 0;

  Ids() = default;
  Ids(const Tensor& ids, i64 batch, i64 first, i64 count)
      : least(ids.index(batch, 0, 0, first)), most(least) {
    for (i64 row = first + 1; row < first + count; ++row) {
      const i64 id = ids.index(batch, 0, 0, row);
      least = min(least, id);
      most = max(most, id);
    }
  }
};

BlockKind kind_of_ids(const Ids& q, const Ids& kv) {
  if (q.most < kv.least || kv.most < q.least) return BlockKind::kEmpty;
  const bool are_one = q.least == q.most && kv.least == kv.most;
  return are_one ? BlockKind::kFull : BlockKind::kPartial;
}

// A boolean mask, and what a bias of -inf hides, are known pair by pair only.
BlockKind kind_by_matrices(const Problem& problem) {
  return problem.has(Array::kMask) || problem.has(Array::kBias) ? BlockKind::kPartial
                                                                : BlockKind::kFull;
}

// The corners first: those of a box that a mask cuts mostly differ.
BlockKind kind_by_pairs(const HeadOfSequence& at, Interval rows, Interval keys) {
  bool some = false, all = true;
  const auto differ = [&](i64 row_step, i64 key_step) {
    for (i64 i = rows.begin; i < rows.end; i += row_step) {
      for (i64 j = keys.begin; j < keys.end; j += key_step) {
        const bool is_seen = at.problem.shows(at.sequence, at.index, at.head, i, j);
        some |= is_seen;
        all &= is_seen;
      }
      if (some && !all) return true;
    }
    return false;
  };
  if (differ(max<i64>(rows.size() - 1, 1), max<i64>(keys.size() - 1, 1)) || differ(1, 1)) {
    return BlockKind::kPartial;
  }
  return some ? BlockKind::kFull : BlockKind::kEmpty;
}

i64 num_blocks(i64 length, i64 size) { return ceil_div(max<i64>(length, 0), size); }

// The mask of an expression over all blocks of a head. What a step may be over many blocks is what
// it may be over some of them, so that a box of many is asked first, and divided where it is
// partial.
class MaskMap {
 public:
  MaskMap(const HeadOfSequence& at, BlockSizes sizes, Bounds* values)
      : mask_(at, values),
        num_rows_(num_blocks(at.sequence.shape.q_len, sizes.rows)),
        num_keys_(num_blocks(at.sequence.shape.kv_len, sizes.keys)) {
    if (!at.problem.has_mask_expression() || num_rows_ == 0 || num_keys_ == 0) return;
    const SequenceShape& shape = at.sequence.shape;
    const auto block = [](i64 index, i64 size, i64 length) {
      return clamped(index * size, (index + 1) * size, length);
    };
    const Interval rows = block(0, sizes.rows, shape.q_len);
    const Interval keys = block(0, sizes.keys, shape.kv_len);
    mask_.begin(rows, keys);
    mask_.run(mask_.goal().constant);
    row_bounds_ = levels(mask_.goal().row, num_rows_, [&](i64 index) {
      mask_.begin(block(index, sizes.rows, shape.q_len), keys);
    });
    key_bounds_ = levels(mask_.goal().column, num_keys_, [&](i64 index) {
      mask_.begin(rows, block(index, sizes.keys, shape.kv_len));
    });
    kinds_.resize(static_cast<size_t>(num_rows_ * num_keys_));
    divide(static_cast<int>(max(row_bounds_.size(), key_bounds_.size())) - 1, 0, 0);
  }

  BlockKind kind(i64 row, i64 key) const {
    return kinds_.empty() ? BlockKind::kFull : kinds_[static_cast<size_t>(row * num_keys_ + key)];
  }

 private:
  static constexpr i64 kFan = 8;  // boxes along each side of one of the next level
  using Levels = std::vector<std::vector<Bounds>>;  // of each box, one step behind the other

  template <class Begin>
  Levels levels(const std::vector<i32>& steps, i64 count, const Begin& begin) {
    Levels all(1);
    for (i64 index = 0; index < count; ++index) {
      begin(index);
      mask_.run(steps);
      for (const i32 step : steps) all[0].push_back(mask_[step]);
    }
    for (; count > 1; count = ceil_div(count, kFan)) {
      const std::vector<Bounds>& parts = all.back();
      const size_t width = steps.size(), fan = static_cast<size_t>(kFan) * width;
      std::vector<Bounds> boxes;
      for (size_t first = 0; first < parts.size(); first += fan) {
        for (size_t step = first; step < first + width; ++step) {
          Bounds some = parts[step];
          for (size_t part = step + width; part < min(first + fan, parts.size()); part += width) {
            some = expression::either(some, parts[part]);
          }
          boxes.push_back(some);
        }
      }
      all.push_back(std::move(boxes));
    }
    return all;
  }

  // Of a side that has fewer levels the last one is the whole of it.
  static i64 span(int level) {
    i64 blocks = 1;
    for (int n = 0; n < level; ++n) blocks *= kFan;
    return blocks;
  }
  void load(const Levels& all, int level, i64 box, const std::vector<i32>& steps) {
    const std::vector<Bounds>& boxes = all[min(static_cast<size_t>(level), all.size() - 1)];
    const Bounds* bounds = boxes.data() + static_cast<size_t>(box) * steps.size();
    for (const i32 step : steps) mask_[step] = *bounds++;
  }

  // A box of kFan^level blocks along each side.
  void divide(int level, i64 row, i64 key) {
    load(row_bounds_, level, row, mask_.goal().row);
    load(key_bounds_, level, key, mask_.goal().column);
    mask_.run(mask_.goal().pair);
    const BlockKind kind = mask_.kind();
    const i64 blocks = span(level), below = blocks / kFan;
    if (level == 0 || kind != BlockKind::kPartial)
      return fill(row * blocks, key * blocks, blocks, kind);
    for (i64 r = row * kFan; r < (row + 1) * kFan && r * below < num_rows_; ++r) {
      for (i64 k = key * kFan; k < (key + 1) * kFan && k * below < num_keys_; ++k) {
        divide(level - 1, r, k);
      }
    }
  }

  void fill(i64 row, i64 key, i64 blocks, BlockKind kind) {
    for (i64 r = row; r < min(row + blocks, num_rows_); ++r) {
      const auto first = kinds_.begin() + (r * num_keys_ + key);
      std::fill(first, first + min(blocks, num_keys_ - key), kind);
    }
  }

  MaskBounds mask_;
  i64 num_rows_;
  i64 num_keys_;
  Levels row_bounds_;
  Levels key_bounds_;
  std::vector<BlockKind> kinds_;  // (row, key); empty without an expression
};

// The blocks of one head, a row of them after the other; what is said of keys alone is kept.
class HeadMap {
 public:
  HeadMap(const HeadOfSequence& at, BlockSizes sizes, bool exact, Bounds* values)
      : at_(at),
        sizes_(sizes),
        exact_(exact),
        by_matrices_(kind_by_matrices(at.problem)),
        mask_(at, sizes, values) {
    if (!at.problem.has(Array::kQIds) || at.sequence.shape.q_len <= 0) return;
    for (i64 key = 0; keys_of(key).size() > 0; ++key) {
      ids_.emplace_back(at.problem.arrays[Array::kKvIds], at.sequence.kv_batch,
                        at.sequence.kv_begin + keys_of(key).begin, keys_of(key).size());
    }
  }

  void store_row(i64 row, const Tensor& out) {
    const Interval rows =
        clamped(row * sizes_.rows, (row + 1) * sizes_.rows, at_.sequence.shape.q_len);
    const bool has_rows = rows.size() > 0 && at_.sequence.shape.kv_len > 0;
    if (has_rows) start(rows);
    char* to = out.address(at_.index, at_.head, row, 0);
    for (i64 key = 0; key < out.shape[3]; ++key, to += out.strides[3]) {
      store_bytes(to, static_cast<u8>(has_rows ? kind_of(rows, row, key) : BlockKind::kEmpty));
    }
  }

 private:
  Interval keys_of(i64 key) const {
    return clamped(key * sizes_.keys, (key + 1) * sizes_.keys, at_.sequence.shape.kv_len);
  }

  void start(Interval rows) {
    seen_ = seen_keys(at_.problem, at_.sequence, rows);
    if (!ids_.empty()) {
      q_ids_ = Ids(at_.problem.arrays[Array::kQIds], at_.sequence.batch,
                   at_.sequence.q_begin + rows.begin, rows.size());
    }
  }

  BlockKind kind_of(Interval rows, i64 row, i64 key) {
    const Interval keys = keys_of(key);
    if (keys.size() <= 0) return BlockKind::kEmpty;
    BlockKind kind = both(kind_by_position(seen_, keys), by_matrices_);
    if (kind != BlockKind::kEmpty) kind = both(kind, mask_.kind(row, key));
    if (kind != BlockKind::kEmpty && !ids_.empty()) {
      kind = both(kind, kind_of_ids(q_ids_, ids_[static_cast<size_t>(key)]));
    }
    if (kind != BlockKind::kEmpty) kind = both(kind, kind_by_lists(at_, rows, keys));
    return exact_ && kind == BlockKind::kPartial ? kind_by_pairs(at_, rows, keys) : kind;
  }

  HeadOfSequence at_;
  BlockSizes sizes_;
  bool exact_;
  BlockKind by_matrices_;
  MaskMap mask_;
  SeenKeys seen_{};
  Ids q_ids_;
  std::vector<Ids> ids_;  // of the blocks of keys
};

}  // namespace

void block_map(const Problem& problem, BlockSizes sizes, bool exact, const Tensor& kinds) {
  check_lengths(problem);
  check_blocks(problem);
  check_segments(problem);
  const Tensor out = checked_kinds(problem, sizes, kinds);
  std::vector<Bounds> values(problem.program ? problem.program->steps.size() : 0);
  for (i64 index = 0; index < out.shape[0]; ++index) {
    const CacheSequence sequence = problem.sequence(index);
    for (i64 head = 0; head < out.shape[1]; ++head) {
      HeadMap map({problem, sequence, index, head}, sizes, exact, values.data());
      for (i64 row = 0; row < out.shape[2]; ++row) map.store_row(row, out);
    }
  }
}

}  // namespace fulmen
