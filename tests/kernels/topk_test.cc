// Top-k against a sort, with the same bytes from every instruction set.
#include "kernels/topk.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "kernels/reference.h"

namespace dcoll {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
using Values = std::vector<float>;

uint32_t magnitude(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffff;
}

// The numbers of the k greatest but for zeros, ascending.
std::vector<size_t> naive_top(const Values& values, size_t k) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return magnitude(values[a]) > magnitude(values[b]); });
  order.resize(k);
  std::erase_if(order, [&](size_t i) { return values[i] == 0; });
  std::sort(order.begin(), order.end());
  return order;
}

Values only(const Values& values, const std::vector<size_t>& numbers, float scale) {
  Values result(values.size());
  for (const size_t i : numbers) result[i] += values[i] * scale;  // a sum is never -0
  return result;
}

bool same(const Values& a, const Values& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::vector<char> message_of(const Values& values, size_t k, size_t sent, const kernels::Feedback& feedback = {}) {
  std::vector<char> message(kernels::top_bytes(values.size(), k) + 1, 'x');
  CHECK_EQ(kernels::encode_top(message.data(), values.data(), values.size(), k, feedback), sent);
  CHECK_EQ(message.back(), 'x');
  message.pop_back();
  return message;
}

Values sum_of(const std::vector<std::vector<char>>& messages, size_t count, size_t k, float factor = 1) {
  Values sum(count, -3.0f);
  std::vector<const void*> all;
  for (const auto& message : messages) all.push_back(message.data());
  CHECK_EQ(kernels::sum_top(sum.data(), all, count, k, factor), messages.size());
  return sum;
}

enum class Shape { kNormal, kEqual, kFew, kZero, kClustered, kQuantized, kSubnormal, kShapes };

Values values_of(Shape shape, size_t count, unsigned seed) {
  std::mt19937 dice(seed);
  std::normal_distribution<float> normal;
  Values values(count);
  for (size_t i = 0; i < count; ++i) {
    const float x = normal(dice);
    switch (shape) {
      case Shape::kNormal:
        values[i] = x;
        break;
      case Shape::kEqual:
        values[i] = x < 0 ? -2.5f : 2.5f;
        break;
      case Shape::kFew:
        values[i] = dice() % 1000 == 0 ? x : 0;
        break;
      case Shape::kClustered:
        values[i] = i > count / 2 && i < count / 2 + count / 50 ? 100 + x : x * 1e-3f;
        break;
      case Shape::kQuantized:
        values[i] = std::round(x);
        break;
      case Shape::kSubnormal:
        values[i] = x * 1e-40f;
        break;
      default:
        break;
    }
  }
  return values;
}

const std::vector<size_t> kSizes = {0, 1, 2, 15, 16, 17, 1000, 4095, 4096, 5001, 65535, 65536, 65537, 140001};

void check_selection() {
  for (const size_t count : kSizes) {
    for (int shape = 0; shape < static_cast<int>(Shape::kShapes); ++shape) {
      const Values values = values_of(static_cast<Shape>(shape), count, test::seed() + static_cast<unsigned>(count));
      for (const size_t k : {size_t{0}, size_t{1}, count / 1000, count / 100, count / 3, count}) {
        if (k > count) continue;
        const std::vector<size_t> top = naive_top(values, k);
        const std::vector<char> message = message_of(values, k, top.size());
        CHECK(same(sum_of({message}, count, k, 0.5f), only(values, top, 0.5f)));
      }
    }
  }
}

// What is sent and what is kept are what came in and what was kept, to the bit.
void check_feedback() {
  for (const size_t count : {size_t{1000}, size_t{70001}}) {
    for (int shape = 0; shape < static_cast<int>(Shape::kShapes); ++shape) {
      const Values values = values_of(static_cast<Shape>(shape), count, test::seed()),
                   before = values_of(Shape::kNormal, count, test::seed() + 1);
      Values whole(count), velocity = values_of(Shape::kQuantized, count, test::seed() + 2), moved = velocity,
                           error = before;
      for (size_t i = 0; i < count; ++i) whole[i] = before[i] + values[i];
      const size_t k = count / 50;
      std::vector<size_t> top = naive_top(whole, k);
      CHECK(same(sum_of({message_of(values, k, top.size(), {.error = error.data()})}, count, k), only(whole, top, 1)));
      for (const size_t i : top) whole[i] = 0;
      CHECK(same(error, whole));

      error = before;
      for (size_t i = 0; i < count; ++i) {
        moved[i] = 0.5f * moved[i] + values[i];
        whole[i] = before[i] + moved[i];
      }
      top = naive_top(whole, k);
      const kernels::Feedback feedback{error.data(), velocity.data(), 0.5f};
      CHECK(same(sum_of({message_of(values, k, top.size(), feedback)}, count, k), only(whole, top, 1)));
      for (const size_t i : top) whole[i] = moved[i] = 0;
      CHECK(same(error, whole) && same(velocity, moved));
    }
  }
}

void check_infinities() {
  for (const size_t count : {size_t{100}, size_t{20000}}) {
    Values values(count, 1.0f), error(count), velocity(count);
    for (const size_t i : {3, 50, 70}) values[i] = i == 50 ? NAN : -kInfinity;
    const Values sum = sum_of({message_of(values, 2, 2, {error.data(), velocity.data(), 0.9f})}, count, 2);
    CHECK(std::isnan(sum[50]) && sum[3] == -kInfinity && sum[70] == 0 && sum[0] == 0);
    // What was left behind would be infinite for ever.
    CHECK(error[70] == 0 && velocity[70] == 0 && error[0] == 1 && error[3] == 0);
  }
}

void check_sums() {
  constexpr size_t kCount = 70000, kMost = 900;
  std::vector<std::vector<char>> messages;
  Values expected(kCount);
  for (unsigned rank = 0; rank < 3; ++rank) {
    const Values values = values_of(Shape::kNormal, kCount, rank);
    const std::vector<size_t> top = naive_top(values, kMost);
    messages.push_back(message_of(values, kMost, top.size()));
    for (const size_t i : top) expected[i] += values[i];
  }
  for (float& x : expected) x *= 1.0f / 3;
  CHECK(same(sum_of(messages, kCount, kMost, 1.0f / 3), expected));
}

template <class Body>
void for_each_isa(Body body) {
  for (const std::string& isa : test::available_isas()) {
    CHECK(kernels::set_isa(isa));
    body();
  }
}

TEST(the_greatest_are_sent) { for_each_isa(check_selection); }
TEST(nothing_is_lost_with_feedback) { for_each_isa(check_feedback); }
TEST(infinities_arrive_and_do_not_stay) { for_each_isa(check_infinities); }
TEST(sums_are_in_order_of_ranks) { for_each_isa(check_sums); }

TEST(damaged_messages_are_refused) {
  constexpr size_t kCount = 70000, kMost = 70;
  const Values values = values_of(Shape::kNormal, kCount, 1);
  const std::vector<char> good = message_of(values, kMost, kMost);
  std::mt19937 dice(static_cast<unsigned>(test::seed()));
  Values sum(kCount + 1, -3.0f);
  size_t refused = 0;
  for (int turn = 0; turn < 2000; ++turn) {
    std::vector<char> bad = good;
    for (int flips = 0; flips < 3; ++flips) bad[dice() % (turn % 2 == 0 ? 8 : bad.size())] = static_cast<char>(dice());
    const void* const both[] = {good.data(), bad.data()};
    const size_t first_bad = kernels::sum_top(sum.data(), both, kCount, kMost);
    CHECK(first_bad == 1 || first_bad == 2);
    CHECK_EQ(sum[kCount], -3.0f);
    refused += first_bad == 1;
  }
  CHECK(refused > 500);
}

TEST(shares) {
  CHECK_EQ(kernels::top_count(0, 0.5f), 0u);
  CHECK_EQ(kernels::top_count(10, 0.01f), 1u);
  CHECK_EQ(kernels::top_count(1000, 0.01f), 10u);
  CHECK_EQ(kernels::top_count(1000, 1.0f), 1000u);
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
