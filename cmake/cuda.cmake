# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# The CUDA run time, src/cuda, and the kernel text that it compiles: no CUDA toolkit is needed or
# looked for. Not part of the library yet, since no call reaches it: objects for its tests.
include(${CMAKE_CURRENT_LIST_DIR}/embed.cmake)

set(FULMEN_EMBEDDED_KERNELS ${CMAKE_CURRENT_BINARY_DIR}/embedded_kernels.cpp)
fulmen_embed_kernels(${FULMEN_EMBEDDED_KERNELS})
file(GLOB FULMEN_CUDA_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cpp)
add_library(fulmen_cuda OBJECT ${FULMEN_CUDA_SOURCES} ${FULMEN_EMBEDDED_KERNELS})
target_link_libraries(fulmen_cuda PUBLIC fulmen_options)
