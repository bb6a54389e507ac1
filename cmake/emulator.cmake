# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# fulmen_emulator: the instructions of src/kernels/ptx as host functions, a library of its own for
# tests and for debugging. What links it finds src/emulator/kernels/ptx before src/kernels/ptx, so
# that the text of a kernel compiles as ordinary C++. The only part of the project that needs Boost
# (Boost.Context).
find_package(Boost 1.74 REQUIRED CONFIG COMPONENTS context)

file(GLOB FULMEN_EMULATOR_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/emulator/*.cpp)
# Shared, and bound to its own functions: what the compiler instantiates of the standard library in
# instrumented files (below) must not take their place here.
add_library(fulmen_emulator SHARED ${FULMEN_EMULATOR_SOURCES})
target_include_directories(fulmen_emulator BEFORE PUBLIC ${PROJECT_SOURCE_DIR}/src/emulator)
add_library(fulmen_visible INTERFACE)  # linked after fulmen_options, which hides
target_compile_options(fulmen_visible INTERFACE -fvisibility=default -fno-semantic-interposition)
target_link_libraries(fulmen_emulator
  PUBLIC fulmen_options PRIVATE fulmen_visible Boost::context ${CMAKE_DL_LIBS})
set_target_properties(fulmen_emulator PROPERTIES
  UNITY_BUILD ${FULMEN_UNITY} UNITY_BUILD_BATCH_SIZE 7)
target_link_options(fulmen_emulator PRIVATE -Wl,-Bsymbolic-functions)
# The kernels' text says `#pragma unroll`, which g++ does not know, mixes i32 and u32 as addresses
# and indices, and leaves members of aggregates to their types' own initializers. Linked after
# fulmen_options, since in clang a later -Wconversion means -Wsign-conversion as well.
add_library(fulmen_kernel_text INTERFACE)
target_compile_options(fulmen_kernel_text INTERFACE
  -Wno-missing-field-initializers -Wno-sign-conversion
  $<$<CXX_COMPILER_ID:GNU>:-Wno-unknown-pragmas>)
target_link_libraries(fulmen_emulator INTERFACE fulmen_kernel_text)

# Source files with the text of kernels: their loads and stores through pointers call the checker
# (src/emulator/instrumented.cpp), which finds their lines. Unrolled loops of a GPU kernel are no
# gain here: -O1 compiles and runs quicker in sum.
set(FULMEN_KERNEL_OPTIONS -fsanitize=thread -g1 $<$<NOT:$<CONFIG:Debug>>:-O1>)
function(fulmen_kernel_sources)
  set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS ${FULMEN_KERNEL_OPTIONS})
endfunction()

# Kernels' text with faults, each of which a test or FULMEN_PLANTED switches on: planted/faults.toml
# says what and where (tools/plant_faults.py). A program that links fulmen_planted is compiled from
# it; with FULMEN_AUDIT_KERNELS all programs with kernels are, and count which lines ran.
option(FULMEN_AUDIT_KERNELS "Plant faults into the kernels of all tests, and count their lines" OFF)
find_package(Python3 3.11 REQUIRED COMPONENTS Interpreter)
set(FULMEN_PLANTED_TEXT ${PROJECT_BINARY_DIR}/planted)
file(GLOB_RECURSE kernel_texts CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/kernels/*.cuh)
list(FILTER kernel_texts EXCLUDE REGEX "/ptx/")
string(REPLACE ${PROJECT_SOURCE_DIR}/src/ ${FULMEN_PLANTED_TEXT}/ planted_texts "${kernel_texts}")
add_custom_command(
  OUTPUT ${FULMEN_PLANTED_TEXT}/faults.inc BYPRODUCTS ${planted_texts}
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/plant_faults.py
    --write ${FULMEN_PLANTED_TEXT}
  DEPENDS ${PROJECT_SOURCE_DIR}/tools/plant_faults.py
    ${PROJECT_SOURCE_DIR}/tests/emulator/planted/faults.toml ${kernel_texts}
  COMMENT "Planting faults into the kernels' text")
add_custom_target(fulmen_planted_text DEPENDS ${FULMEN_PLANTED_TEXT}/faults.inc)
add_library(fulmen_planted STATIC ${PROJECT_SOURCE_DIR}/tests/emulator/planted/planted.cpp)
add_dependencies(fulmen_planted fulmen_planted_text)
target_include_directories(fulmen_planted PRIVATE
  ${FULMEN_PLANTED_TEXT} PUBLIC ${PROJECT_SOURCE_DIR}/tests)
target_link_libraries(fulmen_planted PRIVATE fulmen_options)
# What links `target`, scope INTERFACE, or the target itself, scope PRIVATE.
function(fulmen_plant target scope)
  target_include_directories(${target} BEFORE ${scope} ${FULMEN_PLANTED_TEXT})
  target_link_libraries(${target} ${scope} fulmen_planted)
  target_compile_options(${target} ${scope} -w)  # each branch but one says nothing
endfunction()
if(FULMEN_AUDIT_KERNELS)
  # Not optimised: no statement goes into another's code.
  set(counted --coverage -fprofile-abs-path)
  list(APPEND FULMEN_KERNEL_OPTIONS -O0 ${counted})
  # The library's copies of functions that host and device share may be those that are linked.
  target_compile_options(fulmen_objects PRIVATE -O0 ${counted})
  target_link_options(fulmen_emulator INTERFACE --coverage)
  fulmen_plant(fulmen_emulator INTERFACE)
endif()
