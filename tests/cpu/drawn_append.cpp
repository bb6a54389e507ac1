// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The draw, request by request; the judgement, row by row.

#include "drawn_append.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace fulmen::test {
namespace {

constexpr i64 kNowhere = 123456789;  // in tables where no row may look

Tensor first_axes(Tensor tensor, int axis) {  // without one leading axis
  for (int i = axis; i + 1 < tensor.rank; ++i) {
    tensor.shape[i] = tensor.shape[i + 1];
    tensor.strides[i] = tensor.strides[i + 1];
  }
  --tensor.rank;
  return tensor;
}

bool is_nan_pattern(const char* address, i64 bytes) {
  return std::all_of(address, address + bytes, [](char byte) { return byte == '\xff'; });
}

double half_ulp(DType dtype, double x) {
  switch (dtype) {
    case DType::kFloat64:
      return std::fabs(x) * 0x1p-53;
    case DType::kFloat32:
      return std::fabs(x) * 0x1p-24;
    case DType::kFloat16:
      return std::max(std::fabs(x) * 0x1p-11, 0x1p-25);
    default:
      return std::fabs(x) * 0x1p-8;
  }
}

}  // namespace

DrawnAppend::DrawnAppend(unsigned seed, bool with_caches, bool faulty)
    : has_caches(with_caches), random_(seed), faulty_(faulty) {
  dtype_ = random_.one_of({DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64});
  index_ = random_.one_of({DType::kInt32, DType::kInt64});
  draw_sizes();
  draw_requests();
  if (has_caches) {
    draw_caches();
    random_.chance(0.5) ? draw_slots() : draw_tables();
  }
  if (!has_caches || random_.chance(0.7)) draw_rotation();
}

// In vectors: the last axis side by side, the others in any order.
Tensor DrawnAppend::array(DType dtype, const std::vector<i64>& shape) {
  if (!in_vectors_) return random_.array(dtype, shape);
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape);
  i64 stride = 1;
  const bool exchanged = tensor.rank == 4 && random_.chance(0.5);
  for (int place = tensor.rank; place-- > 0;) {
    const int axis = exchanged && (place == 1 || place == 2) ? 3 - place : place;
    tensor.strides[axis] = stride;
    stride *= max<i64>(tensor.shape[axis], 1);
    if (random_.chance(0.2)) stride += 16;
  }
  tensor.data = random_.memory(static_cast<size_t>(stride * size_bytes(dtype)));
  return tensor;
}

void DrawnAppend::draw_sizes() {
  in_vectors_ = random_.chance(0.5);
  packed_ = has_caches && random_.chance(0.4);
  batch_ = random_.number(1, 4);
  kv_heads_ = random_.number(1, 3);
  heads_ = kv_heads_ * random_.number(1, 3);
  dim_ = in_vectors_ ? 16 * random_.number(2, 5) : random_.number(2, 70);
  dim_v_ = random_.chance(0.5) ? dim_ : in_vectors_ ? 16 : random_.number(1, 40);
  page_size_ = random_.one_of({1, 2, 5, 16, 24});
}

void DrawnAppend::draw_requests() {
  begins_.push_back(packed_ ? random_.number(0, 2) : 0);
  const i64 equal = random_.number(1, 9);
  for (i64 b = 0; b < batch_; ++b) {
    begins_.push_back(begins_.back() + (packed_ ? random_.number(0, 9) : equal));
    lengths_.push_back(random_.number(0, 40));
  }
  rows_ = packed_ ? begins_.back() + random_.number(0, 3) : equal;
  for (i64 b = 0; b < batch_; ++b) {
    const i64 count = begins_[static_cast<size_t>(b) + 1] - begins_[static_cast<size_t>(b)];
    for (i64 i = 0; i < count; ++i) {
      drawn_.push_back({packed_ ? 0 : b, packed_ ? begins_[static_cast<size_t>(b)] + i : i, -1, 0,
                        lengths_[static_cast<size_t>(b)] + i, true});
    }
  }
  if (packed_) given.cu_new = random_.indices(index_, begins_);
}

