// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The generated text, and one NVRTC program, from creation to cubin.

#include "gpu/jit/compiler.h"

#include <pthread.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <functional>

#include "core/error.h"
#include "core/log.h"
#include "gpu/driver/driver.h"

namespace fulmen::gpu {
namespace {

const SourceFile* find_file(const std::vector<SourceFile>& files, std::string_view name) {
  const auto found = std::find_if(files.begin(), files.end(),
                                  [&](const SourceFile& file) { return file.name == name; });
  return found == files.end() ? nullptr : &*found;
}

// The names in lines of the form #include "name".
std::vector<std::string_view> includes_of(std::string_view text) {
  constexpr std::string_view kDirective = "#include \"";
  std::vector<std::string_view> names;
  for (std::size_t at = text.find(kDirective); at != std::string_view::npos;
       at = text.find(kDirective, at + 1)) {
    const bool starts_line = at == 0 || text[at - 1] == '\n';
    const std::size_t begin = at + kDirective.size();
    const std::size_t end = text.find('"', begin);
    if (starts_line && end != std::string_view::npos)
      names.push_back(text.substr(begin, end - begin));
  }
  return names;
}

}  // namespace

std::vector<SourceFile> reachable_sources(const std::vector<SourceFile>& files,
                                          std::string_view name) {
  std::vector<SourceFile> reached;
  std::vector<std::string_view> pending{name};
  for (std::size_t next = 0; next < pending.size(); ++next) {
    if (find_file(reached, pending[next]) != nullptr) continue;
    const SourceFile* file = find_file(files, pending[next]);
    if (file == nullptr) {
      throw Error(Status::kInternal, sentence("the library holds no kernel file ", pending[next],
                                              ", which ", name, " needs; please report this"));
    }
    reached.push_back(*file);
    for (std::string_view included : includes_of(file->text)) pending.push_back(included);
  }
  return reached;
}

// Turing holds 1,024 threads on a multiprocessor, every later one at least 1,536.
static std::string min_blocks_text(const KernelSpec& spec) {
  const int most_on_turing = std::max(1, 1024 / spec.num_threads);
  if (spec.min_blocks <= most_on_turing) return sentence(spec.min_blocks);
  return sentence("__CUDA_ARCH__ == 750 ? ", most_on_turing, " : ", spec.min_blocks);
}

std::string wrapper_text(const KernelSpec& spec) {
  std::string fields;
  for (const ConfigField& field : spec.config) {
    fields += sentence("  config.", field.name, " = ", field.value, ";\n");
  }
  const std::string shared_assert =
      spec.shared_bytes_text.empty()
          ? std::string()
          : sentence("static_assert(", spec.shared_bytes_text, " == ", spec.shared_bytes,
                     ", \"host and device disagree on shared memory\");\n");
  return sentence("// ", spec.name, "\n#include \"", spec.include, "\"\n", spec.expression,
                  "\nconstexpr auto kConfig = [] {\n  ", spec.config_type, " config{};\n", fields,
                  "  return config;\n}();\nstatic_assert(sizeof(", spec.params_type,
                  ") == ", spec.params_bytes,
                  ", \"host and device disagree on the parameters\");\n", shared_assert,
                  "\nextern \"C\" __global__ void __launch_bounds__(", spec.num_threads, ", ",
                  min_blocks_text(spec), ")\n", kEntryName, "(const __grid_constant__ ",
                  spec.params_type, " params) {\n  ", spec.function, "<kConfig>(params",
                  spec.reads_expression ? ".params" : "", ");\n}\n");
}

namespace {

// NVRTC recurses deep into a kernel's syntax and blocks, and threads of frameworks and thread pools
// are made with little stack. With 128 KiB NVRTC 13.0 ended the process on forward_sm80
// (2026-11-28), and nothing says how much the next version or kernel takes.
constexpr std::size_t kLargeStackBytes = std::size_t{64} << 20;  // taken as it is used

void* run(void* work) {
  (*static_cast<const std::function<void()>*>(work))();
  return nullptr;
}

// Runs `work`, which must not throw, on a new thread with such a stack and waits for it; on this
// thread where the system makes no such thread. A POSIX thread, since std::thread has no word for
// the size of a stack.
void on_large_stack(const std::function<void()>& work) {
  pthread_attr_t attributes;
  pthread_t thread;
  bool started = false;
  if (pthread_attr_init(&attributes) == 0) {
    void* const argument = const_cast<std::function<void()>*>(&work);
    started = pthread_attr_setstacksize(&attributes, kLargeStackBytes) == 0 &&
              pthread_create(&thread, &attributes, run, argument) == 0;
    pthread_attr_destroy(&attributes);
  }
  started ? static_cast<void>(pthread_join(thread, nullptr)) : work();
}

// Destroyed with the scope, whatever happens.
class Program {
 public:
  Program(const Nvrtc& nvrtc, const KernelSpec& spec, const std::string& text,
          const std::vector<SourceFile>& files)
      : nvrtc_(nvrtc), spec_(spec) {
    for (const SourceFile& file : files) {
      names_.emplace_back(file.name);
      texts_.emplace_back(file.text);
    }
    std::vector<const char*> names;
    std::vector<const char*> texts;
    for (const std::string& name : names_) names.push_back(name.c_str());
    for (const std::string& file_text : texts_) texts.push_back(file_text.c_str());
    check(nvrtc_->nvrtcCreateProgram(&program_, text.c_str(), (spec.name + ".cu").c_str(),
                                     static_cast<int>(names.size()), texts.data(), names.data()),
          "create");
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() { nvrtc_->nvrtcDestroyProgram(&program_); }

  // True when it compiled; the log is there either way.
  bool compile(const std::vector<std::string>& options) {
    std::vector<const char*> texts;
    for (const std::string& option : options) texts.push_back(option.c_str());
    on_large_stack([&] {
      result_ = nvrtc_->nvrtcCompileProgram(program_, static_cast<int>(texts.size()), texts.data());
    });
    return result_ == 0;
  }
  const char* result_text() const { return nvrtc_->nvrtcGetErrorString(result_); }

  std::string log() const {
    std::size_t bytes = 0;
    check(nvrtc_->nvrtcGetProgramLogSize(program_, &bytes), "read the log of");
    std::string log(bytes, '\0');
    if (bytes > 0) check(nvrtc_->nvrtcGetProgramLog(program_, log.data()), "read the log of");
    while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
    return log;
  }

  std::string cubin() const {
    std::size_t bytes = 0;
    check(nvrtc_->nvrtcGetCUBINSize(program_, &bytes), "read the code of");
    std::string cubin(bytes, '\0');
    if (bytes > 0) check(nvrtc_->nvrtcGetCUBIN(program_, cubin.data()), "read the code of");
    return cubin;
  }

 private:
  void check(nvrtcResult result, const char* action) const {
    if (result == 0) return;
    throw Error(Status::kCompile, sentence("NVRTC could not ", action, " the kernel ", spec_.name,
                                           ": ", nvrtc_->nvrtcGetErrorString(result)));
  }

  const Nvrtc& nvrtc_;
  const KernelSpec& spec_;
  nvrtcProgram program_ = nullptr;
  nvrtcResult result_ = 0;
  std::vector<std::string> names_;
  std::vector<std::string> texts_;
};

// Said before and after, so that the log names the kernel in which a process died.
template <class... Parts>
void log_info(const Parts&... parts) {
  if (log_is_on()) log(LogLevel::kInfo, sentence(parts...).c_str());
}

}  // namespace

const char* name(Origin origin) {
  constexpr const char* kNames[] = {"compiled", "disk", "bundle"};
  return kNames[static_cast<int>(origin)];
}

int arch_number(const std::string& arch) {
  int number = 0;
  const char* const last = arch.data() + arch.size();
  if (arch.rfind("sm_", 0) == 0) {
    const auto [end, error] = std::from_chars(arch.data() + 3, last, number);
    const bool suffix_ok = end == last || (end + 1 == last && (*end == 'a' || *end == 'f'));
    if (error == std::errc() && suffix_ok && number > 0) return number;
  }
  throw Error(Status::kArgument, sentence("'", arch,
                                          "' names no GPU architecture; write sm_80, "
                                          "sm_90a and so on"));
}

std::vector<std::string> compile_options(const std::string& arch) {
  return {"--gpu-architecture=" + arch, "--std=c++20",
          "--device-as-default-execution-space",  // the shared headers carry no __device__
          "--diag-suppress=128",                  // a loop behind `if constexpr (...) return`
          "--ptxas-options=-v"};                  // registers and spills, for the gate
}

CompiledKernel compile(const Nvrtc& nvrtc, const KernelSpec& spec, const std::string& arch,
                       const std::vector<SourceFile>& files) {
  if (!nvrtc.knows(arch_number(arch))) {
    std::string known;
    for (int number : nvrtc.archs()) known += sentence(known.empty() ? "sm_" : ", sm_", number);
    throw Error(Status::kUnsupported,
                sentence("NVRTC ", cuda_version_name(nvrtc.version()), " does not know ", arch,
                         "; it compiles for ", known));
  }
  Program program(nvrtc, spec, wrapper_text(spec), reachable_sources(files, spec.include));
  using Clock = std::chrono::steady_clock;
  log_info("compiling ", spec.name, " for ", arch);
  const Clock::time_point start = Clock::now();
  const bool compiled = program.compile(compile_options(arch));
  const auto milliseconds =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
  log_info(compiled ? "compiled " : "failed to compile ", spec.name, " for ", arch, " in ",
           milliseconds, " ms");
  CompiledKernel kernel;
  kernel.log = program.log();
  if (!compiled) {
    throw Error(Status::kCompile, sentence("the kernel ", spec.name, " did not compile for ", arch,
                                           " with NVRTC ", cuda_version_name(nvrtc.version()), " (",
                                           program.result_text(), "): ", kernel.log));
  }
  kernel.cubin = program.cubin();
  return kernel;
}

}  // namespace fulmen::gpu
