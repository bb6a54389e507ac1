// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One function for each sort of mask, and all of them together.

#include "core/block_map.h"

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

BlockKind kind_by_pairs(const HeadOfSequence& at, Interval rows, Interval keys) {
  bool some = false, all = true;
  for (i64 i = rows.begin; i < rows.end; ++i) {
    for (i64 j = keys.begin; j < keys.end; ++j) {
      const bool is_seen = at.problem.shows(at.sequence, at.index, at.head, i, j);
      some |= is_seen;
      all &= is_seen;
    }
    if (some && !all) return BlockKind::kPartial;
  }
  return some ? BlockKind::kFull : BlockKind::kEmpty;
}

// The blocks of one head, a row of them after the other; what is said of keys alone is kept.
class HeadMap {
 public:
  HeadMap(const HeadOfSequence& at, BlockSizes sizes, bool exact, Bounds* values)
      : at_(at), sizes_(sizes), exact_(exact), mask_(at, values) {
    const Problem& problem = at.problem;
    const Interval rows{0, min<i64>(at.sequence.shape.q_len, 1)};
    for (i64 key = 0; rows.size() > 0 && keys_of(key).size() > 0; ++key) {
      const Interval keys = keys_of(key);
      if (problem.has(Array::kQIds)) {
        ids_.emplace_back(problem.arrays[Array::kKvIds], at.sequence.kv_batch,
                          at.sequence.kv_begin + keys.begin, keys.size());
      }
      if (!problem.has_mask_expression()) continue;
      mask_.begin(rows, keys);
      if (key == 0) mask_.run(mask_.goal().constant);
      mask_.run(mask_.goal().column);
      for (const i32 step : mask_.goal().column) columns_.push_back(mask_[step]);
    }
  }

  void store_row(i64 row, const Tensor& out) {
    const Interval rows =
        clamped(row * sizes_.rows, (row + 1) * sizes_.rows, at_.sequence.shape.q_len);
    start(rows);
    for (i64 key = 0; key < out.shape[3]; ++key) {
      const BlockKind kind = kind_of(rows, key);
      store_bytes(out.address(at_.index, at_.head, row, key), static_cast<u8>(kind));
    }
  }

 private:
  Interval keys_of(i64 key) const {
    return clamped(key * sizes_.keys, (key + 1) * sizes_.keys, at_.sequence.shape.kv_len);
  }

  void start(Interval rows) {
    const Interval keys = keys_of(0);
    if (rows.size() <= 0 || keys.size() <= 0) return;
    seen_ = seen_keys(at_.problem, at_.sequence, rows);
    if (at_.problem.has(Array::kQIds)) {
      q_ids_ = Ids(at_.problem.arrays[Array::kQIds], at_.sequence.batch,
                   at_.sequence.q_begin + rows.begin, rows.size());
    }
    if (!at_.problem.has_mask_expression()) return;
    mask_.begin(rows, keys);
    mask_.run(mask_.goal().row);
  }

  BlockKind kind_of(Interval rows, i64 key) {
    const Interval keys = keys_of(key);
    if (rows.size() <= 0 || keys.size() <= 0) return BlockKind::kEmpty;
    BlockKind kind = both(kind_by_position(seen_, keys), kind_by_matrices(at_.problem));
    if (kind != BlockKind::kEmpty && !ids_.empty()) {
      kind = both(kind, kind_of_ids(q_ids_, ids_[static_cast<size_t>(key)]));
    }
    if (kind != BlockKind::kEmpty) kind = both(kind, kind_by_lists(at_, rows, keys));
    if (kind != BlockKind::kEmpty && at_.problem.has_mask_expression()) {
      kind = both(kind, kind_by_mask(key));
    }
    return exact_ && kind == BlockKind::kPartial ? kind_by_pairs(at_, rows, keys) : kind;
  }

  BlockKind kind_by_mask(i64 key) {
    const std::vector<i32>& steps = mask_.goal().column;
    size_t kept = static_cast<size_t>(key) * steps.size();
    for (const i32 step : steps) mask_[step] = columns_[kept++];
    mask_.run(mask_.goal().pair);
    return mask_.kind();
  }

  HeadOfSequence at_;
  BlockSizes sizes_;
  bool exact_;
  MaskBounds mask_;
  SeenKeys seen_{};
  Ids q_ids_;
  std::vector<Ids> ids_;         // of the blocks of keys
  std::vector<Bounds> columns_;  // likewise: of the steps that depend on the key alone
};

}  // namespace

void block_map(const Problem& problem, BlockSizes sizes, bool exact, const Tensor& kinds) {
  check_lengths(problem);
  check_blocks(problem);
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
