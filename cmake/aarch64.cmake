# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# Toolchain: from x86-64 to AArch64 with Debian's cross compiler (g++-aarch64-linux-gnu); what is
# built runs under qemu (qemu-user-static), about two hundred times slower than on a processor. C is
# compiled with -O1 (CMakePresets.json): gcc 12.2's vectoriser fails on the example.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static;-L;/usr/aarch64-linux-gnu)
