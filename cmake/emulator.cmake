# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# fulmen_emulator: the instructions of src/kernels/ptx as host functions, a library of its own for
# tests. What links it finds src/emulator/kernels/ptx before src/kernels/ptx, so that the text of a
# kernel compiles as ordinary C++. The only part of the project that needs Boost (Boost.Context).
find_package(Boost 1.74 REQUIRED COMPONENTS context)

file(GLOB FULMEN_EMULATOR_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/emulator/*.cpp)
add_library(fulmen_emulator STATIC ${FULMEN_EMULATOR_SOURCES})
target_include_directories(fulmen_emulator BEFORE PUBLIC ${PROJECT_SOURCE_DIR}/src/emulator)
target_link_libraries(fulmen_emulator PUBLIC fulmen_options PRIVATE Boost::context)
# Kernels say `#pragma unroll`, which g++ does not know.
target_compile_options(fulmen_emulator INTERFACE
  $<$<CXX_COMPILER_ID:GNU>:-Wno-unknown-pragmas>)