Tensor DrawnAppend::new_rows(i64 heads, i64 dim) {
  const i64 entries = packed_ ? 1 : batch_;
  const Tensor all = array(dtype_, {entries, heads, rows_, dim});
  random_.fill_normal(all, 3);
  return all;
}

Tensor DrawnAppend::copy_of(const Tensor& tensor) {
  const Tensor copy = random_.twin(tensor);
  RandomProblem::for_each(tensor, [&](const i64* at) {
    std::memcpy(RandomProblem::address(copy, at), RandomProblem::address(tensor, at),
                static_cast<size_t>(size_bytes(tensor.dtype)));
  });
  return copy;
}

void DrawnAppend::draw_caches() {
  pages_ = (static_cast<i64>(drawn_.size()) + 60 * batch_) / page_size_ + batch_ + 3;
  Tensor k = new_rows(kv_heads_, dim_);
  Tensor v = new_rows(kv_heads_, dim_v_);
  RandomProblem::for_each(v, [&](const i64* at) {  // numbers of any bits are copied
    if (random_.chance(0.05)) std::memset(RandomProblem::address(v, at), 0xfe, 2);
  });
  k_before_ = k;
  v_before_ = v;
  given.k = packed_ ? first_axes(k, 0) : k;
  given.v = packed_ ? first_axes(v, 0) : v;
  if (dim_ == dim_v_ && random_.chance(0.5)) {  // one pool, K and V of a page beside each other
    const Tensor both = array(dtype_, {pages_, kv_heads_, 2 * page_size_, dim_});
    given.k_cache = given.v_cache = both;
    given.k_cache.shape[2] = given.v_cache.shape[2] = page_size_;
    given.v_cache.data = both.address(0, 0, page_size_, 0);
  } else {
    given.k_cache = array(dtype_, {pages_, kv_heads_, page_size_, dim_});
    given.v_cache = array(dtype_, {pages_, kv_heads_, page_size_, dim_v_});
  }
}

void DrawnAppend::spoil_slots(std::vector<i64>& slots) {
  for (Row& row : drawn_) {
    if (!faulty_ || !random_.chance(0.3)) continue;
    const i64 at = row.batch * rows_ + row.row;
    slots[static_cast<size_t>(at)] =
        random_.one_of({i64{-2}, pages_ * page_size_, i64{-2147483647}, i64{2147483647}});
    row.page = -1;
    faults |= kFaultSlots;
  }
}

void DrawnAppend::draw_slots() {
  std::vector<i64> order(static_cast<size_t>(pages_ * page_size_));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i-- > 1;) {
    std::swap(order[i], order[static_cast<size_t>(random_.number(0, static_cast<i64>(i)))]);
  }
  const i64 entries = packed_ ? 1 : batch_;
  std::vector<i64> slots(static_cast<size_t>(entries * rows_), kNowhere);
  for (size_t i = 0; i < drawn_.size(); ++i) {
    Row& row = drawn_[i];
    const bool skipped = random_.chance(0.2);
    row.page = skipped ? -1 : order[i] / page_size_;
    row.page_row = order[i] % page_size_;
    slots[static_cast<size_t>(row.batch * rows_ + row.row)] = skipped ? -1 : order[i];
  }
  spoil_slots(slots);
  given.slots = random_.indices(index_, slots);
  if (entries > 1) {
    given.slots.rank = 2;
    given.slots.shape[0] = entries;
    given.slots.shape[1] = rows_;
    given.slots.strides[0] = rows_;
    given.slots.strides[1] = 1;
  }
}

