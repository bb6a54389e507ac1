// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What fulmen.h says of each array: the table fulmen/arrays.def with the meaning of its words, and
// the part of validation that looks at arrays alone, one by one, then at where they lie. Each check
// throws Error with one sentence. Called by validate.cpp in the order of this file.
#pragma once

#include <string>

#include "core/error.h"
#include "core/problem.h"
#include "core/tensor.h"

namespace fulmen {

enum class Axis : u8 {
  kBatch,  // 1 when q is packed
  kHead,
  kKvHead,
  kQRow,
  kPool,     // of k, v: the batch, 1 when they are packed; pages where there is a page table
  kPoolRow,  // their rows, of a page where there is a page table
  kKvBatch,  // of other arrays of keys: the batch, 1 when k is packed
  kKvRow,    // keys
  kDimQk,
  kDimV,
  kPair,      // 2: row max and row sum
  kSequence,  // the batch, or the number of packed sequences
  kOffset,    // kSequence + 1
  kMaskQRow,  // q_row; packed: rows of one sequence
  kMaskKvRow,
  kTableEntry,   // of a page table
  kCachePage,    // pages of the pools of an append
  kCacheRow,     // rows of a page
  kNewRow,       // rows of an append
  kPosition,     // rows of cos and sin
  kRotaryPair,   // half of what rotates
  kOne,          // 1: of all dims
  kChannel,      // dim_v of a scale
  kCaptured,     // of an array that an expression reads: any
  kListHead,     // heads of lists of blocks: those of q, of k, or 1
  kListRow,      // blocks of query rows
  kListEntry,    // of a list: any
  kChosenKey,    // of an indexer's choice
  kSegment,      // of rows or keys: any
  kSegmentWord,  // 3: first row, rows, position
  kCount
};

inline constexpr int kNumAxes = static_cast<int>(Axis::kCount);

constexpr const char* name(Axis axis) {
  constexpr const char* kNames[] = {"batch",
                                    "head",
                                    "kv_head",
                                    "q_row",
                                    "batch",
                                    "kv_row",
                                    "batch",
                                    "kv_row",
                                    "dim_qk",
                                    "dim_v",
                                    "pair",
                                    "batch",
                                    "batch + 1",
                                    "q_row",
                                    "kv_row",
                                    "page",
                                    "page",
                                    "row of the page",
                                    "row",
                                    "position",
                                    "rotary_dim / 2",
                                    "all dims",
                                    "dim_v",
                                    "index",
                                    "head or kv_head",
                                    "q_block",
                                    "entry",
                                    "topk",
                                    "segment",
                                    "first, rows, position"};
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == kNumAxes);
  return kNames[static_cast<int>(axis)];
}

// T is the dtype of q, of o where q is quantised; C is float64 for float64, else float32.
enum class DTypes : u8 {
  kFloatOrQuantised,  // q itself
  kTOrQuantised,      // T, or where T is not float64 an 8-bit type; that of q where q has one
  kOfK,               // that of k
  kTOrFloat32,        // T, float32
  kTOrFloat32OrC,     // T, float32, C
  kFloat32OrC,        // float32, C
  kC,                 // C
  kBool,
  kIndex,  // int32, int64
  kInt64,
  kFloat32,
  kAnyNumber,  // what an expression may read: floats, integers, bool
  kSameAs,     // that of the array that it is the gradient of
};

// What the schema calls them.
constexpr const char* name(DTypes dtypes) {
  constexpr const char* kNames[] = {"float_or_quantised",
                                    "q_or_quantised",
                                    "k",
                                    "q_or_float32",
                                    "q_or_float32_or_sum",
                                    "float32_or_sum",
                                    "sum",
                                    "bool",
                                    "index",
                                    "int64",
                                    "float32",
                                    "number",
                                    "parameter"};
  return kNames[static_cast<int>(dtypes)];
}

// The calls that take arrays. kDenseMask is not an Operation: it plans nothing.
enum class Call { kForward, kBackward, kDenseMask };

constexpr Call call_of(Operation operation) {
  return operation == Operation::kForward ? Call::kForward : Call::kBackward;
}

enum class Use : u8 {
  kIgnored,
  kShape,  // extents and dtype are read, the pointer is not
  kInput,
  kOutput,
};

// Axes in the caller's order, and which axis of the normal form each is. Leading ones may be left
// out, down to min_rank; in num_broadcast leading ones an extent of 1 stands for any.
struct AxisList {
  int count;
  int min_rank;
  int num_broadcast;
  Axis axes[kMaxRank];
  int normal_axis[kMaxRank];
};

