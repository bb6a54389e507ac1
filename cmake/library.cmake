# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# libfulmen: objects by folder of src/, one shared library that exports the C ABI alone, and on
# request a static one.
find_package(Threads REQUIRED)

file(GLOB FULMEN_SOURCES CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/src/core/*.cpp
  ${PROJECT_SOURCE_DIR}/src/plan/*.cpp
  ${PROJECT_SOURCE_DIR}/src/cpu/*.cpp
  ${PROJECT_SOURCE_DIR}/src/api/*.cpp
  ${PROJECT_SOURCE_DIR}/src/ffi/*.cpp)

# The objects are shared by the library and the unit tests, which reach below the C ABI.
add_library(fulmen_objects OBJECT ${FULMEN_SOURCES})
set_target_properties(fulmen_objects PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_link_libraries(fulmen_objects PUBLIC fulmen_options Threads::Threads ${CMAKE_DL_LIBS})

include(cmake/isa.cmake OPTIONAL)  # one object library per instruction set
include(cmake/gpu.cmake)          # the GPU run time and the text of its kernels

# What checks, chooses and launches runs once a call: -O3 would cost a fifth more time to build.
set(FULMEN_HOST_SOURCES ${FULMEN_SOURCES} ${FULMEN_GPU_SOURCES})
list(FILTER FULMEN_HOST_SOURCES EXCLUDE REGEX "/src/cpu/")
set(FULMEN_COMPUTING_SOURCES ${FULMEN_SOURCES} ${FULMEN_ISA_SOURCES})
list(FILTER FULMEN_COMPUTING_SOURCES INCLUDE REGEX "/src/cpu/")
if(NOT FULMEN_SANITIZE)
  target_compile_options(fulmen_objects PRIVATE $<$<CONFIG:Release>:-O2>)
  set_property(SOURCE ${FULMEN_COMPUTING_SOURCES} APPEND PROPERTY
    COMPILE_OPTIONS $<$<CONFIG:Release>:-O3>)
endif()

# To build everything once, the standard library's headers are read once for all files that share
# their options. (Other builds show that every file includes what it uses.)
if(FULMEN_SANITIZE OR FULMEN_UNITY)
  set_source_files_properties(${FULMEN_COMPUTING_SOURCES} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  target_precompile_headers(fulmen_objects PRIVATE <algorithm> <array> <atomic> <charconv> <cmath>
    <cstring> <functional> <map> <memory> <mutex> <optional> <span> <sstream> <string> <vector>)
endif()

# Builds with sanitizers run for seconds, once: what they run most is optimised a little, the rest
# not, and the other files of a folder are compiled as one.
if(FULMEN_SANITIZE)
  set_property(SOURCE ${FULMEN_COMPUTING_SOURCES} APPEND PROPERTY COMPILE_OPTIONS -O1)
  if(FULMEN_SANITIZE MATCHES "address")  # to optimise its checks in tiles takes longer than they do
    set_property(SOURCE ${FULMEN_ISA_SOURCES} APPEND PROPERTY COMPILE_OPTIONS -O0)
  endif()
  set_target_properties(fulmen_objects PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  foreach(source IN LISTS FULMEN_HOST_SOURCES)
    if(NOT source MATCHES "/(torch_operators|bundle)\\.cpp$")  # name what others also name
      cmake_path(GET source PARENT_PATH folder)
      cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
      string(MAKE_C_IDENTIFIER ${folder} group)
      set_property(SOURCE ${source} PROPERTY UNITY_GROUP ${group})
    endif()
  endforeach()
endif()

add_library(fulmen SHARED)
target_link_libraries(fulmen PRIVATE fulmen_objects)
target_include_directories(fulmen INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
add_library(fulmen::fulmen ALIAS fulmen)
target_compile_features(fulmen INTERFACE $<BUILD_INTERFACE:cxx_std_20>)  # fulmen.hpp

if(FULMEN_BUILD_STATIC)
  add_library(fulmen_static STATIC $<TARGET_OBJECTS:fulmen_objects>)
  set_target_properties(fulmen_static PROPERTIES OUTPUT_NAME fulmen LINKER_LANGUAGE CXX)
  target_link_libraries(fulmen_static PUBLIC Threads::Threads ${CMAKE_DL_LIBS} m)
  target_include_directories(fulmen_static INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
  target_compile_features(fulmen_static INTERFACE $<BUILD_INTERFACE:cxx_std_20>)
  add_library(fulmen::fulmen_static ALIAS fulmen_static)
endif()
