// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A stack that is large enough for NVRTC, which recurses deep into a kernel's syntax and blocks.
// The calling thread's may not be: threads of frameworks and thread pools are made with little.
// With 128 KiB NVRTC 13.0 ended the process on forward_sm80 (2026-11-28), and nothing says how much
// the next version or kernel takes.
#pragma once

#include <functional>

namespace fulmen::gpu {

inline constexpr std::size_t kLargeStackBytes = std::size_t{64} << 20;  // taken as it is used

// Runs `work`, which must not throw, on a new thread with such a stack and waits for it; on this
// thread where the system makes no such thread.
void on_large_stack(const std::function<void()>& work);

}  // namespace fulmen::gpu
