#include "device/descriptors.h"

#include <poll.h>
#include <sys/random.h>

#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fork.h"
#include "base/hash.h"
#include "base/thread.h"
#include "base/thread_safety.h"
#include "transport/mapped/shm_socket.h"

namespace dcoll::device {
namespace {

constexpr uint64_t kDescriptorMagic = 0x73656c69666c6364ull;  // CUDA does not tell what its handles begin with
constexpr int kMostWaiting = 1024;                            // connections that the kernel keeps for a listener
constexpr std::chrono::seconds kLongestAnswer{10};            // of a thread that does nothing else

struct Ticket {
  uint64_t magic;
  uint64_t listener[2];
  uint64_t number;
  uint64_t bytes;
};
static_assert(sizeof(Ticket) <= sizeof(Handle));

Ticket ticket_of(const Handle& handle) {
  Ticket ticket;
  std::memcpy(&ticket, handle.data(), sizeof ticket);
  return ticket;
}

std::string address_of(const Ticket& ticket) {
  return "dcoll-memory-" + hex(ticket.listener[0]) + hex(ticket.listener[1]);
}

bool is_own_user(const Fd& socket) { return peer_credentials(socket).uid == geteuid(); }

class Shower {
 public:
  // Never destroyed: its thread ends with the process.
  static Shower& get() {
    static auto* shower = new Shower;
    return *shower;
  }
  Ticket show(Fd descriptor, size_t bytes) {
    const MutexLock lock(mutex_);
    if (!listens_in_ || listens_in_->in_child()) listen();
    own_.bytes = bytes;
    shown_.emplace(++own_.number, std::move(descriptor));
    return own_;
  }
  void hide(uint64_t number) {
    const MutexLock lock(mutex_);
    shown_.erase(number);
  }

 private:
  void listen() DCOLL_REQUIRES(mutex_) {
    if (getrandom(own_.listener, sizeof own_.listener, 0) != sizeof own_.listener) throw Error("no random numbers");
    Fd listener = listen_at(address_of(own_), kMostWaiting);
    try {
      std::thread([this, socket = std::move(listener)] { serve(socket); }).detach();
    } catch (const std::system_error& e) {
      throw Error(no_thread_text(e));
    }
    listens_in_.emplace();
  }
  // Whoever connects and asks for nothing delays nobody.
  void serve(const Fd& listener) {
    std::vector<Fd> asking;
    for (;;) {
      std::vector<pollfd> polled{{listener.get(), POLLIN, 0}};
      for (const Fd& socket : asking) polled.push_back({socket.get(), POLLIN, 0});
      if (poll(polled.data(), polled.size(), -1) < 0) continue;
      for (size_t i = 0; i < asking.size(); ++i) {
        if (polled[i + 1].revents == 0) continue;
        answer(asking[i]);
        asking[i].reset();
      }
      std::erase_if(asking, [](const Fd& socket) { return !socket; });
      try {
        while (Fd socket = accept_from(listener)) {
          if (is_own_user(socket)) asking.push_back(std::move(socket));
        }
      } catch (const TransportError&) {  // too many open files, which may pass: who waits has a deadline
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
  }
  void answer(const Fd& socket) {
    uint64_t number = 0;
    if (receive_packet(socket, &number, sizeof number) != Received::kPacket) return;
    const MutexLock lock(mutex_);
    const auto found = shown_.find(number);
    if (found == shown_.end()) return;
    const int descriptor = found->second.get();
    send_packet(socket, &number, sizeof number, std::span(&descriptor, 1));
  }

  Mutex mutex_;
  std::optional<ForkGuard> listens_in_ DCOLL_GUARDED_BY(mutex_);         // the process of the thread
  Ticket own_ DCOLL_GUARDED_BY(mutex_){kDescriptorMagic, {0, 0}, 0, 0};  // the last one
  std::map<uint64_t, Fd> shown_ DCOLL_GUARDED_BY(mutex_);                // by number
};

Fd ask_for(const Ticket& ticket) {
  const Fd socket = connect_to(address_of(ticket));
  if (!socket || !is_own_user(socket)) {
    throw Error("the process that shows it has ended, or is in a network namespace of its own");
  }
  const auto deadline = Clock::now() + kLongestAnswer;
  uint64_t number = ticket.number;
  Fd descriptor;
  send_packet(socket, &number, sizeof number);
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd answered{socket.get(), POLLIN, 0};
    if (left <= 0) throw Error("the process that shows it does not answer");
    if (poll(&answered, 1, static_cast<int>(left)) <= 0) continue;
    const Received got = receive_packet(socket, &number, sizeof number, std::span(&descriptor, 1));
    if (got == Received::kPacket && descriptor) return descriptor;
    if (got != Received::kNothingYet) throw Error("the process that has shown it does so no more");
  }
}

}  // namespace

Handle show_descriptor(const std::string& whose, Fd descriptor, size_t bytes) {
  try {
    const Ticket ticket = Shower::get().show(std::move(descriptor), bytes);
    Handle handle{};
    std::memcpy(handle.data(), &ticket, sizeof ticket);
    return handle;
  } catch (const Error& e) {
    throw DeviceError(whose + ": its memory cannot be shown: " + e.what());
  }
}

void hide_descriptor(const Handle& handle) noexcept { Shower::get().hide(ticket_of(handle).number); }

bool has_descriptor(const Handle& handle) { return ticket_of(handle).magic == kDescriptorMagic; }

Taken take_descriptor(const std::string& whose, const Handle& handle) {
  try {
    const Ticket ticket = ticket_of(handle);
    return {ask_for(ticket), ticket.bytes};
  } catch (const Error& e) {
    throw DeviceError(whose + ": memory of another process cannot be opened: " + e.what());
  }
}

}  // namespace dcoll::device
