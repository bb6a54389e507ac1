# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# fulmen_emulator: the instructions of src/kernels/ptx as host functions, a library of its own for
# tests. What links it finds src/emulator/kernels/ptx before src/kernels/ptx, so that the text of a
# kernel compiles as ordinary C++. The only part of the project that needs Boost (Boost.Context).
find_package(Boost 1.74 REQUIRED CONFIG COMPONENTS context)

file(GLOB FULMEN_EMULATOR_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/emulator/*.cpp)
add_library(fulmen_emulator STATIC ${FULMEN_EMULATOR_SOURCES})
target_include_directories(fulmen_emulator BEFORE PUBLIC ${PROJECT_SOURCE_DIR}/src/emulator)
target_link_libraries(fulmen_emulator PUBLIC fulmen_options PRIVATE Boost::context)
# The kernels' text says `#pragma unroll`, which g++ does not know, mixes i32 and u32 as addresses
# and indices, and leaves members of aggregates to their types' own initializers. Linked after
# fulmen_options, since in clang a later -Wconversion means -Wsign-conversion as well.
add_library(fulmen_kernel_text INTERFACE)
target_compile_options(fulmen_kernel_text INTERFACE
  -Wno-missing-field-initializers -Wno-sign-conversion
  $<$<CXX_COMPILER_ID:GNU>:-Wno-unknown-pragmas>)
target_link_libraries(fulmen_emulator INTERFACE fulmen_kernel_text)
