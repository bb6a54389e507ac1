// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Steps of a user's expression over up to kStepLanes pairs at once: each is one loop over arrays,
// which the compiler makes vectors of. What they mean is core/program_values.cpp's word.
#pragma once

#include "cpu/isa/exponential.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

using expression::Op;
using expression::Step;
using expression::Type;

// The values of a step; nothing else lies there while it has this type.
template <class T>
T* lanes_of(const StepSlots& slots, i32 step) {
  const bool is_elsewhere = step == slots.given || step == slots.made;
  char* const at = is_elsewhere ? slots.elsewhere : slots.data + step * kStepBytes;
  return static_cast<T*>(__builtin_assume_aligned(at, 64));
}

// call(lane) for each, in loops of a known length. Lanes do not depend on each other: a result lies
// where an operand does, or nowhere near.
template <class Call>
[[gnu::always_inline]] inline void each_lane(i64 lanes, const Call& call) {
  for (i64 first = 0; first < lanes; first += kStepUnit) {
#if !defined(__clang__)
#pragma GCC ivdep
#endif
    for (i64 lane = first; lane < first + kStepUnit; ++lane) call(lane);
  }
}

template <class Result, class T, class Function>
[[gnu::always_inline]] inline void each(const StepSlots& slots, i32 out, const Step& step,
                                        const Function& function) {
  Result* const to = lanes_of<Result>(slots, out);
  const T* const a = lanes_of<T>(slots, step.args[0]);
  const T* const b = lanes_of<T>(slots, step.args[step.num_args > 1 ? 1 : 0]);
  each_lane(slots.lanes, [=](i64 lane) { to[lane] = function(a[lane], b[lane]); });
}

template <class T>
[[gnu::always_inline]] inline void select_lanes(const StepSlots& slots, i32 out, const Step& step) {
  T* const to = lanes_of<T>(slots, out);
  const u8* const condition = lanes_of<u8>(slots, step.args[0]);
  const T* const a = lanes_of<T>(slots, step.args[1]);
  const T* const b = lanes_of<T>(slots, step.args[2]);
  each_lane(slots.lanes, [=](i64 lane) { to[lane] = condition[lane] ? a[lane] : b[lane]; });
}

template <class T>
[[gnu::always_inline]] inline void clamp_lanes(const StepSlots& slots, i32 out, const Step& step) {
  T* const to = lanes_of<T>(slots, out);
  const T* const x = lanes_of<T>(slots, step.args[0]);
  const T* const low = lanes_of<T>(slots, step.args[1]);
  const T* const high = lanes_of<T>(slots, step.args[2]);
  each_lane(slots.lanes, [=](i64 lane) {
    const T raised = x[lane] < low[lane] ? low[lane] : x[lane];
    to[lane] = high[lane] < x[lane] && !(x[lane] < low[lane]) ? high[lane] : raised;
  });
}

template <class T>
void compare_lanes(const StepSlots& slots, i32 out, const Step& step) {
  switch (step.op) {
    case Op::kLess:
      return each<u8, T>(slots, out, step, [](T a, T b) { return static_cast<u8>(a < b); });
    case Op::kLessEqual:
      return each<u8, T>(slots, out, step, [](T a, T b) { return static_cast<u8>(a <= b); });
    case Op::kEqual:
      return each<u8, T>(slots, out, step, [](T a, T b) { return static_cast<u8>(a == b); });
    default:
      return each<u8, T>(slots, out, step, [](T a, T b) { return static_cast<u8>(a != b); });
  }
}

inline void logical_lanes(const StepSlots& slots, i32 out, const Step& step) {
  switch (step.op) {
    case Op::kAnd:
      return each<u8, u8>(slots, out, step, [](u8 a, u8 b) { return static_cast<u8>(a & b); });
    case Op::kOr:
      return each<u8, u8>(slots, out, step, [](u8 a, u8 b) { return static_cast<u8>(a | b); });
    case Op::kNot:
      return each<u8, u8>(slots, out, step, [](u8 a, u8) { return static_cast<u8>(a ^ 1); });
    case Op::kSelect:
      return select_lanes<u8>(slots, out, step);
    default:
      return compare_lanes<u8>(slots, out, step);
  }
}

