// A large message that two processes copy together: the receiver reads pieces from its front, the sender, while a
// thread of it waits, writes pieces from its end. One core copies about half of what two do.
//
// What nobody has taken yet is one word in memory that both have mapped; who takes a piece moves its end of it. The
// sender writes no piece that it has not taken, and the word says how many those are. So the receiver has its memory
// to itself once as many were written, whatever the sender does meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/clock.h"

namespace dcoll {

class alignas(64) SharedPieces {
 public:
  // Of a message of so many bytes: half of it and at most 1 MiB, since one waits for the other's last piece; and so
  // that their number fits into 16 bits.
  static size_t piece_bytes(size_t bytes) {
    constexpr size_t kMost = size_t{1} << 20, kMostPieces = 0xffff;
    return std::max(std::min((bytes + 1) / 2, kMost), (bytes + kMostPieces - 1) / kMostPieces);
  }
  static size_t count(size_t bytes) { return (bytes + piece_bytes(bytes) - 1) / piece_bytes(bytes); }

  // ---- The receiver ----
  // message: a number that the sender is told; nobody else takes pieces.
  void begin(uint32_t message, size_t pieces) {
    pieces_ = pieces;
    written_.store(0, std::memory_order_relaxed);
    failed_.store(0, std::memory_order_relaxed);
    left_.store(pack({message, 0, static_cast<uint32_t>(pieces)}), std::memory_order_release);
  }
  std::optional<size_t> take_first() {
    return take([](const Left&) { return true; }, [](Left& left) { return left.first++; });
  }
  uint32_t message() const { return unpack(left_.load(std::memory_order_relaxed)).message; }
  // The sender takes no more.
  void close() {
    while (take_first()) {
    }
  }
  // The same, and waits until it is settled, or until then. Whether it is.
  bool settle_by(Clock::time_point end) {
    close();
    while (!settled()) {
      if (Clock::now() >= end) return false;
      cpu_relax();
    }
    return true;
  }
  // Whether nothing is left and all that the sender took is written, or was given back.
  bool settled() const {
    const Left left = unpack(left_.load(std::memory_order_acquire));
    const uint64_t done = written_.load(std::memory_order_acquire) + failed_.load(std::memory_order_acquire);
    return left.first == left.end && done == pieces_ - left.end;
  }
  // Once it is settled: the piece that the sender could not write.
  std::optional<size_t> given_back() const {
    if (failed_.load(std::memory_order_relaxed) == 0) return {};
    return unpack(left_.load(std::memory_order_relaxed)).end;
  }

  // ---- The sender ----
  std::optional<size_t> take_last(uint32_t message) {
    return take([message](const Left& left) { return left.message == message; }, [](Left& left) { return --left.end; });
  }
  void wrote() { written_.fetch_add(1, std::memory_order_release); }
  // The piece taken last; it takes no other.
  void could_not_write() { failed_.store(1, std::memory_order_release); }

 private:
  struct Left {
    uint32_t message, first, end;
  };
  static uint64_t pack(const Left& left) { return uint64_t{left.message} << 32 | left.first << 16 | left.end; }
  static Left unpack(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word >> 16 & 0xffff),
            static_cast<uint32_t>(word & 0xffff)};
  }

  template <typename Mine, typename Take>
  std::optional<size_t> take(Mine mine, Take take) {
    uint64_t before = left_.load(std::memory_order_acquire);
    for (;;) {
      Left left = unpack(before);
      if (left.first >= left.end || !mine(left)) return {};
      const size_t piece = take(left);
      if (left_.compare_exchange_weak(before, pack(left), std::memory_order_acq_rel, std::memory_order_acquire)) {
        return piece;
      }
    }
  }

  std::atomic<uint64_t> left_{0};
  std::atomic<uint64_t> written_{0}, failed_{0};
  uint64_t pieces_ = 0;  // the receiver's
};

}  // namespace dcoll
