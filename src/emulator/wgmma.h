// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The matrix products of a warpgroup. A product is only noted when issued and carried out when its
// group is waited for, as late as the hardware may: a kernel that touches the result or overwrites
// an operand in shared memory too early computes something else. All 128 threads must issue the
// same products; a wait is also a meeting of all of them, which the hardware does not promise.
#pragma once

#include "emulator/accesses.h"

namespace fulmen::emulator {

void wgmma_fence();
void wgmma_issue(const Product& product);
void wgmma_commit();
void wgmma_wait(u32 pending_groups);

// The thread uses memory that may be registers of a product.
void wgmma_touch(const u8* begin, u64 bytes, Kind kind, Site site);

}  // namespace fulmen::emulator
