// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arrays against their rows of the table, every output against itself and every other array.

#include "core/arrays.h"

namespace fulmen {
namespace {

// Spans stay below 2^62 bytes, so that the difference of two addresses inside them is 64-bit.
constexpr i64 kMaxSpanBytes = i64{1} << 62;

[[noreturn]] void refuse_rank(const Tensor& tensor, const char* subject, const AxisList& list,
                              Packed packed) {
  const int most = max_rank(list, packed);
  const std::string allowed =
      list.min_rank == most ? sentence(most) : sentence(list.min_rank, " to ", most);
  const bool has_batch_axis = most < list.count && tensor.rank == list.count;
  throw Error(Status::kShape,
              sentence(subject, " has rank ", tensor.rank, "; allowed is ", allowed,
                       has_batch_axis ? " for packed sequences: leave the batch axis out, cu_q and "
                                        "cu_kv say which rows belong to which sequence"
                                      : ""));
}

// Strides times extents must not leave 64-bit arithmetic.
bool reaches_too_far(const Tensor& tensor) {
  i64 last = 0;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    i64 reach = 0;
    if (__builtin_mul_overflow(max(tensor.shape[axis] - 1, i64{0}), tensor.strides[axis], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return true;
    }
  }
  return last >= kMaxSpanBytes / size_bytes(tensor.dtype) - 1;
}

const char* allowed_text(DTypes dtypes) {
  switch (dtypes) {
    case DTypes::kFloatOrQuantised:
      return "float64, float32, float16 or bfloat16, or with k and v of the same float8_e4m3fn, "
             "float8_e5m2 or int8";
    case DTypes::kTOrQuantised:
      return "the dtype of q, or (with q of 32 or 16 bits) float8_e4m3fn, float8_e5m2, int8, or "
             "uint8 for records";
    case DTypes::kOfK:
      return "the dtype of k";
    case DTypes::kTOrFloat32:
      return "the dtype of q, or float32; with q of 8 bits float32, float16 or bfloat16";
    case DTypes::kTOrFloat32OrC:
      return "the dtype of q, float32, or (with float64 q) float64";
    case DTypes::kFloat32OrC:
      return "float32, or (with float64 q) float64";
    case DTypes::kC:
      return "float32, or with float64 q float64";
    case DTypes::kBool:
      return "bool (true: visible)";
    case DTypes::kIndex:
      return "int32 or int64";
    case DTypes::kInt64:
      return "int64";
    case DTypes::kFloat32:
      return "float32";
    case DTypes::kAnyNumber:
      return "float64, float32, float16, bfloat16, int32, int64 or bool";
    case DTypes::kSameAs:
      return "the dtype of what it is the gradient of";
  }
  return "";
}

// What the dtypes of a call depend on.
struct Operands {
  DType q;
  DType t;  // T
  DType k;
  DType param;  // what a gradient is the gradient of
};

bool allows(DTypes dtypes, DType dtype, const Operands& operands) {
  const DType operand = operands.t;
  const DType wide = accumulator(operand);
  const bool is_float32 = dtype == DType::kFloat32;
  switch (dtypes) {
    case DTypes::kFloatOrQuantised:
      return is_float(dtype) || (is_quantised(dtype) && !is_record(dtype));
    case DTypes::kTOrQuantised:
      if (is_quantised(operands.q)) return dtype == operands.q;
      return dtype == operand || (is_quantised(dtype) && operand != DType::kFloat64);
    case DTypes::kOfK:
      return dtype == operands.k;
    case DTypes::kTOrFloat32:
      if (is_quantised(operands.q)) return is_float(dtype) && dtype != DType::kFloat64;
      return dtype == operand || is_float32;
    case DTypes::kTOrFloat32OrC:
      return dtype == operand || is_float32 || dtype == wide;
    case DTypes::kFloat32OrC:
      return is_float32 || dtype == wide;
    case DTypes::kC:
      return dtype == wide;
    case DTypes::kBool:
      return dtype == DType::kBool;
    case DTypes::kIndex:
      return is_index(dtype);
    case DTypes::kInt64:
      return dtype == DType::kInt64;
    case DTypes::kFloat32:
      return is_float32;
    case DTypes::kAnyNumber:
      return !is_quantised(dtype);  // nor bytes
    case DTypes::kSameAs:
      return dtype == operands.param;
  }
  return false;
}

// The array whose dtype decides what a rule allows; kCount: none.
Array followed_by(const ArrayRule& rule) {
  switch (rule.dtypes) {
    case DTypes::kFloatOrQuantised:
    case DTypes::kBool:
    case DTypes::kIndex:
    case DTypes::kInt64:
    case DTypes::kFloat32:
    case DTypes::kAnyNumber:
      return Array::kCount;
    case DTypes::kOfK:
      return Array::kK;
    case DTypes::kSameAs:
      return rule.param;
    default:
      return Array::kQ;
  }
}

const char* name_in(const Sizes& sizes, Axis axis) {
  if (sizes.paged && axis == Axis::kPool) return "page";
  return sizes.paged && axis == Axis::kPoolRow ? "row of the page" : name(axis);
}

// "(batch = 2, head = 8, q_row = 5, dim_qk = 64)", from axis `first` on.
std::string axes_text(const AxisList& list, const Sizes& sizes, int first) {
  std::string text = "(";
  for (int axis = first; axis < list.count; ++axis) {
    const i64 extent = sizes[list.axes[axis]];
    text += sentence(axis > first ? ", " : "", name_in(sizes, list.axes[axis]));
    text += extent == kAnyExtent ? " of the longest sequence" : sentence(" = ", extent);
    if (axis < list.num_broadcast && extent != 1) text += " or 1";
  }
  return text + ")";
}

bool is_dim(Axis axis) { return axis == Axis::kDimQk || axis == Axis::kDimV; }

struct AddressRange {
  const Tensor* tensor;
  u64 begin;
  u64 end;
};

AddressRange range_of(const Tensor& tensor) {
  const u64 begin = reinterpret_cast<u64>(tensor.data);
  return {&tensor, begin, begin + static_cast<u64>(span_bytes(tensor))};
}

// Ranges of addresses tell nearly all arrays apart; may_overlap looks closer.
bool share_bytes(const AddressRange& a, const AddressRange& b) {
  return a.begin < b.end && b.begin < a.end && may_overlap(*a.tensor, *b.tensor);
}

void check_overlaps(const Problem& problem, Call call) {
  AddressRange ranges[kNumArrays];
  const ArrayRule* used[kNumArrays];
  int num_ranges = 0;
  for_each_used(problem.arrays, call, [&](const ArrayRule& rule, const Tensor& tensor) {
    used[num_ranges] = &rule;
    ranges[num_ranges++] = range_of(tensor);
  });
  for (int i = 0; i < num_ranges; ++i) {
    const ArrayRule& out = *used[i];
    if (use_of(out, call) != Use::kOutput) continue;
    for (int j = 0; j < num_ranges; ++j) {
      const ArrayRule& other = *used[j];
      const bool was_seen = use_of(other, call) == Use::kOutput && j <= i;
      if (was_seen || !share_bytes(ranges[i], ranges[j])) continue;
      refuse(sentence(name(out.array), " overlaps ", name(other.array),
                      " in memory; an output may share no byte with any other array"));
    }
  }
}

// Whether kernels read its numbers one by one, as those of a sequence or a head: no axis is rows or
// columns of a tile.
constexpr bool is_read_singly(const ArrayRule& rule) {
  const Axis last = rule.list.axes[rule.list.count - 1];
  const bool is_single = last == Axis::kHead || last == Axis::kSequence || last == Axis::kOffset ||
                         last == Axis::kTableEntry || last == Axis::kListEntry ||
                         last == Axis::kSegmentWord || rule.array == Array::kPositions;
  const bool is_captured = last == Axis::kCaptured;
  return is_captured || (rule.param == rule.array && (is_single || rule.dtypes == DTypes::kInt64));
}

// By Array: asked in every call.
struct ReadSingly {
  bool array[kNumArrays];

