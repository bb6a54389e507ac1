// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The vector work of the tiled backend, one function per step of the algorithm, as a table that
// each instruction set fills once (src/cpu/isa/). The drivers (tiled_forward.cpp,
// tiled_backward.cpp) hold the algorithm and call through the table; a block of work a call, so a
// call costs nothing. A later instruction set, or a hand-written kernel for one step, is another
// table.
//
// Everything that passes through here is plain data. Matrices are row-major unless said otherwise.
// "Lanes" are the columns that a register tile computes at once: lane counts of buffers are rounded
// up to a multiple of `lanes`, and what lies in the padding is written, never used.
#pragma once

#include "core/program.h"
#include "core/tensor.h"
#include "kernels/attention/score_mod.cuh"

namespace fulmen::cpu {

// Rows of some caller's array. Any dtype, any strides (in elements), any alignment. The values of a
// quantised row are its elements times its scale, a float32; without scales, the elements.
struct Source {
  const void* data;
  DType dtype;
  i64 row_stride;
  i64 dim_stride;
  const char* scales = nullptr;
  i64 scale_stride = 0;
};

struct Destination {
  void* data;
  DType dtype;
  i64 row_stride;
  i64 dim_stride;
};

// Rows in the working type.
template <class Real>
struct View {
  const Real* data;
  i64 stride;
};

// Two neighbours in bf16, the first in the low half.
using Pair = u32;

// The products whose sum is meant, of A + A[i] by B + B[i]: several where numbers are sums.
struct TermOffsets {
  i64 count = 1;
  i64 A[4] = {};
  i64 B[4] = {};
};

// C[i][n] = start + sum over k of A[i][k] B[k][n], k rising, one fused multiply-add each where the
// instruction set has it. B comes in panels of `lanes` columns. Of Pairs, a step of depth is the
// dot product of two.
template <class Real, class Element = Real>
struct Product {
  i64 rows;
  i64 columns;
  i64 depth;
  const Element* A;
  i64 A_row_stride;
  i64 A_depth_stride;
  const Element* B;
  i64 B_depth_stride;
  i64 B_panel_stride;
  Real* C;
  i64 C_row_stride;
  bool accumulates = false;         // start = C, else 0
  const Real* row_scale = nullptr;  // (rows): start = C[i][n] * row_scale[i]
  TermOffsets terms = {};           // of Pairs alone
};

// The keys of a block that each of its query rows sees: [first, first + count), from 0 on.
template <class Real>
struct SeenByRows {
  const Count<Real>* first = nullptr;  // (rows); null: all rows see all keys
  const Count<Real>* count = nullptr;

  bool hides(i64 row, i64 key) const {
    return first && static_cast<Count<Real>>(key) - first[row] >= count[row];
  }
};

// The score of a block of pairs: map(dot) + addend. addend = -inf hides a pair, and so does `seen`.
template <class Real>
struct ScoreTerms {
  ScoreMap<Real> map;
  const Real* addend;  // laid out as the dot products; null: nothing to add
  const Real* keep;    // likewise: dropout's factor; null: 1
  SeenByRows<Real> seen = {};
};

// A line of each of some keys that will be wanted next, asked for meanwhile.
struct LinesAhead {
  const char* first = nullptr;  // null: none
  i64 stride = 0;               // bytes from key to key
};

// One block of forward softmax, a query row per lane.
template <class Real>
struct SoftmaxBlock {
  Real* scores;  // (keys, stride): dot products in, weights exp(s - m) keep out
  i64 stride;
  i64 keys;
  i64 rows;
  ScoreTerms<Real> terms;
  Real* row_max;  // (rows) m and l so far, as in SoftmaxState
  Real* row_sum;
  Real* rescale;  // (rows) out: what the output so far is multiplied by

