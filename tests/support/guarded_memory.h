// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Memory that ends where reading ends the program: the bytes lie against a page that may not be
// touched, and behind another. Catches what an address sanitizer does not see (memory of its own
// making is not poisoned), in every build.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <new>
#include <utility>

namespace fulmen::test {

class GuardedMemory {
 public:
  explicit GuardedMemory(size_t bytes) {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t inside = (bytes + page - 1) / page * page;
    size_ = inside + 2 * page;
    pages_ = ::mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages_ == MAP_FAILED) throw std::bad_alloc();
    char* const begin = static_cast<char*>(pages_) + page;
    if (inside > 0 && ::mprotect(begin, inside, PROT_READ | PROT_WRITE) != 0) {
      throw std::bad_alloc();
    }
    data_ = begin + inside - bytes;
  }
  GuardedMemory(GuardedMemory&& other) noexcept
      : pages_(std::exchange(other.pages_, MAP_FAILED)), size_(other.size_), data_(other.data_) {}
  GuardedMemory& operator=(GuardedMemory&&) = delete;
  ~GuardedMemory() {
    if (pages_ != MAP_FAILED) ::munmap(pages_, size_);
  }

  char* data() const { return data_; }

 private:
  void* pages_;
  size_t size_;
  char* data_;
};

}  // namespace fulmen::test
