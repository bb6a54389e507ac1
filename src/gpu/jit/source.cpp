// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The generated text, and which embedded files it needs.

#include "gpu/jit/source.h"

#include <algorithm>

#include "core/error.h"

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
  return sentence("// ", spec.name, "\n#include \"", spec.include,
                  "\"\n\nconstexpr auto kConfig = [] {\n  ", spec.config_type, " config{};\n",
                  fields, "  return config;\n}();\nstatic_assert(sizeof(", spec.params_type,
                  ") == ", spec.params_bytes,
                  ", \"host and device disagree on the parameters\");\n", shared_assert,
                  "\nextern \"C\" __global__ void __launch_bounds__(", spec.num_threads, ", ",
                  spec.min_blocks, ")\n", kEntryName, "(const __grid_constant__ ", spec.params_type,
                  " params) {\n  ", spec.function, "<kConfig>(params);\n}\n");
}

}  // namespace fulmen::gpu
