// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Strips, the leaves of an expression, and reads of arrays. All other steps are kernels.

#include "cpu/expression_tile.h"

#include <algorithm>
#include <limits>
#include <span>

#include "plan/tiled_workspace.h"

namespace fulmen::cpu {

using expression::Goal;
using expression::Op;
using expression::Step;
using expression::Type;
using expression::Variable;

namespace {

// Elements at offsets, each as To.
template <class From, class To, class Convert>
void gather_as(const Tensor& tensor, std::span<const i64> offsets, To* to, const Convert& convert) {
  const char* const data = static_cast<const char*>(tensor.data);
  for (const i64 offset : offsets) {
    *to++ = convert(load_bytes<From>(data + offset * static_cast<i64>(sizeof(From))));
  }
}

template <class Real>
void gather_floats(const Tensor& tensor, std::span<const i64> offsets, Real* to) {
  const auto exact = [](auto x) { return static_cast<Real>(x); };
  const auto widened = [](auto x) { return static_cast<Real>(to_float(x)); };
  switch (tensor.dtype) {
    case DType::kFloat64:
      return gather_as<double>(tensor, offsets, to, exact);
    case DType::kFloat32:
      return gather_as<float>(tensor, offsets, to, exact);
    case DType::kFloat16:
      return gather_as<f16>(tensor, offsets, to, widened);
    default:
      return gather_as<bf16>(tensor, offsets, to, widened);
  }
}

void gather_integers(const Tensor& tensor, std::span<const i64> offsets, i64* to) {
  const auto exact = [](auto x) { return static_cast<i64>(x); };
  tensor.dtype == DType::kInt64 ? gather_as<i64>(tensor, offsets, to, exact)
                                : gather_as<i32>(tensor, offsets, to, exact);
}

void gather_bools(const Tensor& tensor, std::span<const i64> offsets, u8* to) {
  gather_as<u8>(tensor, offsets, to, [](u8 x) { return static_cast<u8>(x != 0); });
}

}  // namespace

template <class Real>
ExpressionTile<Real>::ExpressionTile(const Problem& problem, const CacheSequence& sequence,
                                     i64 index, i64 head, char* slots)
    : problem_(problem),
      program_(*problem.program),
      kernels_(kernels<Real>()),
      sequence_(sequence),
      index_(index),
      head_(head),
      slots_(slots),
      values_(reinterpret_cast<expression::Value*>(slots + static_cast<i64>(program_.steps.size()) *
                                                               kStepBytes)) {
  for (size_t step = 0; step < program_.steps.size(); ++step) {
    const Step& one = program_.steps[step];
    const bool is_s = one.op == Op::kVariable && static_cast<Variable>(one.index) == Variable::kS;
    if (is_s) s_ = static_cast<i32>(step);
  }
}

// Scalars of the head, computed in float64, in all lanes.
template <class Real>
void ExpressionTile<Real>::run_constant(const std::vector<i32>& list) {
  const expression::Operands operands =
      expression::operands_of(problem_, sequence_, index_, head_, 0, 0);
  for (const i32 step : list) {
    const Step& one = program_.step(step);
    values_[step] = evaluate(one, values_, operands);
    const expression::Value value = values_[step];
    if (one.type == Type::kFloat) {
      std::fill_n(lanes_of<Real>(step), kStepLanes, static_cast<Real>(value.real));
    } else if (one.type == Type::kInt) {
      std::fill_n(lanes_of<i64>(step), kStepLanes, value.integer);
    } else {
      std::fill_n(lanes_of<u8>(step), kStepLanes, static_cast<u8>(value.integer));
    }
  }
}

template <class Real>
void ExpressionTile<Real>::fill_variable(i32 step, const Strip& strip) {
  const auto variable = static_cast<Variable>(program_.step(step).index);
  if (variable == Variable::kS) return;
  const bool is_row = variable != Variable::kJ && variable != Variable::kKvPosition;
  const bool is_along = is_row == (strip.lanes == Lanes::kRows);
  i64* const to = lanes_of<i64>(step);
  const auto value_at = [&](i64 index) {
    switch (variable) {
      case Variable::kP:
        return problem_.position(sequence_, index);
      case Variable::kQPosition:
        return problem_.q_position(index_, index);
      case Variable::kKvPosition:
        return problem_.kv_position(index_, index);
      default:
        return index;
    }
  };
  const i64 line = strip.line(), count = strip.count();
  if (!is_along) {
    for (i64 n = 0; n < strip.across.size(); ++n) {
      std::fill_n(to + n * line, line, value_at(strip.across.begin + n));
    }
    return;
  }
  for (i64 lane = 0; lane < line; ++lane) {
    to[lane] = value_at(min(strip.along.begin + lane, strip.along.end - 1));
  }
  for (i64 n = line; n < count; n += line) std::copy_n(to, line, to + n);
}

template <class Real>
void ExpressionTile<Real>::read(i32 step, i64 count) {
  const Step& one = program_.step(step);
  const Tensor& tensor = problem_.arrays[array_read(one.index)];
  alignas(64) i64 all[kStepLanes];
  i64 common = 0;  // of indices that are one for the head
  for (int index = 0; index < one.num_args; ++index) {
    if (program_.step(one.args[index]).on != 0) continue;
    const int axis = kMaxRank - one.num_args + index;
    common += clamp<i64>(values_[one.args[index]].integer, 0, tensor.shape[axis] - 1) *
              tensor.strides[axis];
  }
  std::fill_n(all, count, common);
  for (int index = 0; index < one.num_args; ++index) {
    if (program_.step(one.args[index]).on == 0) continue;
    const int axis = kMaxRank - one.num_args + index;
    kernels_.add_offsets(lanes_of<i64>(one.args[index]), tensor.shape[axis] - 1,
                         tensor.strides[axis], all, count);
  }
  const std::span<const i64> offsets(all, static_cast<size_t>(count));
  if (one.type == Type::kFloat) return gather_floats(tensor, offsets, lanes_of<Real>(step));
  if (one.type == Type::kInt) return gather_integers(tensor, offsets, lanes_of<i64>(step));
  gather_bools(tensor, offsets, lanes_of<u8>(step));
}

template <class Real>
void ExpressionTile<Real>::run(const std::vector<i32>& list, const u8* flow, const Strip& strip) {
  const auto count = static_cast<i64>(list.size());
  const StepSlots slots{slots_, strip.count(), given_, made_,
                        reinterpret_cast<char*>(strip.direct)};
  i64 begin = 0;
  for (i64 index = 0; index <= count; ++index) {
    const bool is_end = index == count;
    if (!is_end && program_.step(list[static_cast<size_t>(index)]).op > Op::kRead) continue;
    if (index > begin) {
      kernels_.run_steps(program_.steps.data(), list.data() + begin,
                         flow == nullptr ? nullptr : flow + begin, index - begin, slots);
    }
    begin = index + 1;
    if (is_end) break;
    const i32 leaf = list[static_cast<size_t>(index)];
    program_.step(leaf).op == Op::kRead ? read(leaf, strip.count()) : fill_variable(leaf, strip);
  }
}

// load(row of the tile, column of the tile, count, first lane) of each line before the steps of a
// strip, store(...) behind. direct: scores of the tile, contiguous and of whole lines.
template <class Real>
template <class Load, class Store>
void ExpressionTile<Real>::for_each_strip(const Goal& goal, Interval rows, Interval keys,
                                          Lanes lanes, const Load& load, const Store& store,
                                          Real* direct) {
  const bool by_rows = lanes == Lanes::kRows;
  const Interval along = by_rows ? rows : keys, across = by_rows ? keys : rows;
  if (along.size() <= 0 || across.size() <= 0) return;
  run_constant(goal.constant);
  for (i64 first = along.begin; first < along.end; first += kStepLanes) {
    Strip strip{lanes,
                {across.begin, across.begin + 1},
                {first, min(first + kStepLanes, along.end)},
                nullptr};
    const i64 lines = min(kStepLanes / strip.line(), across.size());
    const auto each_line = [&](const auto& action) {
      for (i64 n = 0; n < strip.across.size(); ++n) {
        action(strip.across.begin + n - across.begin, first - along.begin, strip.along.size(),
               n * strip.line());
      }
    };
    strip.across.end = across.begin + lines;
    run(by_rows ? goal.row : goal.column, nullptr, strip);
    for (; strip.across.begin < across.end; strip.across.begin += lines) {
      strip.across.end = min(strip.across.begin + lines, across.end);
      if (direct) strip.direct = direct + (strip.across.begin - across.begin) * strip.line();
      run(by_rows ? goal.column : goal.row, nullptr, strip);
      each_line(load);
      run(goal.pair, goal.flow.data(), strip);
      each_line(store);
    }
  }
}

template <class Real>
void ExpressionTile<Real>::hide(Interval rows, Interval keys, Real* addend, i64 stride) {
  const u8* const shows = lanes_of<u8>(program_.mask);
  for_each_strip(
      program_.mask_goal, rows, keys, Lanes::kKeys, [](i64, i64, i64, i64) {},
      [&](i64 row, i64 column, i64 count, i64 first) {
        Real* const to = addend + row * stride + column;
        for (i64 lane = 0; lane < count; ++lane) {
          if (!shows[first + lane]) to[lane] = -std::numeric_limits<Real>::infinity();
        }
      });
}

template <class Real>
void ExpressionTile<Real>::map(Interval rows, Interval keys, Lanes lanes, Real* scores, Real* slope,
                               i64 stride) {
  const Goal& goal = slope ? program_.slope_goal : program_.score_goal;
  const i64 width = (lanes == Lanes::kRows ? rows : keys).size();
  const bool direct = width == stride && width % kStepUnit == 0 && width <= kStepLanes;
  const bool is_last = !goal.pair.empty() && goal.pair.back() == program_.score;
  given_ = direct ? s_ : -1;
  made_ = direct && is_last && program_.step(program_.score).op > Op::kRead ? program_.score : -1;
  for_each_strip(
      goal, rows, keys, lanes,
      [&](i64 row, i64 column, i64 count, i64 first) {
        if (s_ < 0 || given_ >= 0) return;
        Real* const to = lanes_of<Real>(s_) + first;
        std::copy_n(scores + row * stride + column, count, to);
        const i64 beyond = -count & (kStepUnit - 1);
        std::fill_n(to + count, beyond, Real(0));
      },
      [&](i64 row, i64 column, i64 count, i64 first) {
        if (made_ < 0) {
          std::copy_n(lanes_of<Real>(program_.score) + first, count,
                      scores + row * stride + column);
        }
        if (!slope) return;
        const Real* const factor = lanes_of<Real>(program_.slope) + first;
        Real* const to = slope + row * stride + column;
        for (i64 lane = 0; lane < count; ++lane) to[lane] *= factor[lane];
      },
      direct ? scores : nullptr);
  given_ = made_ = -1;
}

template <class Real>
void ExpressionTile<Real>::differentiate(const expression::Derivative& derivative, Interval rows,
                                         Interval keys, const Real* scores, Real* values,
                                         i64* elements, i64 stride) {
  const Step& one = program_.step(derivative.read);
  const Tensor sums = expression::contiguous(problem_.arrays[capture_gradient(one.index)]);
  for_each_strip(
      derivative.goal, rows, keys, Lanes::kKeys,
      [&](i64 row, i64 column, i64 count, i64 first) {
        if (s_ < 0) return;
        std::copy_n(scores + row * stride + column, count, lanes_of<Real>(s_) + first);
      },
      [&](i64 row, i64 column, i64 count, i64 first) {
        const i64 at = row * stride + column;
        std::copy_n(lanes_of<Real>(derivative.value) + first, count, values + at);
        std::fill_n(elements + at, count, i64{0});
        for (int index = 0; index < one.num_args; ++index) {
          const int axis = kMaxRank - one.num_args + index;
          const i64* const given = lanes_of<i64>(one.args[index]) + first;
          for (i64 lane = 0; lane < count; ++lane) {
            elements[at + lane] +=
                clamp<i64>(given[lane], 0, sums.shape[axis] - 1) * sums.strides[axis];
          }
        }
      });
}

template class ExpressionTile<float>;
template class ExpressionTile<double>;

}  // namespace fulmen::cpu
