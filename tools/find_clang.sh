#!/usr/bin/env bash
# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# Prints the oldest clang++ of version 16 or later on this machine, nothing when there is none.
# CLANG names another one. 16 is the oldest that compiles the project.
if [ -n "${CLANG:-}" ]; then
  echo "$CLANG"
  exit
fi
for version in $(seq 16 30); do
  command -v "clang++-$version" && exit
done
if command -v clang++ >/dev/null && [ "$(clang++ -dumpversion | cut -d. -f1)" -ge 16 ]; then
  command -v clang++
fi
