# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# What fulmen_version and fulmen_build_info say: handed to the one source that says it, so that a
# new commit recompiles one file.
set(FULMEN_COMMIT unknown)
find_package(Git QUIET)
if(GIT_FOUND AND EXISTS ${PROJECT_SOURCE_DIR}/.git)
  execute_process(
    COMMAND ${GIT_EXECUTABLE} rev-parse --short=12 HEAD
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    OUTPUT_VARIABLE FULMEN_GIT_HEAD OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE FULMEN_GIT_RESULT ERROR_QUIET)
  if(FULMEN_GIT_RESULT EQUAL 0)
    set(FULMEN_COMMIT ${FULMEN_GIT_HEAD})
  endif()
  if(EXISTS ${PROJECT_SOURCE_DIR}/.git/logs/HEAD)  # written by every commit and checkout
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
      ${PROJECT_SOURCE_DIR}/.git/logs/HEAD)
  endif()
endif()

set_property(SOURCE ${PROJECT_SOURCE_DIR}/src/api/explain.cpp APPEND PROPERTY COMPILE_DEFINITIONS
  FULMEN_VERSION="${PROJECT_VERSION}"
  FULMEN_COMMIT="${FULMEN_COMMIT}"
  FULMEN_BUILD_TYPE="$<CONFIG>")