  LinesAhead ahead = {};  // of as many keys; asked for while weights become Pairs
};

// One block of backward weights, a key per lane.
template <class Real>
struct GradientBlock {
  Real* scores;  // (rows, stride): dot(q, k) in, P keep out
  Real* dP;      // (rows, stride): dot(dO, v) in, dS out; null: only P is wanted
  i64 stride;
  i64 rows;
  i64 keys;
  ScoreTerms<Real> terms;
  bool through_score_mod;       // dS is with respect to scale dot(q, k); else to the modified score
  const Real* row_max;          // (rows) what is subtracted from scores
  const Real* normalizer;       // (rows) what weights are multiplied by
  const Real* delta;            // (rows) rowsum(dO O)
  const Real* lse_term;         // (rows) dlse / row_sum; null: no gradient through lse
  const Real* slope = nullptr;  // (rows, stride): what dS is multiplied by; null: 1
};

// What is kept beside scores that a user's expression goes on from: d s / d (scale dot), 1, or s.
enum class ScoreStart { kSlope, kOne, kScore };

// Those scores.
template <class Real>
struct ScoreBlock {
  Real* scores;  // (rows, stride): dot products in, s out
  Real* addend;  // likewise, or null: as that of ScoreTerms in, 0 or -inf out
  Real* slope;   // likewise, or null: what `starts` says out
  i64 stride;
  i64 rows;
  i64 columns;
  ScoreTerms<Real> terms;  // its map
  ScoreStart starts = ScoreStart::kSlope;
};

using expression::kStepBytes;
using expression::kStepLanes;
using expression::kStepUnit;

// The values of all steps, but of those two whose values lie elsewhere, as floats one behind the
// other from a multiple of 64 bytes on.
struct StepSlots {
  char* data;
  i64 lanes;  // that are computed: a multiple of kStepUnit, up to kStepLanes
  i32 given = -1, made = -1;
  char* elsewhere = nullptr;
};

// All keys of some query rows, a key per lane. Rows of scores have room for a whole number of
// vectors.
template <class Real>
struct FewRowsBlock {
  Real* scores;  // (rows, stride): dot products in, weights exp(s - m) keep out
  i64 stride;
  i64 rows;
  i64 keys;
  ScoreTerms<Real> terms;
  Real* row_max;  // (rows) out
  Real* row_sum;
};

// Rows of k or v wherever each lies; unit stride of dims.
struct KeyList {
  const void* const* rows;
  DType dtype;
  i64 count;
  i64 offset = 0;  // bytes from each of them to what is meant

  // Rows that will be wanted next, asked for meanwhile.
  const void* const* ahead = nullptr;
  i64 num_ahead = 0;  // at most count
  i64 ahead_offset = 0;
};

// A few query rows against many keys, which are read once and where they lie; the number of dims is
// a multiple of lanes. Lane: Real, or Pair where numbers of bf16 are multiplied as they are;
// weights are then Pairs of keys.
template <class Real, class Lane>
struct FewRowsKernels {
  // Q (rows, lanes of dims) as dot takes it; out has room for a power of 2 of rows.
  void (*arrange)(const Lane* Q, i64 Q_stride, i64 rows, i64 lanes, Lane* out);

  // scores[row][key] = dot(Q[row], keys[key]);  keys up to a whole number of vectors are written.
  void (*dot)(const Lane* Q, i64 rows, const KeyList& keys, i64 dims, Real* scores, i64 stride);

  void (*weigh)(const FewRowsBlock<Real>& block);

  // O[row] += sum over keys of weights[row][key] values[key]
  void (*add)(const Lane* weights, i64 stride, i64 rows, const KeyList& values, i64 dims, Real* O,
              i64 O_stride);
};

template <class Real>
struct Kernels {
  const char* isa;
  i64 vector_bytes;
  i64 lanes;

  // out[row][d] = the value, rounded where it has a scale; columns from dims up to a multiple of
  // lanes become 0.
  void (*load_rows)(const Source& source, i64 rows, i64 dims, Real* out, i64 out_stride);

  // The element = rows_in[row][d] * factor[row * factor_stride], rounded once.
  void (*store_rows)(View<Real> in, i64 rows, i64 dims, const Real* factor, i64 factor_stride,
                     const Destination& destination);

  // out[panel * panel_stride + d * depth_stride + lane] = in[panel * lanes + lane][d]; lanes beyond
  // `rows` become 0.
  void (*transpose)(View<Real> in, i64 rows, i64 dims, Real* out, i64 panel_stride,
                    i64 depth_stride);

  void (*multiply)(const Product<Real>& product);

  // Whether in[row][d] holds no inf and no NaN.
  bool (*all_finite)(View<Real> in, i64 rows, i64 dims);

  // Returns whether some rescale is not 1.
  bool (*softmax)(const SoftmaxBlock<Real>& block);

  void (*gradient)(const GradientBlock<Real>& block);

  void (*start_scores)(const ScoreBlock<Real>& block);

  // The values of steps list[0 .. count), none of which is a leaf, from those that they take.
  // flow: as that of a goal, or null.
  void (*run_steps)(const expression::Step* steps, const i32* list, const u8* flow, i64 count,
                    const StepSlots& slots);

  // offsets += index clamped to [0, last], times stride.
  void (*add_offsets)(const i64* index, i64 last, i64 stride, i64* offsets, i64 lanes);

