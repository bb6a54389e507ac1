# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# The GPU run time, src/gpu, and the kernel text that it compiles, as a part of the library: no
# CUDA toolkit is needed, looked for or linked.
include(${CMAKE_CURRENT_LIST_DIR}/embed.cmake)

set(FULMEN_EMBEDDED_KERNELS ${CMAKE_CURRENT_BINARY_DIR}/embedded_kernels.cpp)
fulmen_embed_kernels(${FULMEN_EMBEDDED_KERNELS})
file(GLOB_RECURSE FULMEN_GPU_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/gpu/*.cpp)
target_sources(fulmen_objects PRIVATE ${FULMEN_GPU_SOURCES} ${FULMEN_EMBEDDED_KERNELS})
