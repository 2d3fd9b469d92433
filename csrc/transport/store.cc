#include "transport/store.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/ranks_text.h"
#include "transport/os/processes.h"
#include "transport/ucx.h"

namespace dcoll {
namespace {

// The store is asked more and more seldom while nothing comes: all ranks share it.
constexpr std::chrono::microseconds kShortestPause{200}, kLongestPause{10'000};

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

// Each message is a key: from whom, to whom, and its number between the two.
class StoreMailbox final : public Mailbox {
 public:
  StoreMailbox(std::shared_ptr<KeyValueStore> store, std::string prefix, int rank)
      : store_(std::move(store)), prefix_(std::move(prefix)), rank_(rank) {}

  void send(int to, std::vector<std::byte> bytes) override {
    store_->set(key(rank_, to, sent_[to]), bytes);
    ++sent_[to];
    pause_ = std::chrono::microseconds(0);
  }

  std::vector<Letter> take(const std::vector<int>& from) override {
    const auto now = Clock::now();
    if (now - looked_ < pause_) return {};
    looked_ = now;
    for (const int peer : from) {
      if (peer == rank_) continue;
      while (auto bytes = store_->get(key(peer, rank_, taken_[peer]))) {
        ++taken_[peer];
        found_.push_back({.from = peer, .bytes = std::move(*bytes)});
      }
    }
    pause_ = found_.empty() ? std::clamp(2 * pause_, kShortestPause, kLongestPause) : std::chrono::microseconds(0);
    return std::exchange(found_, {});
  }

 private:
  std::string key(int from, int to, uint64_t number) const {
    return prefix_ + std::to_string(from) + ">" + std::to_string(to) + "/" + std::to_string(number);
  }

  const std::shared_ptr<KeyValueStore> store_;
  const std::string prefix_;
  const int rank_;
  std::map<int, uint64_t> sent_, taken_;  // by peer
  std::vector<Letter> found_;             // kept when the store fails half-way
  Clock::time_point looked_{};
  std::chrono::microseconds pause_{0};
};

// Of the process, shared by all that is made of it: which processes the job's ranks are.
class RankProcesses {
 public:
  RankProcesses(std::shared_ptr<KeyValueStore> store, int rank, int size) : store_(std::move(store)) {
    const ProcessId own = own_process();
    std::vector<std::byte> bytes(sizeof own);
    std::memcpy(bytes.data(), &own, sizeof own);
    store_->set(key(rank), bytes);
    for (int other = 0; other < size; ++other) {
      if (other != rank) unknown_.push_back(other);
    }
  }

  // Of `ranks` those of this machine that have ended after they had come.
  std::vector<int> ended(const std::vector<int>& ranks) {
    std::erase_if(unknown_, [&](int rank) {
      if (std::ranges::find(ranks, rank) == ranks.end()) return false;
      const auto bytes = store_->get(key(rank));
      ProcessId process;
      if (!bytes || bytes->size() != sizeof process) return false;
      std::memcpy(static_cast<void*>(&process), bytes->data(), sizeof process);
      processes_.watch(rank, process);
      return true;
    });
    std::vector<int> found;
    std::ranges::copy_if(ranks, std::back_inserter(found), [this](int rank) { return processes_.ended(rank); });
    return found;
  }

 private:
  static std::string key(int rank) { return "process/" + std::to_string(rank); }

  const std::shared_ptr<KeyValueStore> store_;
  std::vector<int> unknown_;
  Processes processes_;
};

class StoreBootstrap final : public Bootstrap {
 public:
  StoreBootstrap(int rank, int size, KeyValueStore store)
      : store_(std::make_shared<KeyValueStore>(std::move(store))),
        processes_(std::make_shared<RankProcesses>(store_, rank, size)),
        job_ranks_(ranks_below(static_cast<size_t>(size))) {
    begin(rank);
  }
  StoreBootstrap(StoreBootstrap& whole, const std::vector<int>& ranks)
      : store_(whole.store_), processes_(whole.processes_) {
    for (const int rank : ranks) job_ranks_.push_back(whole.job_ranks_.at(static_cast<size_t>(rank)));
    start_ = whole.start_;
    whole.meeting_->meet(start_, ranks);
    const uint64_t members = Fingerprint().add(std::span<const int>(ranks)).value();
    prefix_ = whole.prefix_ + std::to_string(members) + "." + std::to_string(whole.meeting_->number()) + "/";
    begin(static_cast<int>(std::ranges::find(ranks, whole.rank_) - ranks.begin()));
    meet(start_);
  }

  const char* medium() const override { return "ucx"; }
  std::string library_version() const override { return ucx().library_version(); }
  std::string processor_name() const override { return host_name(); }
  bool takes_threads() const override { return true; }

  // A node is what can hand each other memory: a kernel, a name, and a network namespace, where the sockets for that
  // are seen.
  std::vector<int> node_of_ranks() override {
    return numbered(gather(Fingerprint().add(own_machine()).add(host_name()).add(own_network()).value()));
  }

  std::unique_ptr<Bootstrap> subset(const std::vector<int>& ranks) override {
    return std::make_unique<StoreBootstrap>(*this, ranks);
  }

  std::unique_ptr<Transport> make_transport(size_t max_message_bytes, int slots,
                                            const std::string& tcp_congestion) override {
    return ucx().make_transport(*this, max_message_bytes, slots, tcp_congestion);
  }

  void finalize() override {}
  // Nobody can be asked to end the others. They have heard why; the launcher ends those that call nothing.
  [[noreturn]] void abort(int exit_code) override { std::_Exit(exit_code); }

 private:
  void begin(int rank) {
    rank_ = rank;
    size_ = static_cast<int>(job_ranks_.size());
    meeting_ = std::make_unique<Meeting>(std::make_unique<StoreMailbox>(store_, prefix_, rank_), rank_, [this] {
      std::vector<int> ended = processes_->ended(job_ranks_);
      for (int& rank : ended) rank = static_cast<int>(std::ranges::find(job_ranks_, rank) - job_ranks_.begin());
      return ended;
    });
  }

  const std::shared_ptr<KeyValueStore> store_;
  const std::shared_ptr<RankProcesses> processes_;
  std::vector<int> job_ranks_;
  std::string prefix_ = "meeting/";
};

}  // namespace

std::unique_ptr<Bootstrap> make_store_bootstrap(int rank, int size, KeyValueStore store) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw ArgumentError("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                        " ranks does not exist: ranks are 0 to size - 1");
  }
  return std::make_unique<StoreBootstrap>(rank, size, std::move(store));
}

}  // namespace dcoll
