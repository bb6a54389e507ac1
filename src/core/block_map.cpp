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

// A boolean mask, and what a bias of -inf hides, are known pair by pair only.
BlockKind kind_by_matrices(const Problem& problem) {
  return problem.has(Array::kMask) || problem.has(Array::kBias) ? BlockKind::kPartial
                                                                : BlockKind::kFull;
}

// Of keys, the blocks that have one of `some`, and those of them that lie in `all`.
SeenKeys seen_blocks(const SeenKeys& seen, i64 kv_len, i64 size) {
  if (seen.some.size() <= 0) return {};
  const Interval some{seen.some.begin / size, ceil_div(seen.some.end, size)};
  const i64 end = seen.all.end == kv_len ? some.end : seen.all.end / size;
  const i64 begin = clamp(ceil_div(seen.all.begin, size), some.begin, some.end);
  return {some, {begin, clamp(end, begin, some.end)}};
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

// Ends of the ids of rows or keys.
struct Ids {
  i64 least, most;
};
Ids either(const Ids& a, const Ids& b) { return {min(a.least, b.least), max(a.most, b.most)}; }

BlockKind kind_of_ids(const Ids& q, const Ids& kv) {
  if (q.most < kv.least || kv.most < q.least) return BlockKind::kEmpty;
  const bool are_one = q.least == q.most && kv.least == kv.most;
  return are_one ? BlockKind::kFull : BlockKind::kPartial;
}

constexpr i64 kFan = 8;  // boxes along each side of one of the next level

// What is known of the rows, or of the keys, of boxes: of each `width` values, one box behind the
// other. The first level are the blocks, the last is all of them.
template <class Value>
class Levels {
 public:
  Levels(std::vector<Value> of_blocks, size_t width) : width_(width) {
    all_.push_back(std::move(of_blocks));
    while (all_.back().size() > width) all_.push_back(joined(all_.back()));
  }
  // Beyond the last level that is meant.
  const Value* at(int level, i64 box) const {
    const std::vector<Value>& boxes = all_[min(static_cast<size_t>(level), all_.size() - 1)];
    return boxes.data() + static_cast<size_t>(box) * width_;
  }

 private:
  std::vector<Value> joined(const std::vector<Value>& parts) const {
    const size_t fan = kFan * width_;
    std::vector<Value> boxes;
    for (size_t first = 0; first < parts.size(); first += fan) {
      for (size_t value = first; value < first + width_; ++value) {
        Value some = parts[value];
        for (size_t part = value + width_; part < min(first + fan, parts.size()); part += width_) {
          some = either(some, parts[part]);
        }
        boxes.push_back(some);
      }
    }
    return boxes;
  }

  size_t width_;
  std::vector<std::vector<Value>> all_;
};

// The blocks of one head. Positions leave each row of them an interval; what is known of rows and
// keys apart then takes from that.
class HeadMap {
 public:
  HeadMap(const HeadOfSequence& at, BlockSizes sizes, const Tensor& out)
      : at_(at), sizes_(sizes), out_(out) {
    const SequenceShape& shape = at.sequence.shape;
    if (shape.q_len <= 0 || shape.kv_len <= 0) return;
    num_rows_ = ceil_div(shape.q_len, sizes.rows);
    num_keys_ = ceil_div(shape.kv_len, sizes.keys);
  }

  // values: of the steps of an expression.
  void fill(bool exact, Bounds* values) {
    take_positions();
    if (num_rows_ == 0) return;
    if (at_.problem.has_mask_expression()) take_expression(MaskBounds(at_, values));
    if (at_.problem.has(Array::kQIds)) take_ids();
    if (exact || at_.problem.has(Array::kBlocks)) take_lists_and_pairs(exact);
  }

 private:
  Interval rows_of(i64 row) const {
    return clamped(row * sizes_.rows, (row + 1) * sizes_.rows, at_.sequence.shape.q_len);
  }
  Interval keys_of(i64 key) const {
    return clamped(key * sizes_.keys, (key + 1) * sizes_.keys, at_.sequence.shape.kv_len);
  }

  BlockKind kind(i64 row, i64 key) const {
    return static_cast<BlockKind>(load_bytes<u8>(out_.address(at_.index, at_.head, row, key)));
  }
  void set(i64 row, Interval keys, BlockKind kind) const {
    char* const to = out_.address(at_.index, at_.head, row, keys.begin);
    if (out_.strides[3] == 1) {
      std::fill_n(to, keys.size(), static_cast<char>(kind));
    } else {
      for (i64 n = 0; n < keys.size(); ++n) to[n * out_.strides[3]] = static_cast<char>(kind);
    }
  }

  void take_positions() const {
    const i64 kv_len = at_.sequence.shape.kv_len;
    for (i64 row = 0; row < out_.shape[2]; ++row) {
      SeenKeys seen{};
      if (row < num_rows_) {
        seen = seen_blocks(seen_keys(at_.problem, at_.sequence, rows_of(row)), kv_len, sizes_.keys);
      }
      const auto& [some, all] = seen;
      set(row, {0, some.begin}, BlockKind::kEmpty);
      set(row, some, BlockKind::kPartial);
      set(row, all, kind_by_matrices(at_.problem));
      set(row, {some.end, out_.shape[3]}, BlockKind::kEmpty);
    }
  }

  template <class KindOf>
  void divide(const KindOf& kind_of) const {
    int level = 0;
    for (i64 boxes = max(num_rows_, num_keys_); boxes > 1; boxes = ceil_div(boxes, kFan)) ++level;
    divide(kind_of, level, 0, 0);
  }
  // What a step may be over many blocks is what it may be over some of them: kind_of(level, row,
  // key) is asked of a box of kFan^level blocks along each side, which is divided where it is
  // partial.
  template <class KindOf>
  void divide(const KindOf& kind_of, int level, i64 row, i64 key) const {
    i64 below = 1;
    for (int n = 1; n < level; ++n) below *= kFan;
    const BlockKind kind = kind_of(level, row, key);
    if (kind == BlockKind::kEmpty) return hide(row, key, level > 0 ? below * kFan : 1);
    if (kind == BlockKind::kFull) return;
    if (level == 0) return set(row, {key, key + 1}, both(this->kind(row, key), kind));
    for (i64 r = row * kFan; r < (row + 1) * kFan && r * below < num_rows_; ++r) {
      for (i64 k = key * kFan; k < (key + 1) * kFan && k * below < num_keys_; ++k) {
        divide(kind_of, level - 1, r, k);
      }
    }
  }
  void hide(i64 row, i64 key, i64 blocks) const {
    const Interval keys = clamped(key * blocks, (key + 1) * blocks, num_keys_);
    for (i64 r = row * blocks; r < min((row + 1) * blocks, num_rows_); ++r) {
      set(r, keys, BlockKind::kEmpty);
    }
  }

  // The mask of an expression: what depends on rows or on keys alone is found once for each.
  void take_expression(MaskBounds mask) const {
    const expression::Goal& goal = mask.goal();
    mask.begin(rows_of(0), keys_of(0));
    mask.run(goal.constant);
    const auto levels = [&](const std::vector<i32>& steps, i64 count, const auto& begin) {
      std::vector<Bounds> all;
      for (i64 index = 0; index < count && !steps.empty(); ++index) {
        begin(index);
        mask.run(steps);
        for (const i32 step : steps) all.push_back(mask[step]);
      }
      return Levels(std::move(all), steps.size());
    };
    const Levels rows =
        levels(goal.row, num_rows_, [&](i64 row) { mask.begin(rows_of(row), keys_of(0)); });
    const Levels keys =
        levels(goal.column, num_keys_, [&](i64 key) { mask.begin(rows_of(0), keys_of(key)); });
    const auto load = [&](const auto& all, int level, i64 box, const auto& steps) {
      const Bounds* bounds = all.at(level, box);
      for (const i32 step : steps) mask[step] = *bounds++;
    };
    const auto kind_of = [&](int level, i64 row, i64 key) {
      load(rows, level, row, goal.row);
      load(keys, level, key, goal.column);
      mask.run(goal.pair);
      return mask.kind();
    };
    divide(kind_of);
  }

  void take_ids() const {
    const CacheSequence& sequence = at_.sequence;
    const auto levels = [](const Tensor& ids, i64 batch, i64 begin, i64 count, const auto& of) {
      std::vector<Ids> all;
      for (i64 index = 0; index < count; ++index) {
        const Interval own = of(index);
        const Bounds ends =
            expression::elements_bounds(ids, {batch, 0, 0, begin + own.begin}, own.size());
        all.push_back({ends.first, ends.last});
      }
      return Levels(std::move(all), 1);
    };
    const Levels rows = levels(at_.problem.arrays[Array::kQIds], sequence.batch, sequence.q_begin,
                               num_rows_, [this](i64 row) { return rows_of(row); });
    const Levels keys =
        levels(at_.problem.arrays[Array::kKvIds], sequence.kv_batch, sequence.kv_begin, num_keys_,
               [this](i64 key) { return keys_of(key); });
    const auto kind_of = [&](int level, i64 row, i64 key) {
      return kind_of_ids(*rows.at(level, row), *keys.at(level, key));
    };
    divide(kind_of);
  }

  void take_lists_and_pairs(bool exact) const {
    for (i64 row = 0; row < num_rows_; ++row) {
      for (i64 key = 0; key < num_keys_; ++key) {
        BlockKind kind = this->kind(row, key);
        if (kind == BlockKind::kEmpty) continue;
        const Interval rows = rows_of(row), keys = keys_of(key);
        kind = both(kind, kind_by_lists(at_, rows, keys));
        if (exact && kind == BlockKind::kPartial) kind = kind_by_pairs(at_, rows, keys);
        set(row, {key, key + 1}, kind);
      }
    }
  }

  HeadOfSequence at_;
  BlockSizes sizes_;
  const Tensor& out_;
  i64 num_rows_ = 0;  // both, or neither
  i64 num_keys_ = 0;
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
      HeadMap({problem, sequence, index, head}, sizes, out).fill(exact, values.data());
    }
  }
}

}  // namespace fulmen