  constexpr ReadSingly() : array() {
    for (int i = 0; i < kNumArrays; ++i) array[i] = is_read_singly(rules::kTable[i]);
  }
};
constexpr ReadSingly kReadSingly;

// What all pointers are multiples of. Empty arrays are never read, and a slice of lengths makes no
// tile of q slower to copy.
i64 pointer_alignment(const Problem& problem) {
  u64 bits = kMaxPointerAlignment;
  for (int i = 0; i < kNumArrays; ++i) {
    const auto array = static_cast<Array>(i);
    const Tensor& tensor = problem.arrays[array];
    const u64 address = reinterpret_cast<u64>(tensor.data);
    if (address == 0 || tensor.empty()) continue;
    const bool is_aligned = address % static_cast<u64>(size_bytes(tensor.dtype)) == 0;
    if (!is_aligned || !kReadSingly.array[i]) bits |= address;
  }
  return static_cast<i64>(bits & (~bits + 1));
}

}  // namespace

Sizes sizes_of(const Problem& problem) {
  Sizes sizes{};
  sizes.paged = problem.is_paged();
  sizes[Axis::kBatch] = problem.packed.q ? 1 : problem.num_sequences;
  sizes[Axis::kKvBatch] = problem.packed.kv ? 1 : problem.num_sequences;
  sizes[Axis::kPool] = sizes.paged ? problem.num_pages : sizes[Axis::kKvBatch];
  sizes[Axis::kPoolRow] = sizes.paged ? problem.page_rows : problem.kv_rows;
  sizes[Axis::kHead] = problem.heads_q;
  sizes[Axis::kKvHead] = problem.heads_kv;
  sizes[Axis::kQRow] = problem.q_rows;
  sizes[Axis::kKvRow] = sizes.paged ? kAnyExtent : problem.kv_rows;
  sizes[Axis::kDimQk] = problem.dim_qk;
  sizes[Axis::kDimV] = problem.dim_v;
  sizes[Axis::kPair] = 2;
  sizes[Axis::kSequence] = problem.num_sequences;
  sizes[Axis::kOffset] = problem.num_sequences + 1;
  sizes[Axis::kMaskQRow] = problem.packed.q ? kAnyExtent : problem.q_rows;
  sizes[Axis::kMaskKvRow] = problem.packed.kv || sizes.paged ? kAnyExtent : problem.kv_rows;
  sizes[Axis::kTableEntry] = kAnyExtent;
  sizes[Axis::kOne] = 1;
  sizes[Axis::kSegment] = kAnyExtent;
  sizes[Axis::kSegmentWord] = 3;
  sizes[Axis::kChannel] = problem.dim_v;
  sizes[Axis::kCaptured] = kAnyExtent;
  sizes[Axis::kListHead] = sizes[Axis::kListRow] = sizes[Axis::kListEntry] = kAnyExtent;
  return sizes;
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "(";
  for (int axis = 0; axis < tensor.rank; ++axis) {
    text += sentence(axis ? ", " : "", tensor.shape[axis]);
  }
  return text + ")";
}

void check_layout(const Tensor& tensor, const char* subject, const AxisList& list, Packed packed,
                  Pointers pointers) {
  if (tensor.rank < list.min_rank || tensor.rank > max_rank(list, packed)) {
    refuse_rank(tensor, subject, list, packed);
  }
  for (int axis = 0; axis < tensor.rank; ++axis) {
    const i64 extent = tensor.shape[axis];
    if (extent < 0 || extent > kMaxExtent) {
      throw Error(Status::kShape, sentence(subject, " has extent ", extent, " on axis ", axis,
                                           "; allowed is 0 to ", kMaxExtent));
    }
    if (tensor.strides[axis] < 0 && extent > 1) {
      throw Error(Status::kArgument,
                  sentence(subject, " has stride ", tensor.strides[axis], " on axis ", axis,
                           "; strides may be 0 but not negative: pass a copy in rising order"));
    }
  }
  if (pointers == Pointers::kChecked && tensor.data == nullptr && !tensor.empty()) {
    throw Error(Status::kArgument,
                sentence(subject, " has elements, shape ", shape_text(tensor),
                         ", but its data pointer is null: null is legal where an extent is 0"));
  }
}

void check_span(const Tensor& tensor, const char* subject) {
  if (tensor.empty() || !reaches_too_far(tensor)) return;
  throw Error(Status::kShape,
              sentence(subject, " reaches 2^62 bytes or more by its shape ", shape_text(tensor),
                       " and strides: no memory is that large"));
}

void check_layouts(const Arrays& arrays, Call call, Packed packed, Pointers pointers) {
  for (const ArrayRule& rule : rules::kTable) {
    const Tensor& tensor = arrays[rule.array];
    if (!tensor.present()) continue;
    const Use use = use_of(rule, call);
    const bool is_read = use == Use::kInput || use == Use::kOutput;
    check_layout(tensor, name(rule.array), rule.list, packed,
                 is_read ? pointers : Pointers::kUnknown);
    check_span(tensor, name(rule.array));
  }
}

void check_dtype(const ArrayRule& rule, const Arrays& arrays) {
  const Tensor& tensor = arrays[rule.array];
  const Operands operands{arrays[Array::kQ].dtype, computed_dtype(arrays), arrays[Array::kK].dtype,
                          arrays[rule.param].dtype};
  if (allows(rule.dtypes, tensor.dtype, operands)) return;
  const Array follows = followed_by(rule);
  const std::string where = follows == Array::kCount ? ""
                                                     : sentence(" where ", name(follows), " is ",
                                                                name(arrays[follows].dtype));
  // NumPy's default is float64.
  const bool is_wide =
      (follows == Array::kQ || follows == Array::kK) && tensor.dtype == DType::kFloat64;
  const bool float32_will_do = is_wide && allows(rule.dtypes, DType::kFloat32, operands);
  throw Error(Status::kDType, sentence(name(rule.array), " is ", name(tensor.dtype), where,
                                       "; allowed is ", allowed_text(rule.dtypes),
                                       float32_will_do ? ": convert it to float32" : ""));
}

Tensor normal_form(const Tensor& given, const AxisList& list) {
  Tensor normal{given.data, given.dtype, kMaxRank, {1, 1, 1, 1}, {0, 0, 0, 0}};
  const int missing = list.count - given.rank;
  // Of an empty array any strides will do: they lead to no element, but sums of them must fit.
  const bool any_strides = given.empty() && reaches_too_far(given);
  for (int axis = 0; axis < given.rank; ++axis) {
    const int normal_axis = list.normal_axis[missing + axis];
    normal.shape[normal_axis] = given.shape[axis];
    normal.strides[normal_axis] = given.shape[axis] > 1 && !any_strides ? given.strides[axis]
                                  : is_dim(list.axes[missing + axis])   ? 1
                                                                        : 0;
  }
  return normal;
}

void check_shape(const Tensor& given, const Tensor& normal, const char* subject,
                 const AxisList& list, const Sizes& sizes) {
  for (int axis = 0; axis < list.count; ++axis) {
    const i64 needed = sizes[list.axes[axis]];
    const i64 extent = normal.shape[list.normal_axis[axis]];
    if (extent == needed || needed == kAnyExtent) continue;
    if (extent == 1 && axis < list.num_broadcast) continue;
    const int first = min(axis, list.count - given.rank);  // leading axes may be left out
    throw Error(Status::kShape, sentence(subject, " has shape ", shape_text(given), " where ",
                                         axes_text(list, sizes, first), " is needed: ",
                                         name_in(sizes, list.axes[axis]), " differs"));
  }
}

void broadcast(Tensor& normal, const AxisList& list, const Problem& problem) {
  if (list.num_broadcast == 0) return;
  const Sizes sizes = sizes_of(problem);
  for (int axis = 0; axis < list.num_broadcast; ++axis) {
    i64& extent = normal.shape[list.normal_axis[axis]];
    if (extent != 1) continue;
    const i64 full = sizes[list.axes[axis]];
    extent = full != kAnyExtent                   ? full
             : list.axes[axis] == Axis::kMaskQRow ? problem.max_q
                                                  : problem.max_kv;
  }
}

void check_outputs_nest(const Problem& problem, Call call) {
  for_each_used(problem.arrays, call, [&](const ArrayRule& rule, const Tensor& tensor) {
    if (use_of(rule, call) == Use::kOutput && may_overlap_itself(tensor)) {
      refuse(sentence(name(rule.array),
                      " has strides by which two of its elements are one; an "
                      "output needs a place of its own for each element"));
    }
  });
}

void check_pointers(Problem& problem, Call call) {
  alignas(kMaxPointerAlignment) static char nothing[1];  // an offset may be added to its address
  for (Tensor& tensor : problem.arrays.tensors) {
    if (tensor.present() && tensor.data == nullptr) tensor.data = nothing;
  }
  check_overlaps(problem, call);
  problem.pointer_alignment = pointer_alignment(problem);
}

void check_workspace(const Problem& problem, Call call, void* workspace, i64 bytes) {
  const Tensor memory{workspace, DType::kBool, 1, {bytes}, {1}};
  const AddressRange own = range_of(memory);
  for_each_used(problem.arrays, call, [&](const ArrayRule& rule, const Tensor& tensor) {
    if (!share_bytes(own, range_of(tensor))) return;
    refuse(sentence("workspace, ", bytes, " bytes, overlaps ", name(rule.array),
                    " in memory; a run needs bytes of its own there, which no array shares"));
  });
}

}  // namespace fulmen
