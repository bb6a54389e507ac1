// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// cp.async: copies of 4, 8 or 16 bytes that a thread asks for and waits for itself. The source is
// read when the copy is asked for. Half of the copies land at once, half as late as the thread's
// waits allow, so that a missing wait shows as old data or NaN even where the checker is off; the
// checker sees a write by an engine of the thread's own, over once its group has been waited for.
#pragma once

#include "emulator/accesses.h"

namespace fulmen::emulator {

// Zeros where `global` is null.
void thread_copy(u32 shared, const u8* global, u32 num_bytes, Site site);
void thread_copy_commit();
void thread_copy_wait(u32 pending_groups);

}  // namespace fulmen::emulator
