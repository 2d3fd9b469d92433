// Shared by the transport tests: ranks as threads (on_threads), and waiting that ends.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/threads.h"
#include "transport/bell.h"
#include "transport/endpoint.h"

namespace dcoll::test {

// A wait that takes this long is a hang or a lost wake-up. Generous: sanitizers and busy machines are slow.
inline constexpr std::chrono::seconds kHang{20};

// Polls until done() holds.
inline void poll_until(const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + kHang;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("hang: polled in vain");
    std::this_thread::yield();
  }
}

// Sleeps until done() holds, only ever woken by the peers: a single wait may last as long as a hang.
inline void sleep_until(Transport& t, const std::function<bool()>& done) {
  for (;;) {
    const uint32_t ticket = t.prepare_wait();
    if (done()) return;
    const auto before = std::chrono::steady_clock::now();
    t.wait(ticket, kHang);
    if (std::chrono::steady_clock::now() - before >= kHang) throw std::runtime_error("lost wake-up");
  }
}

// The same, asleep on the bell.
inline void sleep_on_bell_until(Transport& t, const std::function<bool()>& done) {
  Bell& bell = *t.bell();
  for (;;) {
    const uint32_t ticket = t.prepare_wait();
    if (done()) return;
    if (!bell.begin_wait(ticket)) continue;
    pollfd rung{bell.descriptor(), POLLIN, 0};
    const int ready = poll(&rung, 1, static_cast<int>(std::chrono::milliseconds(kHang).count()));
    bell.end_wait();
    if (ready == 0) throw std::runtime_error("lost ring");
    take_ring(bell.descriptor());
  }
}

// Byte i of message k: different for neighbouring messages and positions.
inline std::byte pattern(uint64_t k, size_t i) { return static_cast<std::byte>((k * 131 + i * 7 + (i >> 8)) & 0xff); }
inline std::vector<std::byte> message(uint64_t k, size_t bytes) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = pattern(k, i);
  return data;
}
inline bool is_message(const std::byte* data, uint64_t k, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] != pattern(k, i)) return false;
  }
  return true;
}

// One whole message, polling.
inline void send(Transport& t, int peer, int channel, const std::vector<std::byte>& data) {
  poll_until([&] { return t.post_send(peer, channel, data.data(), data.size()); });
}
inline std::vector<std::byte> receive(Transport& t, int peer, int channel, size_t bytes) {
  std::vector<std::byte> data(bytes);
  if (!t.post_recv(peer, channel, data.data(), bytes)) throw std::runtime_error("receive with receives pending");
  poll_until([&] { return t.front(peer, channel) != nullptr; });
  t.pop(peer, channel);
  return data;
}

}  // namespace dcoll::test