// What each Call does with an array.
struct Uses {
  Use by_call[3];
};

struct ArrayRule {
  Array array;
  AxisList list;
  DTypes dtypes;
  Uses uses;
  Array param;  // what it is the gradient of; itself for all else
};

namespace rules {
using enum Axis;

inline constexpr AxisList kQAxes{4, 2, 0, {kBatch, kHead, kQRow, kDimQk}, {0, 1, 2, 3}};
inline constexpr AxisList kKAxes{4, 2, 0, {kPool, kKvHead, kPoolRow, kDimQk}, {0, 1, 2, 3}};
inline constexpr AxisList kVAxes{4, 2, 0, {kPool, kKvHead, kPoolRow, kDimV}, {0, 1, 2, 3}};
inline constexpr AxisList kOAxes{4, 2, 0, {kBatch, kHead, kQRow, kDimV}, {0, 1, 2, 3}};
inline constexpr AxisList kLseAxes{3, 1, 0, {kBatch, kHead, kQRow}, {0, 1, 2}};
inline constexpr AxisList kStatsAxes{4, 2, 0, {kBatch, kHead, kQRow, kPair}, {0, 1, 2, 3}};
inline constexpr AxisList kScoreAxes{
    4, 1, 4, {kSequence, kHead, kMaskQRow, kMaskKvRow}, {0, 1, 2, 3}};
inline constexpr AxisList kSlopeAxes{2, 1, 1, {kSequence, kHead}, {0, 1}};
inline constexpr AxisList kSinkAxes{1, 1, 0, {kHead}, {1}};
inline constexpr AxisList kLengthAxes{1, 1, 0, {kSequence}, {3}};
inline constexpr AxisList kSharedAxes{1, 1, 1, {kSequence}, {3}};
inline constexpr AxisList kOffsetAxes{1, 1, 0, {kOffset}, {3}};
inline constexpr AxisList kRngAxes{1, 1, 0, {kPair}, {3}};
inline constexpr AxisList kQIdAxes{2, 1, 1, {kBatch, kQRow}, {0, 3}};
inline constexpr AxisList kKvIdAxes{2, 1, 1, {kKvBatch, kKvRow}, {0, 3}};
inline constexpr AxisList kPageTableAxes{2, 1, 1, {kSequence, kTableEntry}, {0, 3}};

inline constexpr AxisList kCaptureAxes{
    4, 0, 0, {kCaptured, kCaptured, kCaptured, kCaptured}, {0, 1, 2, 3}};
inline constexpr AxisList kBlockAxes{
    4, 2, 1, {kSequence, kListHead, kListRow, kListEntry}, {0, 1, 2, 3}};
inline constexpr AxisList kSegmentAxes{3, 2, 1, {kSequence, kSegment, kSegmentWord}, {0, 2, 3}};
inline constexpr AxisList kQScaleAxes{4, 1, 3, {kBatch, kHead, kQRow, kOne}, {0, 1, 2, 3}};
inline constexpr AxisList kScaleAxes{4, 1, 3, {kPool, kKvHead, kPoolRow, kOne}, {0, 1, 2, 3}};
inline constexpr AxisList kVScaleAxes{4, 1, 4, {kPool, kKvHead, kPoolRow, kChannel}, {0, 1, 2, 3}};

inline constexpr Uses kExtents{{Use::kInput, Use::kInput, Use::kShape}};
inline constexpr Uses kMasks{{Use::kInput, Use::kInput, Use::kInput}};
inline constexpr Uses kInputs{{Use::kInput, Use::kInput, Use::kIgnored}};
inline constexpr Uses kResults{{Use::kOutput, Use::kInput, Use::kIgnored}};
inline constexpr Uses kUpstream{{Use::kIgnored, Use::kInput, Use::kIgnored}};
inline constexpr Uses kGradients{{Use::kIgnored, Use::kOutput, Use::kIgnored}};

inline constexpr ArrayRule kTable[] = {
#define FULMEN_ARRAY(array, member, word, axes, dtypes, use, run, param) \
  {Array::array, axes, DTypes::dtypes, use, Array::param},
#include "fulmen/arrays.def"
};
static_assert(sizeof(kTable) / sizeof(kTable[0]) == kNumArrays);
}  // namespace rules

constexpr const ArrayRule& rule_of(Array array) { return rules::kTable[static_cast<int>(array)]; }

constexpr Use use_of(const ArrayRule& rule, Call call) {
  return rule.uses.by_call[static_cast<int>(call)];
}

