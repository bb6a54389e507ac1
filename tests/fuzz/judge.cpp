// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Bytes before and after, and sentences.

#include "fuzz/judge.h"

#include <cstring>

#include "core/error.h"
#include "fuzz/damage.h"

namespace fulmen::test {
namespace {

// Marks the bytes of a tensor's elements in the masks of blocks.
void mark(const DrawnCall& call, const fulmen_tensor& tensor,
          std::vector<std::vector<char>>& masks) {
  const Block* const block = block_of(call, tensor);
  if (block == nullptr) return;
  std::vector<char>& mask = masks[static_cast<size_t>(block - call.blocks.data())];
  const size_t bytes = static_cast<size_t>(size_bytes(static_cast<DType>(tensor.dtype)));
  for_each_element(tensor, [&](char* element) {
    std::memset(mask.data() + (element - block->begin()), 1, bytes);
  });
}

}  // namespace

Snapshot::Snapshot(const DrawnCall& call) : call_(call) {
  for (const Block& block : call.blocks) bytes_.emplace_back(block.begin(), block.bytes);
}

void Snapshot::expect_kept(const std::vector<fulmen_tensor>& outputs, const Blocks& scratch) const {
  std::vector<std::vector<char>> masks;
  for (const std::string& bytes : bytes_) masks.emplace_back(bytes.size(), 0);
  for (const fulmen_tensor& tensor : outputs) mark(call_, tensor, masks);
  for (size_t i = 0; i < bytes_.size(); ++i) {
    const Block& block = call_.blocks[i];
    if (std::ranges::find(scratch, &block) != scratch.end()) continue;
    for (size_t at = 0; at < block.bytes; ++at) {
      if (masks[i][at] != 0 || block.begin()[at] == bytes_[i][at]) continue;
      throw Broken(sentence("byte ", at, " of ", block.bytes, " of block ", i,
                            " was written, which is no element of an output"));
    }
  }
}

void Snapshot::expect_same(const char* when, const Blocks& scratch) const {
  for (size_t i = 0; i < bytes_.size(); ++i) {
    const Block& block = call_.blocks[i];
    if (std::ranges::find(scratch, &block) != scratch.end()) continue;
    if (std::memcmp(block.begin(), bytes_[i].data(), block.bytes) == 0) continue;
    throw Broken(sentence("block ", i, " of ", block.bytes, " bytes differs ", when));
  }
}

void Snapshot::restore() const {
  for (size_t i = 0; i < bytes_.size(); ++i) {
    std::memcpy(call_.blocks[i].begin(), bytes_[i].data(), bytes_[i].size());
  }
}

std::vector<fulmen_tensor> outputs_of(const DrawnCall& call) {
  std::vector<fulmen_tensor> outputs;
  for (const ArrayRule& rule : rules::kTable) {
    const fulmen_tensor& tensor = call.at(rule.array);
    if (use_of(rule, call_of(call.operation)) != Use::kOutput || !call.has(rule.array)) continue;
    outputs.push_back(tensor);
  }
  return outputs;
}

void poison(const std::vector<fulmen_tensor>& tensors) {
  for (const fulmen_tensor& tensor : tensors) {
    const size_t bytes = static_cast<size_t>(size_bytes(static_cast<DType>(tensor.dtype)));
    for_each_element(tensor, [&](char* element) { std::memset(element, 0xff, bytes); });
  }
}

void expect_refusal(fulmen_status status, bool is_good) {
  const std::string said = fulmen_last_error();
  const bool may_be = status == FULMEN_ERROR_UNSUPPORTED || status == FULMEN_ERROR_NOT_FOUND ||
                      (!is_good && (status == FULMEN_ERROR_ARGUMENT ||
                                    status == FULMEN_ERROR_SHAPE || status == FULMEN_ERROR_DTYPE));
  if (!may_be) throw Broken(sentence(fulmen_status_name(status), ": ", said));
  const bool shows_a_text = said.ends_with('^');  // an expression's line, and a caret below it
  const bool is_text = std::all_of(said.begin(), said.end(),
                                   [&](char c) { return c >= ' ' || (shows_a_text && c == '\n'); });
  if (!is_text || std::count(said.begin(), said.end(), ' ') < 3) {
    throw Broken("no sentence: '" + said + "'");
  }
}

}  // namespace fulmen::test