  FewRowsKernels<Real, Real> few_rows;
};

// The steps in which bf16 is multiplied as it is, two products an instruction; or f16 as sums of
// two numbers of bf16, exactly. Such instructions take numbers below the normal ones for 0, and a
// hidden value of inf or NaN would make a sum NaN: they are for blocks of ordinary numbers only, 0
// or from 2^-64 to 2^64 in magnitude. What they lose is then below 2^-126 in a sum of products with
// weights up to 1.
struct PairKernels {
  i64 terms;  // whose sum an element is: 1 of bf16, 2 of f16

  // out[row][term][d / 2] = elements d and d + 1, dims and columns up to a multiple of lanes filled
  // with 0. Returns whether all are ordinary. Terms are out_stride / terms apart.
  bool (*pack_columns)(const Source& source, i64 rows, i64 dims, Pair* out, i64 out_stride);

  // out[row / 2][term][d] = element d of rows `row` and row + 1; likewise.
  bool (*pack_rows)(const Source& source, i64 rows, i64 dims, Pair* out, i64 out_stride);

  void (*transpose)(View<Pair> in, i64 rows, i64 dims, Pair* out, i64 panel_stride,
                    i64 depth_stride);

  void (*multiply)(const Product<float, Pair>& product);

  // As softmax of Kernels, but the weights become Pairs of keys, (keys / 2, terms, stride), over
  // the scores.
  bool (*softmax)(const SoftmaxBlock<float>& block);

  // What follows is of bf16 alone.

  // As gradient of Kernels, but P and dS become Pairs of rows, (rows / 2, stride), over the scores
  // and dP, and dS beside that Pairs of keys, dS_rows (rows, dS_stride).
  void (*gradient)(const GradientBlock<float>& block, Pair* dS_rows, i64 dS_stride) = nullptr;

  FewRowsKernels<float, Pair> few_rows = {};

  // Whether every row of sums is finite, and so large somewhere that what was lost below 2^-126 is
  // beyond its last digit. dims: a multiple of lanes.
  bool (*are_ordinary)(View<float> sums, i64 rows, i64 dims) = nullptr;

  // Whether outputs are to be multiplied as O^T = V^T P^T, in strips of rows: B is then the weights
  // as softmax leaves them, and what is transposed is V, once for all strips.
  bool transposes_outputs = false;

  // C[i][n] *= scale[n]; columns: a whole number of vectors.
  void (*scale_columns)(float* C, i64 C_row_stride, i64 rows, i64 columns,
                        const float* scale) = nullptr;

  // Whether few_rows multiplies so many rows by tiles, kTileKeys keys at a time; null: never.
  bool (*few_rows_by_tiles)(i64 rows, i64 dims) = nullptr;

  // Called by a thread before and after some calls of multiply and few_rows; null: nothing to do.
  void (*enter)() = nullptr;
  void (*leave)() = nullptr;
};

// Around the multiplications of a task.
class PairTask {
 public:
  explicit PairTask(const PairKernels* kernels) : kernels_(kernels) {
    if (kernels_ && kernels_->enter) kernels_->enter();
  }
  ~PairTask() {
    if (kernels_ && kernels_->leave) kernels_->leave();
  }
  PairTask(const PairTask&) = delete;
  PairTask& operator=(const PairTask&) = delete;

 private:
  const PairKernels* kernels_;
};

// Loops that do one thing as fast as the instruction set can, on the calling thread.
struct IsaLoops {
  // Multiply-adds of float32 in registers, and products of bf16, null where there are none. Return
  // the floating-point operations.
  i64 (*multiply_adds)(i64 steps);
  i64 (*pair_products)(i64 steps);

  // Reads `bytes`, a multiple of read_bytes.
  void (*read)(const char* from, i64 bytes);
  i64 read_bytes;
};

// The table in use: chosen once, at the first call, from what the processor has and
// FULMEN_CPU_ISA; backend.cpp. Throws Error when that names what is not there.
template <class Real>
const Kernels<Real>& kernels();

// For elements of a type: bf16, and f16 as sums of two. Null for others, where the instruction set
// has no such instructions, and where they do not pay.
const PairKernels* pair_kernels(DType dtype);
const IsaLoops& isa_loops();

struct IsaTables {
  Kernels<float> float32;  // also for float16 and bfloat16
  Kernels<double> float64;
  IsaLoops loops;
  const PairKernels* pairs = nullptr;
  const PairKernels* split_pairs = nullptr;
  bool (*works)() = nullptr;  // a check of the processor's own results; null: none is needed
};

extern const IsaTables kTablesBaseline;
#if defined(__x86_64__)
extern const IsaTables kTablesAvx2;
extern const IsaTables kTablesAvx512;
extern const IsaTables kTablesAvx512Bf16;
extern const IsaTables kTablesAmx;
#elif defined(__aarch64__)
extern const IsaTables kTablesNeonBf16;
#endif

}  // namespace fulmen::cpu