// Calls action(rule, tensor) for each present array that the call looks at.
template <class Action>
void for_each_used(const Arrays& arrays, Call call, const Action& action) {
  for (const ArrayRule& rule : rules::kTable) {
    const Tensor& tensor = arrays[rule.array];
    if (tensor.present() && use_of(rule, call) != Use::kIgnored) action(rule, tensor);
  }
}

// Whether the axes end with (head, row, dim), which layouts of bindings exchange.
constexpr bool has_head_and_row(const AxisList& list) {
  const Axis last = list.axes[list.count - 1];
  return last == Axis::kDimQk || last == Axis::kDimV || last == Axis::kOne ||
         last == Axis::kChannel;
}

// How many axes of a rule the caller may name: a packed array has no batch axis.
constexpr int max_rank(const AxisList& list, Packed packed) {
  const Axis first = list.axes[0];
  const bool of_keys = first == Axis::kPool || first == Axis::kKvBatch;
  const bool has_none = first == Axis::kBatch ? packed.q : of_keys && packed.kv;
  return list.count - (has_none ? 1 : 0);
}

// ---- One array ---------------------------------------------------------------------------------

// Whether checks may look at pointers (a call) or must not (a plan, made before arrays exist).
enum class Pointers { kChecked, kUnknown };

inline constexpr i64 kMaxExtent = 2147483647;  // of batch, heads and rows

// The extent of each axis; kAnyExtent where only the contents of the offsets decide.
inline constexpr i64 kAnyExtent = -1;

struct Sizes {
  i64 extent[kNumAxes];
  bool paged;  // k and v are pools of pages

  i64& operator[](Axis axis) { return extent[static_cast<int>(axis)]; }
  i64 operator[](Axis axis) const { return extent[static_cast<int>(axis)]; }
};

Sizes sizes_of(const Problem& problem);

std::string shape_text(const Tensor& tensor);  // "(2, 8, 5, 64)"

// Below, subject is what sentences call the array.

// Rank, extents, strides; the pointer where `pointers` says so.
void check_layout(const Tensor& tensor, const char* subject, const AxisList& list, Packed packed,
                  Pointers pointers);

// That no address of it leaves 64-bit arithmetic.
void check_span(const Tensor& tensor, const char* subject);

// Both, of every array that is present, also of those that the call ignores: no later code meets a
// rank that is none later. Pointers are looked at where the call reads or writes.
void check_layouts(const Arrays& arrays, Call call, Packed packed, Pointers pointers);

// T, above: of o where q is quantised.
DType computed_dtype(const Arrays& arrays);

// Beside the other arrays of the call, whose dtypes its own depends on.
void check_dtype(const ArrayRule& rule, const Arrays& arrays);

// Four axes, those of problem.h. Axes of extent 1 get stride 0, but dim axes stride 1, so
// that a single column counts as contiguous. Extents stay as given.
Tensor normal_form(const Tensor& given, const AxisList& list);

// The extents of a tensor in normal form against those of the problem.
void check_shape(const Tensor& given, const Tensor& normal, const char* subject,
                 const AxisList& list, const Sizes& sizes);

// Gives broadcast axes of an input their full extent (their stride is 0 already).
void broadcast(Tensor& normal, const AxisList& list, const Problem& problem);

// The sizes of a cache of records, whose last axis is the bytes of a row; and that they lie as they
// must. dims: how many numbers a row has, by the array `rows`.
Sizes with_records(Sizes sizes, i64 dims, const char* rows, const char* cache);
void check_records(const Tensor& cache, const char* subject, i64 dims);

// Scales where numbers of 8 bits are, and each of these in calls that take them.
void check_quantised(const Arrays& arrays, Call call);
void check_channel_scales(const Problem& problem);

// ---- Where arrays lie --------------------------------------------------------------------------

// That no two elements of an output are one.
void check_outputs_nest(const Problem& problem, Call call);

// That no output overlaps another array. Fills pointer_alignment, and pointers of empty arrays that
// are null.
void check_pointers(Problem& problem, Call call);

// That no array of the call shares a byte with the first `bytes` of its workspace.
void check_workspace(const Problem& problem, Call call, void* workspace, i64 bytes);

// Bytes from the first to the last byte of a tensor; 0 when it has no elements.
i64 span_bytes(const Tensor& tensor);

// True when some element of `a` shares a byte with some element of `b`; also true when that could
// not be decided within a bounded search.
bool may_overlap(const Tensor& a, const Tensor& b);

// Whether they are one array: of equal dtype and strides, in the same place.
bool is_same(const Tensor& a, const Tensor& b);

// True when two different indices of `tensor` are the same element; likewise when undecided.
bool may_overlap_itself(const Tensor& tensor);

}  // namespace fulmen
