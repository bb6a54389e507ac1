// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Parts of a sequence: what a call that merges its result in place is checked for. Segments: what
// they are checked for, which positions they give, and what options then mean.
// Masks and ALiBi beside segments are steps of a program, like a mask and a score of the caller's,
// over positions in place of rows and keys; so whatever computes such masks computes these.

#include "core/arrays.h"
#include "core/error.h"
#include "core/program.h"
#include "core/validate.h"

namespace fulmen {

void check_accumulate(const Request& request) {
  if (!request.options.accumulate) return;
  const Arrays& arrays = request.arrays;
  for (const Array array : kCacheArrays) {
    if (!arrays[array].present()) continue;
    throw Error(Status::kUnsupported,
                sentence("accumulate is 1 beside ", name(array),
                         "; results are merged in place in calls on whole arrays: merge those of "
                         "caches by fulmen_merge"));
  }
  if (request.operation == Operation::kForward && !arrays[Array::kStats].present()) {
    refuse("stats is missing; with accumulate = 1 it holds the maxima and sums of what o holds");
  }
  const DType sums = accumulator(computed_dtype(arrays));
  bool has_sums = false;
  for (const Array array : {Array::kO, Array::kDQ, Array::kDK, Array::kDV}) {
    if (!is_accumulated(request, array) || !arrays[array].present()) continue;
    has_sums = true;
    const DType dtype = arrays[array].dtype;
    if (dtype == sums) continue;
    throw Error(Status::kDType,
                sentence(name(array), " is ", name(dtype), " with accumulate = 1; allowed is ",
                         name(sums), ", in which parts are summed"));
  }
  if (!has_sums) {
    refuse(
        "accumulate is 1 without dq, dk and dv; to those that are given gradients are added: "
        "leave it 0, since dbias, dsinks and dcapture0 to dcapture7 are written");
  }
}

bool is_accumulated(const Request& request, Array array) {
  if (!request.options.accumulate) return false;
  if (request.operation == Operation::kForward) return array == Array::kO;
  return array == Array::kDQ || array == Array::kDK || array == Array::kDV;
}

Segment Problem::segment(Array array, i64 index, i64 n) const {
  const Tensor& segments = arrays[array];
  return segment_of(n, [&](i64 at, i64 word) { return segments.index(index, 0, at, word); });
}

i64 Problem::num_segments(Array array) const { return has(array) ? arrays[array].shape[2] : 0; }

i64 Problem::q_position(i64 index, i64 i) const {
  const Tensor& segments = arrays[Array::kQSegments];
  return segment_position(i, num_segments(Array::kQSegments),
                          [&](i64 at, i64 word) { return segments.index(index, 0, at, word); });
}

i64 Problem::kv_position(i64 index, i64 j) const {
  const Tensor& segments = arrays[Array::kKvSegments];
  if (!segments.present()) return j;
  return segment_position(j, num_segments(Array::kKvSegments),
                          [&](i64 at, i64 word) { return segments.index(index, 0, at, word); });
}

void check_segment_presence(const Arrays& arrays) {
  const bool of_keys = arrays[Array::kKvSegments].present();
  if (!arrays[Array::kQSegments].present()) {
    if (!of_keys) return;
    refuse(
        "kv_segments is given without q_segments; positions of keys want those of query rows "
        "beside them: pass both");
  }
  for (const ArrayRule& rule : rules::kTable) {
    const bool has_other_positions = is_cache_array(rule.array) || rule.array == Array::kBlocks;
    if (!has_other_positions || !arrays[rule.array].present()) continue;
    throw Error(Status::kUnsupported,
                sentence("q_segments is given beside ", name(rule.array),
                         "; segments are of rows and keys in whole arrays: leave one of them out",
                         rule.array == Array::kBlocks ? ", or say the lists as a mask text" : ""));
  }
}

void check_segments(const Problem& problem) {
  for (const Array array : {Array::kQSegments, Array::kKvSegments}) {
    if (!problem.has(array)) continue;
    const bool is_q = array == Array::kQSegments;
    for (i64 index = 0; index < problem.num_sequences; ++index) {
      const Array offsets = is_q ? Array::kCuQ : Array::kCuKv;
      const Tensor& cu = problem.arrays[offsets];
      const i64 rows = cu.present() ? cu.index(0, 0, 0, index + 1) - cu.index(0, 0, 0, index)
                       : is_q       ? problem.q_rows
                                    : problem.kv_rows;
      for (i64 n = 0; n < problem.num_segments(array); ++n) {
        const Segment segment = problem.segment(array, index, n);
        if (is_bad_segment(segment, rows)) {
          refuse(sentence(name(array), "[", index, ", ", n, "] is (", segment.first, ", ",
                          segment.count, ", ", segment.position,
                          "): first row, rows, position; "
                          "allowed are rows within the ",
                          rows,
                          " of the sequence and positions 0 "
                          "to 2147483647"));
        }
        for (i64 other = 0; other < n; ++other) {
          if (!share_rows(segment, problem.segment(array, index, other))) continue;
          refuse(sentence(name(array), "[", index, "] has segments ", other, " and ", n,
                          " that share a row; each row has one position"));
        }
      }
    }
  }
}

namespace expression {
namespace {

// The interval mask of the options and what no segment has, over positions, as steps.
class PositionMask {
 public:
  explicit PositionMask(Program& program) : builder_(program) {}

