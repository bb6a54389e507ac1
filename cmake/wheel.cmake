# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# What the Python wheels hold beside their Python: fulmen the library and the example of `fulmen
# run`, fulmen-devel (packaging/devel) what install.cmake installs. The C++ run time is linked in, so
# that a wheel asks nothing of a system but its C library and libgcc_s. Sections that nothing calls
# are dropped: parts of the run time ask for glibc 2.36, and a static libgcc for 2.35, where the rest
# needs 2.34 (std::thread, built on Debian 12). Zip files have no symbolic links, so the library has
# no version in its name.
if(UNIX AND NOT APPLE)
  target_link_options(fulmen PRIVATE -static-libstdc++ -Wl,--gc-sections -s)
endif()
if(FULMEN_WHEEL STREQUAL "fulmen-devel")
  set(CMAKE_INSTALL_LIBDIR lib)
  set(CMAKE_INSTALL_INCLUDEDIR include)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION . COMPONENT devel)
  return()
endif()
install(TARGETS fulmen
  LIBRARY DESTINATION lib COMPONENT wheel
  RUNTIME DESTINATION lib COMPONENT wheel)
install(FILES ${PROJECT_SOURCE_DIR}/examples/data/decoder.safetensors
  DESTINATION examples COMPONENT wheel)
