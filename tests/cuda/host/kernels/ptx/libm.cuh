// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The host's version of src/kernels/ptx/libm.cuh.
#pragma once

#include <cmath>

namespace fulmen::ptx {

inline float accurate_exp(float x) { return std::exp(x); }
inline double accurate_exp(double x) { return std::exp(x); }
inline float accurate_log(float x) { return std::log(x); }
inline double accurate_log(double x) { return std::log(x); }
inline float accurate_tanh(float x) { return std::tanh(x); }
inline double accurate_tanh(double x) { return std::tanh(x); }

}  // namespace fulmen::ptx
