#!/usr/bin/env bash
# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# Brings a bare machine to where the Makefile can work: `bootstrap.sh run` for the main job,
# `bootstrap.sh course` for the emulator of the course,
# `bootstrap.sh docs` for the documentation alone, `bootstrap.sh test` for all checks and tests as
# well, `bootstrap.sh test-full` for those of AArch64 too, and after it, while other steps run,
# `bootstrap.sh torch` for those of the PyTorch layer and `bootstrap.sh triton` for those of the
# Triton rungs. Missing system packages are installed by apt
# when the user may (root, or sudo without a password), else named in one line; without those of
# AArch64 its steps are skipped. Then .venv is made, and the pinned tools of the requirement
# lists go into it, not compiled, since most of their modules are never imported. Does nothing that
# is already done.
set -euo pipefail
cd "$(dirname "$0")/.."
purpose="${1:?usage: bootstrap.sh run|course|docs|test|test-full|torch|triton}"
python="${PYTHON:-python3}"

has() { command -v "$1" >/dev/null 2>&1; }
has_header() { echo "#include <$1>" | g++ -x c++ -fsyntax-only - 2>/dev/null; }
has_library() { echo "int main() {}" | g++ -x c++ - "-l$1" -o /dev/null 2>/dev/null; }
has_clang() {  # with the run time of its sanitizers
  local clang
  clang="$(tools/find_clang.sh)"
  [ -n "$clang" ] && [ -e "$("$clang" -print-file-name="libclang_rt.asan-$(uname -m).so")" ]
}

missing=() wanted=()
if [ "$purpose" = test-full ]; then
  purpose=test
  has aarch64-linux-gnu-g++ || wanted+=(g++-aarch64-linux-gnu)
  has qemu-aarch64-static || wanted+=(qemu-user-static)
fi
has "$python" || missing+=(python3)
has "$python" && "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
[ "$purpose" = docs ] || has g++ || missing+=(g++)
needs_boost() { { has g++ && has_library boost_context; } || missing+=(libboost-context-dev); }
[ "$purpose" != course ] || needs_boost
if [ "$purpose" = test ]; then
  has gcc || missing+=(gcc)
  { has g++ && has_header gtest/gtest.h; } || missing+=(libgtest-dev)
  { has g++ && has_header gmock/gmock.h; } || missing+=(libgmock-dev)
  has_clang || missing+=(clang-16 libclang-rt-16-dev)
  needs_boost
fi

if [ "$((${#missing[@]} + ${#wanted[@]}))" -gt 0 ]; then
  apt=()
  if has apt-get && [ "$(id -u)" = 0 ]; then
    apt=(env DEBIAN_FRONTEND=noninteractive apt-get)
  elif has apt-get && has sudo && sudo -n true 2>/dev/null; then
    apt=(sudo -n env DEBIAN_FRONTEND=noninteractive apt-get)
  elif [ "${#missing[@]}" -gt 0 ]; then
    echo "fulmen needs ${missing[*]} (names of Debian packages): please install and run again." >&2
    exit 1
  fi
  if [ "${#apt[@]}" -gt 0 ]; then
    packages=("${missing[@]}" "${wanted[@]}")
    echo "installing system packages: ${packages[*]}"
    "${apt[@]}" update -qq
    "${apt[@]}" install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
  fi
fi

# A virtual environment that was moved or made by a Python that is gone does not start: make it anew.
.venv/bin/python -c 'import pip' 2>/dev/null || "$python" -m venv --clear .venv

# The packages of a list, unless this very list is installed.
install() {
  cmp -s "tools/$1.txt" ".venv/$1.installed" && return
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r "tools/$1.txt"
  cp "tools/$1.txt" ".venv/$1.installed"
}
[ "$purpose" != course ] || install requirements-course
[ "$purpose" = run ] || [ "$purpose" = course ] || install requirements-docs
[ "$purpose" != test ] || install requirements

# A list without which tests are skipped; what its second word says is printed then.
try_to_install() {
  cmp -s "tools/requirements-$1.txt" ".venv/requirements-$1.tried" && return
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
    -r "tools/requirements-$1.txt" 2>/dev/null || echo "$2 will be skipped"
  cp "tools/requirements-$1.txt" ".venv/requirements-$1.tried"
}
[ "$purpose" != torch ] ||
  try_to_install torch "no CPU build of torch to be had here: tests of the PyTorch layer"
[ "$purpose" != triton ] || try_to_install triton "no Triton to be had here: tests of its rungs"