constexpr i64 step_quotient(i64 a, i64 b) {
  if (b == 0) return 0;
  if (b == -1) return static_cast<i64>(0 - static_cast<u64>(a));
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

constexpr i64 step_remainder(i64 a, i64 b) {
  const u64 whole = static_cast<u64>(step_quotient(a, b)) * static_cast<u64>(b);
  return b == 0 ? 0 : static_cast<i64>(static_cast<u64>(a) - whole);
}

// Sums and products of 64 bits wrap.
void integer_lanes(const StepSlots& slots, i32 out, const Step& step) {
  switch (step.op) {
    case Op::kAdd:
      return each<u64, u64>(slots, out, step, [](u64 a, u64 b) { return a + b; });
    case Op::kSubtract:
      return each<u64, u64>(slots, out, step, [](u64 a, u64 b) { return a - b; });
    case Op::kMultiply:
      return each<u64, u64>(slots, out, step, [](u64 a, u64 b) { return a * b; });
    case Op::kFloorDivide:
      return each<i64, i64>(slots, out, step, [](i64 a, i64 b) { return step_quotient(a, b); });
    case Op::kModulo:
      return each<i64, i64>(slots, out, step, [](i64 a, i64 b) { return step_remainder(a, b); });
    case Op::kNegate:
      return each<u64, u64>(slots, out, step, [](u64 a, u64) { return 0 - a; });
    case Op::kMin:
      return each<i64, i64>(slots, out, step, [](i64 a, i64 b) { return b < a ? b : a; });
    case Op::kMax:
      return each<i64, i64>(slots, out, step, [](i64 a, i64 b) { return a < b ? b : a; });
    case Op::kAbs:
      return each<i64, i64>(slots, out, step, [](i64 a, i64) {
        return a < 0 ? static_cast<i64>(0 - static_cast<u64>(a)) : a;
      });
    case Op::kClamp:
      return clamp_lanes<i64>(slots, out, step);
    case Op::kSelect:
      return select_lanes<i64>(slots, out, step);
    default:
      return;
  }
}

// Of exp, tanh: a vector at a time. Beyond what exponential() takes, the standard library's.
template <class Real>
void exponential_lanes(const StepSlots& slots, i32 out, const Step& step) {
  constexpr Real kMost = 43;
  const Real* const a = lanes_of<Real>(slots, step.args[0]);
  Real* const to = lanes_of<Real>(slots, out);
  for (i64 lane = 0; lane < slots.lanes; lane += kWidth<Real>) {
    const Vector<Real> x = load(a + lane);
    store(to + lane, exponential<Real>(x > kMost ? Vector<Real>{} : x));
    if (!any(x > kMost)) continue;
    for (i64 some = lane; some < lane + kWidth<Real>; ++some) {
      if (a[some] > kMost)
        to[some] = static_cast<Real>(__builtin_exp(static_cast<double>(a[some])));
    }
  }
}

template <class Real>
void tangent_lanes(const StepSlots& slots, i32 out, const Step& step) {
  const Real* const a = lanes_of<Real>(slots, step.args[0]);
  Real* const to = lanes_of<Real>(slots, out);
  for (i64 lane = 0; lane < slots.lanes; lane += kWidth<Real>) {
    store(to + lane, hyperbolic_tangent(load(a + lane)));
  }
}

template <class Real>
i64 step_floor(Real x) {
  const double below = __builtin_floor(static_cast<double>(x));
  if (below != below) return 0;
  if (below >= 0x1p63) return __LONG_LONG_MAX__;
  return below < -0x1p63 ? -__LONG_LONG_MAX__ - 1 : static_cast<i64>(below);
}

template <class Real>
void function_lanes(const StepSlots& slots, i32 out, const Step& step) {
  switch (step.op) {
    case Op::kExp:
      return exponential_lanes<Real>(slots, out, step);
    case Op::kTanh:
      return tangent_lanes<Real>(slots, out, step);
    case Op::kLog:
      return each<Real, Real>(slots, out, step, [](Real a, Real) {
        return static_cast<Real>(__builtin_log(static_cast<double>(a)));
      });
    case Op::kSqrt:
      return each<Real, Real>(slots, out, step, [](Real a, Real) {
        return sizeof(Real) == 4 ? static_cast<Real>(__builtin_sqrtf(static_cast<float>(a)))
                                 : static_cast<Real>(__builtin_sqrt(static_cast<double>(a)));
      });
    default:
      return;
  }
}

template <class Real>
void float_lanes(const StepSlots& slots, i32 out, const Step& step) {
  switch (step.op) {
    case Op::kAdd:
      return each<Real, Real>(slots, out, step, [](Real a, Real b) { return a + b; });
    case Op::kSubtract:
      return each<Real, Real>(slots, out, step, [](Real a, Real b) { return a - b; });
    case Op::kMultiply:
      return each<Real, Real>(slots, out, step, [](Real a, Real b) { return a * b; });
    case Op::kDivide:
      return each<Real, Real>(slots, out, step, [](Real a, Real b) { return a / b; });
    case Op::kNegate:
      return each<Real, Real>(slots, out, step, [](Real a, Real) { return -a; });
    case Op::kMin:
      return each<Real, Real>(slots, out, step, [](Real a, Real b) {
        const Real less = b < a ? b : a;
        return b != b ? b : less;
      });
    case Op::kMax:
      return each<Real, Real>(slots, out, step, [](Real a, Real b) {
        const Real more = a < b ? b : a;
        return b != b ? b : more;
      });
    case Op::kAbs:
      return each<Real, Real>(slots, out, step, [](Real a, Real) { return a < 0 ? -a : a + 0; });
    case Op::kClamp:
      return clamp_lanes<Real>(slots, out, step);
    case Op::kSelect:
      return select_lanes<Real>(slots, out, step);
    case Op::kToFloat:
      return each<Real, i64>(slots, out, step, [](i64 a, i64) { return static_cast<Real>(a); });
    default:
      return function_lanes<Real>(slots, out, step);
  }
}

// One step on values of which one is in registers; is_first: the first.
template <class Real, int kVectors>
[[gnu::always_inline]] inline void chained_step(Op op, bool is_first, const Real* other,
                                                Vector<Real> (&x)[kVectors]) {
  const auto each_vector = [&](const auto& function) {
    if (is_first) {
#pragma GCC unroll 8
      for (int u = 0; u < kVectors; ++u) x[u] = function(x[u], load(other + u * kWidth<Real>));
    } else {
#pragma GCC unroll 8
      for (int u = 0; u < kVectors; ++u) x[u] = function(load(other + u * kWidth<Real>), x[u]);
    }
  };
  switch (op) {
    case Op::kAdd:
      return each_vector([](auto a, auto b) { return a + b; });
    case Op::kSubtract:
      return each_vector([](auto a, auto b) { return a - b; });
    case Op::kMultiply:
      return each_vector([](auto a, auto b) { return a * b; });
    case Op::kDivide:
      return each_vector([](auto a, auto b) { return a / b; });
    case Op::kNegate:
      return each_vector([](auto a, auto) { return -a; });
    case Op::kMin:
      return each_vector([](auto a, auto b) {
        const auto less = b < a ? b : a;
        return b != b ? b : less;
      });
    case Op::kMax:
      return each_vector([](auto a, auto b) {
        const auto more = a < b ? b : a;
        return b != b ? b : more;
      });
    default:
      return each_vector([](auto a, auto) { return a < decltype(a){} ? -a : a + decltype(a){}; });
  }
}

// Steps of which each takes the one before, as far as flow says, on the lanes from `first` on: what
// passes from one to the next stays in registers. Returns how many.
template <class Real, int kVectors>
i64 chained_steps(const Step* steps, const i32* list, const u8* flow, const StepSlots& slots,
                  i64 first) {
  Vector<Real> x[kVectors];
  i32 passed = steps[list[0]].args[0];
  const Real* const from = lanes_of<Real>(slots, passed) + first;
#pragma GCC unroll 8
  for (int u = 0; u < kVectors; ++u) x[u] = load(from + u * kWidth<Real>);
  for (i64 at = 0;; ++at) {
    const Step& step = steps[list[at]];
    const bool is_first = step.args[0] == passed;
    const i32 other = step.args[is_first && step.num_args > 1 ? 1 : 0];
    chained_step(step.op, is_first, lanes_of<Real>(slots, other) + first, x);
    passed = list[at];
    if ((flow[at] & expression::Goal::kAlone) == 0) {
      Real* const to = lanes_of<Real>(slots, passed) + first;
#pragma GCC unroll 8
      for (int u = 0; u < kVectors; ++u) store(to + u * kWidth<Real>, x[u]);
    }
    if ((flow[at] & expression::Goal::kPassed) == 0) return at + 1;
  }
}
template <class Real>
i64 run_chain(const Step* steps, const i32* list, const u8* flow, const StepSlots& slots) {
  constexpr int kMost = 8, kUnit = static_cast<int>(kStepUnit) / kWidth<Real>;
  constexpr int kFew = kUnit < kMost ? kUnit : kMost;
  i64 first = 0, count = 0;
  for (; first + kMost * kWidth<Real> <= slots.lanes; first += kMost * kWidth<Real>) {
    count = chained_steps<Real, kMost>(steps, list, flow, slots, first);
  }
  for (; first < slots.lanes; first += kFew * kWidth<Real>) {
    count = chained_steps<Real, kFew>(steps, list, flow, slots, first);
  }
  return count;
}

// flow: as that of a goal, or null.
template <class Real>
void run_steps(const Step* steps, const i32* list, const u8* flow, i64 count,
               const StepSlots& slots) {
  for (i64 index = 0; index < count; ++index) {
    const i32 out = list[index];
    if (flow != nullptr && (flow[index] & expression::Goal::kPassed) != 0) {
      index += run_chain<Real>(steps, list + index, flow + index, slots) - 1;
      continue;
    }
    const Step& step = steps[out];
    const bool is_of_floats = step.operand == Type::kFloat;
    if (step.op == Op::kFloor) {
      each<i64, Real>(slots, out, step, [](Real a, Real) { return step_floor(a); });
    } else if (step.type == Type::kFloat) {
      float_lanes<Real>(slots, out, step);
    } else if (step.type == Type::kInt) {
      integer_lanes(slots, out, step);
    } else if (is_of_floats) {
      compare_lanes<Real>(slots, out, step);
    } else if (step.operand == Type::kInt) {
      compare_lanes<i64>(slots, out, step);
    } else {
      logical_lanes(slots, out, step);
    }
  }
}

inline void add_offsets(const i64* index, i64 last, i64 stride, i64* offsets, i64 lanes) {
  each_lane(lanes, [=](i64 lane) {
    const i64 raised = index[lane] < 0 ? 0 : index[lane];
    offsets[lane] += (raised > last ? last : raised) * stride;
  });
}

}  // namespace
}  // namespace fulmen::cpu
