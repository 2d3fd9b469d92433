// How the ranks of a job find each other before they have a communicator, and what it is made of: over MPI (mpi.h), or
// over a key-value store (store.h).
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/ranks_text.h"
#include "transport/meeting.h"
#include "transport/start_up.h"
#include "transport/transport.h"

namespace dcoll {

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // What messages between nodes go over: "mpi", "ucx".
  virtual const char* medium() const = 0;
  // The same for who wants to know exactly: the library and its version.
  virtual std::string library_version() const = 0;
  virtual std::string processor_name() const = 0;
  // Whether transports may be driven by several threads at once, each transport by one.
  virtual bool takes_threads() const = 0;

  // Each waits for the other ranks no longer than StartUp says, and throws what keeps them away. Collective over all
  // ranks; before the exchanges, and again for every communicator.
  void meet(const StartUp& start) {
    start_ = start;
    meeting_->meet(start_, ranks_below(static_cast<size_t>(size_)));
  }
  // This rank takes no part in the exchanges that the others still wait for; they throw PeerError with its words.
  void leave(const std::string& why) noexcept { meeting_->leave(why); }
  void broadcast(void* data, size_t bytes, int root) {
    const std::vector<std::byte> all = all_gather(data, bytes);
    std::memcpy(data, all.data() + bytes * static_cast<size_t>(root), bytes);
  }
  // size() * bytes, in rank order.
  std::vector<std::byte> all_gather(const void* data, size_t bytes) {
    return meeting_->all_gather(start_, data, bytes);
  }
  // By rank, bytewise.
  template <typename T>
  std::vector<T> gather(const T& mine) {
    const std::vector<std::byte> all = all_gather(&mine, sizeof mine);
    std::vector<T> of_ranks(static_cast<size_t>(size_));
    std::memcpy(of_ranks.data(), all.data(), all.size());
    return of_ranks;
  }
  void barrier() { all_gather(nullptr, 0); }
  // Per rank: its node, numbered by lowest rank.
  virtual std::vector<int> node_of_ranks() = 0;

  // For some of the ranks, this one among them; collective over these alone. It may outlive this one.
  virtual std::unique_ptr<Bootstrap> subset(const std::vector<int>& ranks) = 0;

  // Messages between all ranks, apart from those of other transports. Collective. tcp_congestion: see
  // tcp_congestion.h.
  virtual std::unique_ptr<Transport> make_transport(size_t max_message_bytes, int slots,
                                                    const std::string& tcp_congestion) = 0;

  // The end of the process's part in the job, once; for MPI a collective that blocks.
  virtual void finalize() = 0;
  // Whether another thread is in finalize() and sleeps there until all ranks have come.
  virtual bool waits_for_ends() const { return false; }
  // Ends every rank of the job, where this rank can; itself in any case.
  [[noreturn]] virtual void abort(int exit_code) = 0;

 protected:
  StartUp start_;
  int rank_ = 0;
  int size_ = 1;
  std::unique_ptr<Meeting> meeting_;
};

}  // namespace dcoll