// Nothing of it is written.
void DrawnAppend::drop_request(i64 request, u32 fault) {
  const i64 begin = begins_[static_cast<size_t>(request)];
  const i64 end = begins_[static_cast<size_t>(request) + 1];
  for (Row& row : drawn_) {
    if (packed_ ? row.row < begin || row.row >= end : row.batch != request) continue;
    row.page = -1;
    row.has_q = false;
  }
  faults |= fault;
}

void DrawnAppend::spoil_tables(std::vector<i64>& table, std::vector<i64>& indptr,
                               std::vector<i64>& lengths) {
  if (!faulty_) return;
  if (random_.chance(0.2) && given.page_indptr.present()) {
    indptr.back() = random_.one_of({i64{-1}, static_cast<i64>(table.size()) + 1});
    drop_request(batch_ - 1, kFaultKvOffsets);
  }
  for (i64 b = 0; b < batch_; ++b) {
    if (!random_.chance(0.3)) continue;
    lengths[static_cast<size_t>(b)] = random_.one_of({i64{-1}, i64{1} << 30});
    drop_request(b, kFaultKvLengths);
  }
  for (Row& row : drawn_) {
    if (row.page < 0 || !random_.chance(0.2)) continue;
    const i64 page = row.page;
    i64& entry = *std::find(table.begin(), table.end(), page);
    entry = random_.one_of({i64{-1}, pages_, i64{2147483647}});
    for (Row& other : drawn_) {
      if (other.page == page) other.page = -1;
    }
    faults |= kFaultPages;
  }
}

void DrawnAppend::draw_tables() {
  std::vector<i64> ids(static_cast<size_t>(pages_));
  std::iota(ids.begin(), ids.end(), 0);
  std::reverse(ids.begin(), ids.end());
  const bool flat = random_.chance(0.4);
  std::vector<std::vector<i64>> tables;
  std::vector<i64> indptr{0};
  size_t row_index = 0, width = 0;
  for (i64 b = 0; b < batch_; ++b) {
    const i64 count = begins_[static_cast<size_t>(b) + 1] - begins_[static_cast<size_t>(b)];
    const i64 length = lengths_[static_cast<size_t>(b)];
    std::vector<i64>& table = tables.emplace_back(
        static_cast<size_t>(ceil_div(length + count, page_size_) + random_.number(0, 2)), kNowhere);
    for (i64 i = 0; i < count; ++i) {
      const i64 column = (length + i) / page_size_;
      i64& page = table[static_cast<size_t>(column)];
      if (page == kNowhere) {
        page = ids.back();
        ids.pop_back();
      }
      drawn_[row_index].page = page;
      drawn_[row_index++].page_row = (length + i) % page_size_;
    }
    indptr.push_back(indptr.back() + static_cast<i64>(table.size()));
    width = std::max(width, table.size());
  }
  std::vector<i64> all;
  for (std::vector<i64>& table : tables) {
    if (!flat) table.resize(width, kNowhere);
    all.insert(all.end(), table.begin(), table.end());
  }
  std::vector<i64> lengths = lengths_;
  if (flat) given.page_indptr = random_.indices(index_, indptr);  // its final numbers below
  spoil_tables(all, indptr, lengths);
  given.page_table = random_.indices(index_, all);
  given.kv_lengths = random_.indices(index_, lengths);
  if (flat) {
    given.page_indptr = random_.indices(index_, indptr);
  } else {
    given.page_table.rank = 2;
    given.page_table.shape[0] = batch_;
    given.page_table.shape[1] = static_cast<i64>(width);
    given.page_table.strides[0] = static_cast<i64>(width);
    given.page_table.strides[1] = 1;
  }
}

void DrawnAppend::spoil_positions(std::vector<i64>& positions) {
  for (Row& row : drawn_) {
    if (!faulty_ || !row.has_q || !random_.chance(0.2)) continue;
    positions[static_cast<size_t>(row.batch * rows_ + row.row)] =
        random_.one_of({i64{-1}, positions_, i64{2147483647}});
    row.page = -1;
    row.has_q = false;
    faults |= kFaultPositions;
  }
}