  i32 run(const IntervalMask& mask, bool of_keys) {
    const i32 zero = integer(0);
    const i32 row = builder_.variable(Variable::kI), key = builder_.variable(Variable::kJ);
    all_ = compared(Op::kLessEqual, zero, builder_.variable(Variable::kQPosition));
    if (of_keys) require(compared(Op::kLessEqual, zero, builder_.variable(Variable::kKvPosition)));
    if (mask.causal) {
      const i32 ahead = compared(Op::kLessEqual, key, row);
      require(mask.prefix == 0
                  ? ahead
                  : both(Op::kOr, ahead, compared(Op::kLess, key, integer(mask.prefix))));
    }
    const auto distance = [&](i32 a, i32 b) {
      return builder_.add(Op::kSubtract, Type::kInt, {a, b});
    };
    if (mask.window_left != kNoLimit) {
      require(compared(Op::kLessEqual, distance(row, key), integer(mask.window_left)));
    }
    if (mask.window_right != kNoLimit) {
      require(compared(Op::kLessEqual, distance(key, row), integer(mask.window_right)));
    }
    if (mask.chunk > 0) {
      require(compared(Op::kEqual, chunk_of(row, mask.chunk), chunk_of(key, mask.chunk)));
    }
    return all_;
  }

 private:
  i32 integer(i64 value) { return builder_.constant(Type::kInt, value); }
  i32 compared(Op op, i32 a, i32 b) { return builder_.add(op, Type::kBool, {a, b}); }
  i32 both(Op op, i32 a, i32 b) { return builder_.add(op, Type::kBool, {a, b}); }
  void require(i32 condition) { all_ = both(Op::kAnd, all_, condition); }
  i32 chunk_of(i32 position, i64 size) {
    return builder_.add(Op::kFloorDivide, Type::kInt, {position, integer(size)});
  }

  Builder builder_;
  i32 all_ = -1;
};

}  // namespace

i32 position_mask(Program& program, const IntervalMask& mask, bool of_keys) {
  return PositionMask(program).run(mask, of_keys);
}

// s - slope[b, h] * |i - j|
i32 position_alibi(Program& program, DType slopes) {
  Builder builder(program);
  const i32 zero = builder.constant(Type::kInt, 0);
  const i32 at[] = {builder.variable(Variable::kB), builder.variable(Variable::kH), zero, zero};
  const i32 slope = builder.leaf(Op::kRead, type_of(slopes), 0, kAlibiRead, at);
  const i32 away = builder.add(Op::kSubtract, Type::kInt,
                               {builder.variable(Variable::kI), builder.variable(Variable::kJ)});
  const i32 distance = builder.to_float(builder.add(Op::kAbs, Type::kInt, {away}));
  const i32 added = builder.add(Op::kMultiply, Type::kFloat, {slope, distance});
  return builder.add(Op::kSubtract, Type::kFloat, {builder.variable(Variable::kS), added});
}

}  // namespace expression

}  // namespace fulmen
