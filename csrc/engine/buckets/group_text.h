// What a group of tensors is called in messages and in what ranks compare: the first few in words, all of them as a
// hash.
#pragma once

#include <array>
#include <cstddef>
#include <cstdio>
#include <string>

#include "base/hash.h"

namespace dcoll {

// "100 tensors: 1024 float32, 8 float32, 3 int64, ... #1b2c3d4e". text(i): the i-th tensor, all there is to compare;
// add(fingerprint, i): the same in numbers.
template <typename Text, typename Add>
std::string group_text(size_t count, Text text, Add add) {
  constexpr size_t kShown = 3;
  std::string shown = std::to_string(count) + (count == 1 ? " tensor" : " tensors");
  for (size_t i = 0; i < count && i < kShown; ++i) shown += (i == 0 ? ": " : ", ") + text(i);
  if (count <= kShown) return shown;
  Fingerprint all;
  for (size_t i = 0; i < count; ++i) add(all, i);
  std::array<char, 16> hash{};
  std::snprintf(hash.data(), hash.size(), " #%08x", static_cast<unsigned>(all.value() & 0xffffffff));
  return shown + ", ..." + hash.data();
}

}  // namespace dcoll
