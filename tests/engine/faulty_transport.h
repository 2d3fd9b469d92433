// A transport that fails once: the k-th of its calls that had an effect throws, or says "not now". Or one that carries
// what was damaged.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "rank_threads.h"
#include "transport/mapped/local.h"
#include "transport/transport.h"

namespace dcoll::test {

inline constexpr int kRanks = 3, kCulprit = 1;
using World = std::vector<std::shared_ptr<Communicator>>;

struct Fault {
  std::atomic<int64_t> at{0};  // which call, from 1; 0: none
  bool refuses = false;
  std::atomic<int64_t> calls{0};
  std::atomic<int> connecting{0};                    // a first message needs so many looks
  std::function<void(std::byte*, size_t)> damage{};  // of every message that leaves
  std::vector<StallNote> notes{};                    // what the peers seem to have said
  std::vector<std::vector<int>> told{};              // whom this rank said to wait for
  std::atomic<int> frozen_ms{0};                     // the next look takes so long, as if the process did not run
  bool fired() const { return at > 0 && calls.load() >= at; }
};

class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> real, Fault& fault) : real_(std::move(real)), fault_(fault) {}

  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  const char* name() const override { return real_->name(); }
  size_t max_message_bytes() const override { return real_->max_message_bytes(); }
  bool post_send(int peer, int channel, const void* data, size_t bytes) override {
    if (fault_.damage) fault_.damage(static_cast<std::byte*>(const_cast<void*>(data)), bytes);
    return !strikes("post_send") && counts(real_->post_send(peer, channel, data, bytes));
  }
  std::byte* acquire_send(int peer, int channel, size_t bytes) override {
    room_ = {nullptr, bytes};
    if (strikes("acquire_send")) return nullptr;
    room_.first = real_->acquire_send(peer, channel, bytes);
    counts(room_.first != nullptr);
    return room_.first;
  }
  void commit_send(int peer, int channel) override {
    if (!fault_.refuses) strikes("commit_send");
    if (fault_.damage) fault_.damage(room_.first, room_.second);
    real_->commit_send(peer, channel);
  }
  uint64_t posted(int peer, int channel) const override { return real_->posted(peer, channel); }
  uint64_t sent(int peer, int channel) override { return real_->sent(peer, channel); }
  bool post_recv(int peer, int channel, void* dst, size_t bytes) override {
    return !strikes("post_recv") && counts(real_->post_recv(peer, channel, dst, bytes));
  }
  bool post_recv_up_to(int peer, int channel, size_t bytes) override {
    return !strikes("post_recv_up_to") && counts(real_->post_recv_up_to(peer, channel, bytes));
  }
  // Looks in vain are as many as time has it: only what came counts.
  const std::byte* front(int peer, int channel) override {
    const std::byte* data = real_->front(peer, channel);
    return data != nullptr && strikes("front") ? nullptr : data;
  }
  size_t front_bytes(int peer, int channel) const override { return real_->front_bytes(peer, channel); }
  void pop(int peer, int channel) override {
    if (!fault_.refuses) strikes("pop");
    real_->pop(peer, channel);
  }
  void progress() override {
    std::this_thread::sleep_for(std::chrono::milliseconds(fault_.frozen_ms.exchange(0)));
    if (fault_.connecting > 0) --fault_.connecting;
    // Media throw here too. Once after each call that had an effect: looks in vain are as many as time has it.
    if (fault_.at > 0 && !fault_.refuses && fault_.calls != looked_) strikes("progress");
    looked_ = fault_.calls;
    real_->progress();
  }
  bool connecting() const override { return fault_.connecting > 0; }
  uint32_t prepare_wait() override { return real_->prepare_wait(); }
  void wait(uint32_t ticket, std::chrono::microseconds limit) override { real_->wait(ticket, limit); }
  void wake() override { real_->wake(); }
  void doze(uint32_t ticket, std::chrono::microseconds limit) override { real_->doze(ticket, limit); }
  bool alert(bool on) override { return real_->alert(on); }
  bool take_nudge() override { return real_->take_nudge(); }
  const void* doorbell() const override { return real_->doorbell(); }
  bool wakes_by_doorbell() const override { return real_->wakes_by_doorbell(); }
  void nudge() override { real_->nudge(); }
  void check_peers() override { real_->check_peers(); }
  void post_failure(const std::string& text) override { real_->post_failure(text); }
  bool let_go(std::chrono::milliseconds limit) override { return real_->let_go(limit); }
  std::string poll_failure() override { return real_->poll_failure(); }
  const std::atomic<uint32_t>* failure_flag() const override { return real_->failure_flag(); }
  void post_stall(const std::vector<int>& waits_for) override {
    fault_.told.push_back(waits_for);
    real_->post_stall(waits_for);
  }
  std::vector<StallNote> stall_notes() const override {
    return fault_.notes.empty() ? real_->stall_notes() : fault_.notes;
  }

 private:
  bool strikes(const char* call) {
    if (fault_.calls.fetch_add(1) + 1 != fault_.at) return false;
    if (fault_.refuses) return true;
    throw TransportError(std::string("injected into ") + call);
  }
  // A call in vain is made again, as often as time has it.
  bool counts(bool had_effect) {
    if (!had_effect) --fault_.calls;
    return had_effect;
  }

  const std::unique_ptr<Transport> real_;
  Fault& fault_;
  std::pair<std::byte*, size_t> room_{};
  int64_t looked_ = 0;
};

// Ranks that reach each other by messages, and by memory if they share it, the culprit through a transport that fails.
inline World faulty_world(Fault& fault, const Settings& settings, bool share_memory = false) {
  World world;
  for (Endpoint& endpoint : connect_local(kRanks, {.arena_bytes = size_t{16} << 20})) {
    Members members;
    members.rank = static_cast<int>(world.size());
    members.size = kRanks;
    members.node_of_rank.assign(kRanks, 0);
    members.transport_of_rank.assign(kRanks, "local");
    members.transport = std::move(endpoint.transport);
    if (share_memory) members.window = std::move(endpoint.window);
    if (members.rank == kCulprit)
      members.transport = std::make_unique<FaultyTransport>(std::move(members.transport), fault);
    members.own_core = false;
    members.shared_cores = true;
    world.push_back(Communicator::make(std::move(members), settings));
  }
  return world;
}

}  // namespace dcoll::test
