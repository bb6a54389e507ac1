// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kinds of damage, each as likely as the others.

#include "fuzz/damage.h"

#include <cstring>
#include <iterator>
#include <limits>

#include "core/error.h"

namespace fulmen::test {
namespace {

constexpr i64 kMost = std::numeric_limits<i64>::max();
constexpr i64 kLeast = std::numeric_limits<i64>::min();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool is_rank(const fulmen_tensor& tensor) { return tensor.rank >= 0 && tensor.rank <= kMaxRank; }

bool is_present(const fulmen_tensor& tensor) { return tensor.data != nullptr || tensor.rank != 0; }

// Bytes from the first to the last that a tensor says it has, -1 where no memory is as large.
i64 reach_of(const fulmen_tensor& tensor) {
  const int dtype = dtype_number(tensor);
  if (dtype < 1 || dtype >= static_cast<int>(std::size(kDTypeNames))) return -1;
  i64 last = 0;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    i64 reach = 0;
    if (tensor.shape[axis] == 0) return 0;
    if (tensor.shape[axis] == 1) continue;
    if (tensor.shape[axis] < 0 || tensor.shape[axis] > kMaxExtent || tensor.strides[axis] < 0 ||
        __builtin_mul_overflow(tensor.shape[axis] - 1, tensor.strides[axis], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return -1;
    }
  }
  const i64 bytes = size_bytes(static_cast<DType>(dtype));
  return last >= (i64{1} << 62) / bytes - 1 ? -1 : (last + 1) * bytes;
}

// Whether the tensor claims memory that is not there, which no library can see.
bool lies(const DrawnCall& call, const fulmen_tensor& tensor) {
  if (tensor.data == nullptr || !is_rank(tensor)) return false;
  const i64 reach = reach_of(tensor);
  return reach > 0 && block_of(call, tensor) == nullptr;
}

Array drawn_array(DrawnCall& call) {
  const Array array = static_cast<Array>(call.random.number(0, kNumArrays - 1));
  // Mostly one that is there.
  return call.has(array) || call.random.chance(0.3) ? array : Array::kQ;
}

int drawn_axis(DrawnCall& call, const fulmen_tensor& tensor) {
  return static_cast<int>(
      call.random.number(0, is_rank(tensor) && tensor.rank > 0 ? tensor.rank - 1 : kMaxRank - 1));
}

template <class Enum>
void set_number(Enum& field, i64 number) {
  const int value = static_cast<int>(number);
  std::memcpy(&field, &value, sizeof value);
}

// ---- Tensors -----------------------------------------------------------------------------------

void spoil_rank(DrawnCall& call, fulmen_tensor& tensor) {
  tensor.rank = static_cast<int32_t>(
      call.random.one_of<i64>({-1, -7, std::numeric_limits<int32_t>::min(), 0, 1, 2, 3, 4, 5, 9,
                               std::numeric_limits<int32_t>::max()}));
}

void spoil_extent(DrawnCall& call, fulmen_tensor& tensor) {
  int64_t& extent = tensor.shape[drawn_axis(call, tensor)];
  const i64 near = clamp<i64>(extent, 0, kMaxExtent);
  extent = call.random.one_of<i64>(
      {-1, kLeast, 0, 1, near - 1, near + 1, kMaxExtent, kMaxExtent + 1, i64{1} << 62, kMost});
}

void spoil_stride(DrawnCall& call, fulmen_tensor& tensor) {
  tensor.strides[drawn_axis(call, tensor)] =
      call.random.one_of<i64>({0, 1, -1, 2, kLeast, i64{1} << 62, kMost, kMost / 8});
}

void spoil_dtype(DrawnCall& call, fulmen_tensor& tensor) {
  set_number(tensor.dtype, call.random.one_of<i64>({-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 1 << 30}));
}

void spoil_pointer(DrawnCall& call, fulmen_tensor& tensor) {
  if (call.random.chance(0.3)) {
    tensor.data = nullptr;
  } else if (call.random.chance(0.4)) {
    const u64 before = static_cast<u64>(call.random.number(1, 9));
    tensor.data = reinterpret_cast<void*>(reinterpret_cast<u64>(tensor.data) - before);
  } else {  // into the memory of another array
    const Block& block = call.random.one_of<size_t>({0, 1}) == 0
                             ? call.blocks.back()
                             : call.blocks[static_cast<size_t>(call.random.number(
                                   2, static_cast<i64>(call.blocks.size()) - 1))];
    tensor.data = block.begin() + call.random.number(0, Block::kMarginBytes);
  }
}

void spoil_tensor_size(DrawnCall& call, fulmen_tensor& tensor) {
  tensor.struct_size =
      static_cast<size_t>(call.random.one_of<i64>({0, 1, 8, 80, 87, 96, -1, kMost}));
}

void fill_with_noise(DrawnCall& call, fulmen_tensor& tensor) {
  const u64 noise = call.random.word();
  for (int axis = 0; axis < kMaxRank; ++axis) {
    tensor.shape[axis] = static_cast<int64_t>(call.random.word() >> noise % 64);
    tensor.strides[axis] = static_cast<int64_t>(call.random.word() >> noise / 64 % 64);
  }
  tensor.rank = static_cast<int32_t>(call.random.word());
  tensor.data = nullptr;
}

using SpoilTensor = void (*)(DrawnCall& call, fulmen_tensor& tensor);
struct TensorDamage {
  const char* what;
  SpoilTensor spoil;
};
constexpr TensorDamage kTensorDamage[] = {
    {"rank", spoil_rank},       {"extent", spoil_extent},   {"stride", spoil_stride},
    {"dtype", spoil_dtype},     {"pointer", spoil_pointer}, {"size", spoil_tensor_size},
    {"noise", fill_with_noise},
};

// Until the tensor claims no memory that is not there.
std::string damage_tensor(DrawnCall& call) {
  const Array array = drawn_array(call);
  fulmen_tensor& tensor = call.at(array);
  const fulmen_tensor before = tensor;
  const TensorDamage& kind =
      kTensorDamage[call.random.number(0, static_cast<i64>(std::size(kTensorDamage)) - 1)];
  for (int attempt = 0; attempt < 20; ++attempt) {
    kind.spoil(call, tensor);
    if (!lies(call, tensor)) return sentence(kind.what, " of ", name(array));
    tensor = before;
  }
  return "nothing";
}

std::string remove_or_exchange(DrawnCall& call) {
  const Array array = drawn_array(call);
  const Array other = drawn_array(call);
  if (call.random.chance(0.5)) {
    fulmen_tensors absent;
    fulmen_tensors_init(&absent);
    call.at(array) = absent.q;
    return sentence("no ", name(array));
  }
  std::swap(call.at(array), call.at(other));
  return sentence(name(array), " and ", name(other), " exchanged");
}

std::string damage_contents(DrawnCall& call) {
  const Array array = call.random.one_of<Array>(
      {Array::kQLengths, Array::kKvLengths, Array::kCuQ, Array::kCuKv, Array::kQIds, Array::kRng});
  const Block* const block = block_of(call, call.at(array));
  if (block == nullptr || block->bytes <= Block::kMarginBytes) return "nothing";
  const size_t at = static_cast<size_t>(
      call.random.number(Block::kMarginBytes, static_cast<i64>(block->bytes) - 1));
  block->begin()[at] = static_cast<char>(call.random.word());
  return sentence("contents of ", name(array));
}

// ---- Options -----------------------------------------------------------------------------------

template <OptionKind kKind, class Field>
void spoil_option(DrawnCall& call, Field& field) {
  Random& random = call.random;
  constexpr i64 kWide = i64{1} << 31;
  if constexpr (kKind == OptionKind::kReal) {
    field =
        random.one_of<double>({0, -0.5, 1, 1.5, 1e-46, 1e-39, 1e38, 3.5e38, 1e300, 5e-324,
                               kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()});
  } else if constexpr (kKind == OptionKind::kText) {
    static const char* const kNames[] = {"", "h1000", "sm_", nullptr};
    field = kNames[random.number(0, 3)];
  } else if constexpr (kKind == OptionKind::kChoice) {
    set_number(field, random.number(-2, 8));
  } else if constexpr (kKind == OptionKind::kIndex) {
    field = static_cast<Field>(random.one_of<i64>({-2, -1, 0, 1, 99, kWide - 1}));
  } else {
    field = static_cast<Field>(
        random.one_of<i64>({-2, -1, 0, 1, 2, 7, kWide - 1, kWide, 2 * kWide, kMost, kLeast}));
  }
}

std::string damage_option(DrawnCall& call) {
  constexpr int kNumOptions = 0
#define FULMEN_OPTION(...) +1
#include "fulmen/options.def"
      ;
  i64 left = call.random.number(0, kNumOptions - 1);
  std::string what;
#define FULMEN_OPTION(kind, type, name, ...)                  \
  if (left-- == 0) {                                          \
    spoil_option<OptionKind::kind>(call, call.problem->name); \
    what = "option " #name;                                   \
  }
#include "fulmen/options.def"
  return what;
}

std::string damage_struct_size(DrawnCall& call) {
  const bool of_problem = call.random.chance(0.5);
  size_t& size = of_problem ? call.problem->struct_size : call.tensors->struct_size;
  const i64 known = of_problem ? i64{sizeof(fulmen_problem)} : i64{sizeof(fulmen_tensors)};
  size = static_cast<size_t>(call.random.one_of<i64>(
      {0, 1, 8, 15, 16, 24, known - 8, known - 1, known + 5000, -1, kMost}));
  return of_problem ? "struct_size of problem" : "struct_size of tensors";
}

}  // namespace

const Block* block_of(const DrawnCall& call, const fulmen_tensor& tensor) {
  const i64 reach = is_rank(tensor) ? reach_of(tensor) : -1;
  const char* const begin = static_cast<const char*>(tensor.data);
  for (const Block& block : call.blocks) {
    const bool begins_there = block.begin() <= begin && begin <= block.end();
    if (reach >= 0 && begins_there && reach <= block.end() - begin) return &block;
  }
  return nullptr;
}

std::string damage(DrawnCall& call) {
  switch (call.random.number(0, 9)) {
    case 0:
      return remove_or_exchange(call);
    case 1:
      return damage_contents(call);
    case 2:
    case 3:
      return damage_option(call);
    case 4:
      return damage_struct_size(call);
    default:
      return damage_tensor(call);
  }
}

std::string why_refused(const DrawnCall& call) {
  if (call.tensors->struct_size != sizeof(fulmen_tensors)) return "";
  for (int index = 0; index < kNumArrays; ++index) {
    const Array array = static_cast<Array>(index);
    const fulmen_tensor& tensor = call.at(array);
    if (!is_present(tensor)) continue;
    if (!is_rank(tensor)) return sentence(name(array), " has rank ", tensor.rank);
    for (int axis = 0; axis < tensor.rank; ++axis) {
      if (tensor.shape[axis] < 0 || tensor.shape[axis] > kMaxExtent) {
        return sentence(name(array), " has extent ", tensor.shape[axis]);
      }
      if (tensor.shape[axis] > 1 && tensor.strides[axis] < 0) {
        return sentence(name(array), " has stride ", tensor.strides[axis]);
      }
    }
  }
  return "";
}

}  // namespace fulmen::test
