// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dlopen, owned.

#include "gpu/driver/shared_library.h"

#include <dlfcn.h>
#include <link.h>

#include <utility>

namespace fulmen::gpu {

SharedLibrary::SharedLibrary(SharedLibrary&& other) noexcept { *this = std::move(other); }

SharedLibrary& SharedLibrary::operator=(SharedLibrary&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(owned_, other.owned_);
  std::swap(name_, other.name_);
  std::swap(error_, other.error_);
  return *this;
}

SharedLibrary::~SharedLibrary() {
  if (handle_ != nullptr && owned_) dlclose(handle_);
}

SharedLibrary SharedLibrary::open(const std::string& name) {
  SharedLibrary library;
  library.name_ = name;
  library.handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library.handle_ == nullptr) {
    const char* reason = dlerror();
    library.error_ = reason != nullptr ? reason : "unknown loader error";
  }
  return library;
}

SharedLibrary SharedLibrary::find_loaded(const std::string& name) {
  SharedLibrary library;
  library.name_ = name;
  library.handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library.handle_ == nullptr) library.error_ = "not loaded";
  return library;
}

std::string SharedLibrary::path() const {
  if (handle_ == nullptr) return "";
  link_map* map = nullptr;
  if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return "";
  return map->l_name;
}

void* SharedLibrary::symbol(const char* name) const {
  return handle_ != nullptr ? dlsym(handle_, name) : nullptr;
}

}  // namespace fulmen::gpu