void DrawnAppend::draw_rotation() {
  interleaved_ = given.interleaved = random_.chance(0.5);
  rotary_dim_ = random_.chance(0.5) ? dim_ / 2 * 2 : 2 * random_.number(1, dim_ / 2);
  if (in_vectors_) rotary_dim_ = interleaved_ ? 16 * random_.number(1, dim_ / 16) : dim_ / 32 * 32;
  if (random_.chance(0.05)) rotary_dim_ = 0;
  positions_ = 80;
  const bool is_wide = random_.chance(0.6);
  const DType table = is_wide ? DType::kFloat32 : dtype_;
  for (Tensor* tensor : {&given.cos, &given.sin}) {
    *tensor = array(table, {positions_, rotary_dim_ / 2});
    random_.fill_normal(*tensor, 0.5);
  }
  if (!has_caches || random_.chance(0.6) || !given.kv_lengths.present()) {
    const i64 entries = packed_ ? 1 : batch_;
    std::vector<i64> positions(static_cast<size_t>(entries * rows_), -5);
    for (Row& row : drawn_) {
      row.position = random_.number(0, positions_ - 1);
      positions[static_cast<size_t>(row.batch * rows_ + row.row)] = row.position;
    }
    spoil_positions(positions);
    given.positions = random_.indices(index_, positions);
    if (entries > 1) {
      given.positions.rank = 2;
      given.positions.shape[0] = entries;
      given.positions.shape[1] = rows_;
      given.positions.strides[0] = rows_;
      given.positions.strides[1] = 1;
    }
  }
  if (!has_caches || random_.chance(0.6)) {
    const Tensor q = new_rows(heads_, dim_);
    q_before_ = copy_of(q);
    const Tensor out = random_.chance(0.3) ? q : random_.twin(q);
    given.q = packed_ ? first_axes(q, 0) : q;
    given.q_out = packed_ ? first_axes(out, 0) : out;
  }
}

std::string DrawnAppend::wrong_head(const char* from, i64 from_stride, const char* to,
                                    i64 to_stride, i64 dim, i64 position) const {
  const i64 turned = position >= 0 ? rotary_dim_ : 0;
  const i64 size = size_bytes(dtype_);
  const auto at = [&](const char* head, i64 stride, i64 d) { return head + d * stride * size; };
  for (i64 d = 0; d < dim; ++d) {
    if (d >= turned) {
      const bool equal = std::memcmp(at(from, from_stride, d), at(to, to_stride, d),
                                     static_cast<size_t>(size)) == 0;
      if (!equal) return sentence("element ", d, " is no copy");
      continue;
    }
    const i64 half = rotary_dim_ / 2;
    const i64 pair = interleaved_ ? d / 2 : d % half;
    const bool is_second = interleaved_ ? d % 2 == 1 : d >= half;
    const i64 other = interleaved_ ? d ^ 1 : is_second ? d - half : d + half;
    const i64 table_at[] = {position, pair, 0, 0};
    const long double cos = load_real(RandomProblem::address(given.cos, table_at), given.cos.dtype);
    const long double sin = load_real(RandomProblem::address(given.sin, table_at), given.sin.dtype);
    const long double mine = load_real(at(from, from_stride, d), dtype_);
    const long double turning = load_real(at(from, from_stride, other), dtype_);
    const long double exact = mine * cos + (is_second ? 1 : -1) * turning * sin;
    const double terms = static_cast<double>(std::fabs(mine * cos) + std::fabs(turning * sin));
    const double got = load_real(at(to, to_stride, d), dtype_);
    const double unit = dtype_ == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
    const double bound = 2 * unit * terms + half_ulp(dtype_, static_cast<double>(exact)) * 1.01;
    if (!(std::fabs(got - static_cast<double>(exact)) <= bound)) {
      return sentence("element ", d, " is ", got, " where ", static_cast<double>(exact),
                      " is exact");
    }
  }
  return "";
}

