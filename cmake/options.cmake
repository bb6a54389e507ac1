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
endif()
