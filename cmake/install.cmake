# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# What the library exports, and where things are installed. Component `devel` is a C and C++
# package: find_package(fulmen) gives fulmen::fulmen and, where it was built, fulmen::fulmen_static;
# pkg-config knows fulmen. Component `wheel` is in wheel.cmake.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Headers of the C++ library mark templates as visible, so hidden visibility alone would leak them.
if(UNIX AND NOT APPLE)
  set(FULMEN_EXPORTS ${PROJECT_SOURCE_DIR}/cmake/exports.map)
  target_link_options(fulmen PRIVATE -Wl,--version-script=${FULMEN_EXPORTS})
  set_property(TARGET fulmen APPEND PROPERTY LINK_DEPENDS ${FULMEN_EXPORTS})
endif()

set(FULMEN_WHEEL "" CACHE STRING "The Python wheel that is being built: fulmen, fulmen-devel or none")
if(FULMEN_WHEEL)
  include(${CMAKE_CURRENT_LIST_DIR}/wheel.cmake)
else()
  set_target_properties(fulmen PROPERTIES
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR})  # structs and arrays may grow without a new one
endif()
if(FULMEN_WHEEL STREQUAL "fulmen")
  return()
endif()

set(FULMEN_LIBRARIES fulmen)
if(FULMEN_BUILD_STATIC)
  list(APPEND FULMEN_LIBRARIES fulmen_static)
endif()
install(TARGETS ${FULMEN_LIBRARIES} EXPORT fulmenTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT devel
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT devel
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT devel)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fulmen
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT devel)

set(FULMEN_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/fulmen)
install(EXPORT fulmenTargets NAMESPACE fulmen:: FILE fulmenTargets.cmake
  DESTINATION ${FULMEN_CMAKE_DIR} COMPONENT devel)
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/fulmenConfig.cmake.in
  ${PROJECT_BINARY_DIR}/fulmenConfig.cmake
  INSTALL_DESTINATION ${FULMEN_CMAKE_DIR} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fulmenConfigVersion.cmake
  COMPATIBILITY SameMajorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/fulmenConfig.cmake
  ${PROJECT_BINARY_DIR}/fulmenConfigVersion.cmake
  DESTINATION ${FULMEN_CMAKE_DIR} COMPONENT devel)

# The prefix of the .pc file is found from where it lies, so that an installation can be moved.
set(FULMEN_PC_DIR ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH FULMEN_PC_PREFIX /${FULMEN_PC_DIR} /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/fulmen.pc.in ${PROJECT_BINARY_DIR}/fulmen.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fulmen.pc DESTINATION ${FULMEN_PC_DIR} COMPONENT devel)
