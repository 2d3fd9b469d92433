// Selections that go by owners, against a naive twin: what is passed on and what is kept are all there was.
#include "kernels/topk_owners.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>

#include "support/check.h"

namespace dcoll {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
using Values = std::vector<float>;
using Message = std::vector<std::byte>;

uint32_t magnitude(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffff;
}

// Whole numbers, so sums are exact; a cluster that all ranks select, and ties.
Values values_of(size_t count, unsigned rank) {
  std::mt19937 dice(test::seed() + rank + 17 * static_cast<unsigned>(count));
  Values values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] =
        static_cast<float>(static_cast<int>(dice() % 101) - 50) + (i > count / 2 && i < count / 2 + 40 ? 90 : 0);
  }
  return values;
}

Message selection_of(const Values& values, size_t k) {
  Message message(kernels::top_bytes(values.size(), k));
  kernels::encode_top(message.data(), values.data(), values.size(), k);
  return message;
}

Values decoded(const void* message, size_t count, size_t k) {
  Values values(count);
  CHECK_EQ(kernels::sum_top(values.data(), {&message, 1}, count, k), 1u);
  return values;
}

// What comes to one owner, from all ranks.
struct Arrived {
  std::vector<Message> messages;
  std::vector<size_t> elements;

  size_t merge(Message& merged, size_t count, size_t k, float* left) const {
    std::vector<const void*> all;
    for (const Message& one : messages) all.push_back(one.data());
    return kernels::merge_top(merged.data(), all, elements, count, k, left);
  }
};

std::vector<Arrived> cut(const std::vector<Message>& selections, size_t count, size_t k, size_t owners) {
  std::vector<Arrived> arrived(owners);
  for (const Message& selection : selections) {
    const kernels::SplitTop split = kernels::split_top(selection.data(), count, k, owners);
    size_t at = 0;
    for (size_t owner = 0; owner < owners; ++owner) {
      const size_t n = split.elements[owner], bytes = kernels::top_bytes(count, n);
      const auto begin = split.messages.begin() + static_cast<std::ptrdiff_t>(at);
      arrived[owner].messages.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(bytes));
      arrived[owner].elements.push_back(n);
      at += bytes;
    }
    CHECK_EQ(at, split.messages.size());
  }
  return arrived;
}

// The sum of `selections` where `owner` owns it: what it passes on of k, of equal ones the first, and what it keeps.
void check_owner(const Arrived& arrived, const Values& whole, size_t owner, size_t owners, size_t k) {
  const size_t count = whole.size();
  std::vector<size_t> order;
  for (size_t i = 0; i < count; ++i) {
    if (kernels::owner_of(i, owners) == owner && whole[i] != 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return magnitude(whole[a]) > magnitude(whole[b]); });
  Values passed(count), kept(count, 0.5f), left(count, 0.5f);
  for (size_t n = 0; n < order.size(); ++n) (n < k ? passed : kept)[order[n]] += whole[order[n]];
  Message merged(kernels::top_bytes(count, k) + 1, std::byte{7});
  CHECK_EQ(arrived.merge(merged, count, k, left.data()), arrived.messages.size());
  CHECK(merged.back() == std::byte{7});
  CHECK(decoded(merged.data(), count, k) == passed);
  CHECK(left == kept);
  arrived.merge(merged, count, k, nullptr);
  CHECK(decoded(merged.data(), count, k) == passed);
}

TEST(owners_pass_on_the_greatest_and_keep_the_rest) {
  for (const size_t count :
       {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{5000}, size_t{65536}, size_t{140001}}) {
    for (const size_t ranks : {1, 2, 3, 8}) {
      const size_t k = kernels::top_count(count, 0.03f);
      std::vector<Message> selections;
      Values whole(count);
      for (unsigned rank = 0; rank < ranks; ++rank) {
        selections.push_back(selection_of(values_of(count, rank), k));
        const Values sent = decoded(selections.back().data(), count, k);
        for (size_t i = 0; i < count; ++i) whole[i] += sent[i];
      }
      const std::vector<Arrived> arrived = cut(selections, count, k, ranks);
      for (size_t owner = 0; owner < ranks; ++owner) {
        for (const size_t most : {size_t{0}, (k + ranks - 1) / ranks, count}) {
          check_owner(arrived[owner], whole, owner, ranks, most);
        }
      }
    }
  }
}

TEST(infinities_are_passed_on_and_do_not_stay) {
  Values values(200, 1.0f), left(200);
  values[3] = values[70] = kInfinity;
  values[50] = NAN;
  const std::vector<Arrived> arrived = cut({selection_of(values, 100)}, 200, 100, 1);
  Message merged(kernels::top_bytes(200, 2));
  arrived[0].merge(merged, 200, 2, left.data());
  const Values sum = decoded(merged.data(), 200, 2);
  CHECK(std::isnan(sum[50]) && sum[3] == kInfinity && sum[70] == 0);
  CHECK(left[70] == 0 && left[0] == 1 && left[3] == 0);
}

// Wherever the selected are: at random, side by side, or in columns of a matrix.
TEST(owners_have_about_as_much_each) {
  constexpr size_t kCount = 1 << 19, kMost = 5000;
  for (const size_t owners : {2, 3, 7, 16}) {
    for (int shape = 0; shape < 3; ++shape) {
      Values values(kCount);
      std::mt19937 dice(1);
      for (size_t n = 0; n < kMost; ++n) {
        values[shape == 0 ? dice() % kCount : shape == 1 ? 40000 + n * 7 : n / 5 * 512 + n % 5] = 1;
      }
      const kernels::SplitTop split = kernels::split_top(selection_of(values, kMost).data(), kCount, kMost, owners);
      const size_t total = static_cast<size_t>(std::count(values.begin(), values.end(), 1.0f));
      for (const size_t n : split.elements) CHECK(n < 1.35 * static_cast<double>(total) / static_cast<double>(owners));
    }
  }
}

TEST(damaged_messages_are_refused) {
  constexpr size_t kCount = 70000, kMost = 70;
  const std::vector<Arrived> arrived = cut({selection_of(values_of(kCount, 1), kMost)}, kCount, kMost, 1);
  std::mt19937 dice(static_cast<unsigned>(test::seed()));
  Message merged(kernels::top_bytes(kCount, kMost) + 1, std::byte{7});
  Values left(kCount + 1, -3.0f);
  size_t refused = 0;
  for (int turn = 0; turn < 2000; ++turn) {
    Arrived bad = arrived[0];
    bad.messages.push_back(bad.messages[0]);
    bad.elements.push_back(bad.elements[0]);
    Message& message = bad.messages[1];
    for (int flips = 0; flips < 3; ++flips) {
      message[dice() % (turn % 2 == 0 ? 8 : message.size())] = static_cast<std::byte>(dice());
    }
    const size_t first_bad = bad.merge(merged, kCount, kMost, left.data());
    CHECK(first_bad == 1 || first_bad == 2);
    CHECK(merged.back() == std::byte{7} && left[kCount] == -3.0f);
    refused += first_bad == 1;
  }
  CHECK(refused > 500);
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
