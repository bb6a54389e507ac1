// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Emulated tiles beside the vectors of AVX-512, whose flags tests/CMakeLists.txt gives this file.

#include "cpu/isa/tile_products.h"
#include "emulated_tiles.h"

namespace fulmen::cpu {

const PairKernels kEmulatedTilesAvx512 = with_tiles<EmulatedTiles>(kPairKernels);
const PairKernels kEmulatedSplitAvx512 = with_tiles<EmulatedTiles>(kSplitPairKernels);

}  // namespace fulmen::cpu
