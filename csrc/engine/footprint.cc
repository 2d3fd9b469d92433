#include "engine/footprint.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <ctime>
#include <optional>

namespace dcoll {
namespace {

constexpr size_t kNameBytes = (Footprint::kWords - kNameWord) * sizeof(uint64_t);
using Words = std::array<uint64_t, Footprint::kWords>;

void leave(Footprint& to, uint64_t order, uint64_t time, Kind kind, DType dtype, ReduceOp op, size_t count,
           size_t row_elems, int root, std::string_view name) {
  const size_t bytes = std::min(name.size(), kNameBytes);
  const auto put = [&](size_t i, uint64_t value) { to.word[i].store(value, std::memory_order_relaxed); };
  const uint64_t version = to.version.load(std::memory_order_relaxed);
  to.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  put(0, order);
  put(1, footprint_kind(kind, dtype, op, bytes));
  put(2, count);
  put(3, time);
  put(4, uint64_t{row_elems} << 16 | static_cast<uint16_t>(root));
  for (size_t i = 0; i * sizeof(uint64_t) < bytes; ++i) {
    uint64_t part = 0;
    name.copy(reinterpret_cast<char*>(&part), std::min(sizeof part, bytes - i * sizeof part), i * sizeof part);
    put(kNameWord + i, part);
  }
  to.version.store(version + 2, std::memory_order_release);
}

// Nothing while it is being written: the owner is alive then, or was stopped in the middle.
std::optional<Words> copy(const Footprint& from) {
  Words words;
  constexpr int kTries = 100;
  for (int tried = 0; tried < kTries; ++tried) {
    const uint64_t before = from.version.load(std::memory_order_acquire);
    for (size_t i = 0; i < words.size(); ++i) words[i] = from.word[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (before % 2 == 0 && from.version.load(std::memory_order_relaxed) == before) return words;
  }
  return std::nullopt;
}

}  // namespace

uint64_t footprint_time() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);  // a third of the time of the exact one
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void leave_named_footprint(Footprint& to, uint64_t order, const ReduceCall& call) {
  leave(to, order, kNoTime, Kind::kAllReduce, call.dtype, call.op, call.count, 1, 0, call.name);
}

void leave_footprint(Footprint& to, uint64_t order, const Request& request, uint64_t time) {
  leave(to, order, time, request.kind, request.dtype, request.op, request.count, request.row_elems, request.root,
        request.name);
}

void leave_footprint(Footprint& to, uint64_t order, const PullCall& call) {
  leave(to, order, kNoTime, call.kind, call.dtype, call.op, call.count, call.row_elems, call.root, call.name);
}

const Footprint& later(const Footprint& a, const Footprint& b) {
  return a.word[0].load(std::memory_order_relaxed) < b.word[0].load(std::memory_order_relaxed) ? b : a;
}

std::string read_footprint(const Footprint& footprint) {
  const auto words = copy(footprint);
  if (!words) return "was stopped in an operation";
  const Words& w = *words;
  if (w[0] == 0) return "has finished no operation yet";
  const auto kind = std::min<uint64_t>(w[1] & 0xff, static_cast<uint64_t>(Kind::kJoin));
  const auto dtype = std::min<uint64_t>(w[1] >> 8 & 0xff, kNumDTypes - 1);
  const auto op = std::min<uint64_t>(w[1] >> 16 & 0xff, kNumReduceOps - 1);
  char name[kNameBytes];
  std::memcpy(name, &w[kNameWord], sizeof name);
  const Request last{.kind = static_cast<Kind>(kind),
                     .count = w[2],
                     .row_elems = w[4] >> 16,
                     .dtype = static_cast<DType>(dtype),
                     .op = static_cast<ReduceOp>(op),
                     .root = static_cast<int>(w[4] & 0xffff),
                     .name = std::string(name, std::min<uint64_t>(w[1] >> 24, kNameBytes))};
  const std::string text = "finished " + last.describe();
  if (w[3] == kNoTime) return text;
  const uint64_t now = footprint_time();
  return text + " " + std::to_string(now > w[3] ? (now - w[3]) / 1'000'000'000 : 0) + " s ago";
}

}  // namespace dcoll
