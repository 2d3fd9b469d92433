// One call of each kind, one after the other, on kRanks ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "faulty_transport.h"

namespace dcoll::test {

inline constexpr size_t kCount = 6000;  // divisible by the number of ranks; more than goes along with a handshake

class Script {
 public:
  explicit Script(Communicator& comm)
      : comm_(comm), in_(kCount), out_(kCount * kRanks), splits_(kRanks, kCount / kRanks) {}

  static constexpr int kSteps = 9;
  // The call, and a look at what it brought.
  void step(int number) {
    std::iota(in_.begin(), in_.end(), comm_.rank());
    std::fill(out_.begin(), out_.end(), -1.0f);
    const size_t count = number == 0 ? 2 : kCount, share = kCount / kRanks;
    Request request{.kind = Kind::kAllReduce, .in = in_.data(), .out = out_.data(), .count = count};
    const auto rank = static_cast<size_t>(comm_.rank());
    const auto sum = [](size_t i) { return static_cast<float>(kRanks * i + kRanks * (kRanks - 1) / 2); };
    const auto from = [](size_t source, size_t i) { return static_cast<float>(source + i); };
    switch (number) {
      case 0:
      case 1:
      case 2:  // on the caller's thread, as far as possible
        if (number < 2) {
          comm_.wait(*comm_.submit(std::move(request)));
        } else if (const auto operation = comm_.run_or_submit(request.call())) {
          comm_.wait(*operation);
        }
        return look(count, sum);
      case 3: {
        request.kind = Kind::kBroadcast;
        request.root = 2;
        request.in = request.out = in_.data();
        request.count = kCount * sizeof(float);
        run(std::move(request));
        out_ = in_;
        out_.resize(kCount * kRanks);
        return look(kCount, [&](size_t i) { return from(2, i); });
      }
      case 4:
        request.kind = Kind::kAllGather;
        request.row_elems = sizeof(float);
        request.out_bytes = kCount * kRanks * sizeof(float);
        run(std::move(request));
        return look(kCount * kRanks, [&](size_t i) { return from(i / kCount, i % kCount); });
      case 5:
        request.kind = Kind::kReduceScatter;
        run(std::move(request));
        return look(share, [&](size_t i) { return sum(i + rank * share); });
      case 6:
        request.kind = Kind::kAllToAll;
        request.row_elems = sizeof(float);
        request.splits = splits_;
        request.out_bytes = kCount * sizeof(float);
        run(std::move(request));
        return look(kCount, [&](size_t i) { return from(i / share, i % share + rank * share); });
      case 7:
        request.kind = Kind::kBarrier;
        return run({.kind = Kind::kBarrier});
      default:
        request.name = "of a name";
        comm_.wait(*comm_.submit_by_name(std::move(request)));
        return look(kCount, sum);
    }
  }

 private:
  void run(Request request) { comm_.wait(*comm_.run_or_submit(std::move(request))); }

  template <typename Expected>
  void look(size_t count, Expected expected) {
    for (size_t i = 0; i < count; ++i) {
      if (out_[i] != expected(i)) throw std::logic_error("wrong result at " + std::to_string(i));
    }
  }

  Communicator& comm_;
  std::vector<float> in_, out_;
  const std::vector<size_t> splits_;
};

}  // namespace dcoll::test
