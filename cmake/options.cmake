# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# fulmen_options: what every target of this project is compiled with.
add_library(fulmen_options INTERFACE)
target_compile_features(fulmen_options INTERFACE cxx_std_20)
target_include_directories(fulmen_options INTERFACE
  ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_compile_options(fulmen_options INTERFACE
  -Wall -Wextra -Wconversion -fvisibility=hidden
  # No fast-math, and no contraction across expressions: a * b + c is fused only where asked for.
  -ffp-contract=off
  $<$<BOOL:${FULMEN_WARNINGS_AS_ERRORS}>:-Werror>)

set(FULMEN_SANITIZE "" CACHE STRING "Sanitizers, as for -fsanitize= (address,undefined or thread)")
if(FULMEN_SANITIZE)
  target_compile_options(fulmen_options INTERFACE
    -fsanitize=${FULMEN_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(fulmen_options INTERFACE -fsanitize=${FULMEN_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # The run time is shared, so that Python can load the library. Functions of the driver and of
    # NVRTC are called through types of our own declarations, which is what `function` objects to.
    target_compile_options(fulmen_options INTERFACE -fno-sanitize=function)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-runtime-dir
      OUTPUT_VARIABLE FULMEN_SANITIZER_FOLDER OUTPUT_STRIP_TRAILING_WHITESPACE)
    target_link_options(fulmen_options INTERFACE
      -shared-libsan -Wl,-rpath,${FULMEN_SANITIZER_FOLDER})
  endif()
endif()
