// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A shared library opened at run time and closed with the object. The CUDA driver and NVRTC come in
// this way, so that fulmen needs neither to build, to be imported or to compute on the CPU.
#pragma once

#include <string>

namespace fulmen::gpu {

class SharedLibrary {
 public:
  SharedLibrary() = default;
  SharedLibrary(SharedLibrary&& other) noexcept;
  SharedLibrary& operator=(SharedLibrary&& other) noexcept;
  ~SharedLibrary();

  // Opens a path or a plain name. The result is empty (false) when that fails; error() then says
  // why, in the words of the loader.
  static SharedLibrary open(const std::string& name);

  // Only if this process has already loaded it.
  static SharedLibrary find_loaded(const std::string& name);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& name() const { return name_; }
  const std::string& error() const { return error_; }

  // The file that was loaded, as the loader reports it; "" when unknown.
  std::string path() const;

  // nullptr when the library has no such symbol.
  void* symbol(const char* name) const;

  // Sets `function` to the symbol; false when there is none.
  template <class Function>
  bool bind(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(symbol(name));
    return function != nullptr;
  }

  // Stays loaded until the process ends: for libraries whose own threads outlive us.
  void keep() { owned_ = false; }

 private:
  void* handle_ = nullptr;
  bool owned_ = true;
  std::string name_;
  std::string error_;
};

}  // namespace fulmen::gpu