namespace {

Tensor with_batch(const Tensor& given) {
  if (given.rank == 4) return given;
  Tensor tensor = given;
  tensor.rank = 4;
  for (int axis = 3; axis > 0; --axis) {
    tensor.shape[axis] = given.shape[axis - 1];
    tensor.strides[axis] = given.strides[axis - 1];
  }
  tensor.shape[0] = 1;
  tensor.strides[0] = 0;
  return tensor;
}

}  // namespace

std::string DrawnAppend::wrong_row(const Row& row, const Tensor& from, const Tensor& to,
                                   bool is_k) const {
  const bool to_cache = to.data != nullptr && row.page >= 0;
  for (i64 head = 0; head < from.shape[1]; ++head) {
    const std::string found =
        wrong_head(from.address(row.batch, head, row.row, 0), from.strides[3],
                   to_cache ? to.address(row.page, head, row.page_row, 0) : nullptr, to.strides[3],
                   from.shape[3], is_k && rotary_dim_ > 0 ? row.position : -1);
    if (!found.empty()) return sentence("row ", row.row, " head ", head, ": ", found);
  }
  return "";
}

std::string DrawnAppend::wrong_after(const AppendProblem& after) const {
  const Tensor q_out = after.q_out.present() ? with_batch(after.q_out) : Tensor{};
  for (const Row& row : drawn_) {
    if (row.page >= 0) {
      std::string found = wrong_row(row, k_before_, after.k_cache, true);
      if (!found.empty()) return "k_cache " + found;
      found = wrong_row(row, v_before_, after.v_cache, false);
      if (!found.empty()) return "v_cache " + found;
    }
    if (!q_out.present() || !row.has_q) continue;
    for (i64 head = 0; head < heads_; ++head) {
      const std::string found = wrong_head(
          q_before_.address(row.batch, head, row.row, 0), q_before_.strides[3],
          q_out.address(row.batch, head, row.row, 0), q_out.strides[3], dim_, row.position);
      if (!found.empty()) return sentence("q_out row ", row.row, " head ", head, ": ", found);
    }
  }
  // What no row goes to is as it was.
  std::string found;
  const auto check_rest = [&](const Tensor& tensor, const char* name, const auto& was_written) {
    RandomProblem::for_each(tensor, [&](const i64* at) {
      if (was_written(at)) return;
      if (!is_nan_pattern(RandomProblem::address(tensor, at), size_bytes(tensor.dtype))) {
        found = sentence(name, "[", at[0], "][", at[1], "][", at[2], "][", at[3],
                         "] was written, where no row goes");
      }
    });
  };
  const auto goes_to = [&](const i64* at) {
    return std::any_of(drawn_.begin(), drawn_.end(),
                       [&](const Row& row) { return row.page == at[0] && row.page_row == at[2]; });
  };
  if (has_caches) {
    check_rest(after.k_cache, "k_cache", goes_to);
    check_rest(after.v_cache, "v_cache", goes_to);
  }
  if (q_out.present() && given.q_out.data != given.q.data) {
    check_rest(q_out, "q_out", [&](const i64* at) {
      return std::any_of(drawn_.begin(), drawn_.end(), [&](const Row& row) {
        return row.has_q && row.batch == at[0] && row.row == at[2];
      });
    });
  }
  return found;
}

bool DrawnAppend::is_untouched() const {
  bool untouched = true;
  const auto check = [&](const Tensor& tensor) {
    if (!tensor.present()) return;
    RandomProblem::for_each(tensor, [&](const i64* at) {
      untouched &= is_nan_pattern(RandomProblem::address(tensor, at), size_bytes(tensor.dtype));
    });
  };
  check(given.k_cache);
  check(given.v_cache);
  if (given.q_out.data != given.q.data) check(given.q_out);
  return untouched;
}

}  // namespace fulmen::test
