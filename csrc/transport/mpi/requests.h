// What the MPI transport has outstanding: operations, their queues per (peer, channel), and the set MPI is asked about.
// Part of the plugin (libdcoll_mpi.so) alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "transport/mpi/transport.h"

namespace dcoll::mpi {

struct FreeAligned {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Room = std::unique_ptr<std::byte[], FreeAligned>;

struct Link;

struct Operation {
  enum class Kind : uint8_t { kSend, kReceive, kNoticeSend, kNoticeReceive };
  Kind kind = Kind::kSend;
  bool done = false;
  bool exact = true;  // receives: a message of `bytes`; else of at most so many, and `bytes` becomes its length
  int peer = 0;
  int channel = 0;
  Link* link = nullptr;  // null for notices
  std::byte* data = nullptr;
  size_t bytes = 0;
  Room room;  // the transport's own memory, when data lies in it
};

// A fixed ring: operations keep their address while they are outstanding, and nothing is allocated per message.
class OperationQueue {
 public:
  explicit OperationQueue(int slots) : ring_(static_cast<size_t>(slots)) {}
  size_t size() const { return count_; }
  bool full() const { return count_ == ring_.size(); }
  Operation& front() { return ring_[head_]; }
  Operation& push(Operation operation) {
    Operation& place = ring_[(head_ + count_++) % ring_.size()];
    place = std::move(operation);
    return place;
  }
  void drop_back() { --count_; }
  Room pop() {
    Room room = std::move(ring_[head_].room);
    head_ = (head_ + 1) % ring_.size();
    --count_;
    return room;
  }

 private:
  std::vector<Operation> ring_;
  size_t head_ = 0;
  size_t count_ = 0;
};

// One (peer, channel), both directions. Made when first used: most ranks talk to few peers.
struct Link {
  explicit Link(int slots) : sends(slots), receives(slots) {}
  OperationQueue sends;
  OperationQueue receives;
  Room staged;  // acquired, not yet committed
  size_t staged_bytes = 0;
  uint64_t posted = 0;
  uint64_t sent = 0;
};

// Keeps memory until the process ends: MPI may still read or write it, and there is nobody left to ask when it is done.
void keep_forever(Room room);
void keep_forever(std::vector<std::byte> memory);

// "MPI send to rank 3 (channel 0, 65536 bytes)", for messages.
std::string about(const Operation& op);
// Throws what MPI says, with that text.
inline void check_mpi(int code, const Operation& op) {
  if (code != MPI_SUCCESS) [[unlikely]]
    check_mpi(code, about(op));
}

// That a process has ended, as an MPI with fault tolerance says where it is switched on (OMPI_MCA_mpi_ft_enable=1).
// Kept from the first one on, for a while without an error: who watches processes (os/processes.h) knows better which
// rank of the job it is.
class ProcessFailure {
 public:
  // Whether `code`, which is not MPI_SUCCESS, is one.
  bool noted(int code, const Operation& op);
  // Throws PeerError with MPI's words if nobody else has named the rank.
  void check() const;

 private:
  std::string text_;
  std::chrono::steady_clock::time_point since_;
};

// Every request outstanding, dense, as MPI_Testsome wants them.
class RequestSet {
 public:
  struct Completed {
    Operation* operation;
    MPI_Status status;
    int code;  // MPI_SUCCESS, or what this operation failed with
  };

  bool empty() const { return requests_.empty(); }
  size_t size() const { return requests_.size(); }
  void add(MPI_Request request, Operation& operation) {
    requests_.push_back(request);
    operations_.push_back(&operation);
  }
  // Asks MPI about all of them. What completed leaves the set; the result is valid until the next call.
  const std::vector<Completed>& test();
  // Cancels the receives into memory that is not the transport's, and helps along what else uses such memory until none
  // does. What completes of the transport's own goes to `take`. False when `limit` has passed before that, or MPI
  // failed.
  bool let_go(std::chrono::milliseconds limit, const std::function<void(const Completed&)>& take);
  // Cancels the receives, helps the rest along until `limit` has passed, and lets go of what is left then, keeping the
  // transport's own memory that MPI may still read or write. True when nothing was left.
  bool abandon(std::chrono::milliseconds limit) noexcept;

 private:
  std::vector<MPI_Request> requests_;
  std::vector<Operation*> operations_;  // operations_[i] is what requests_[i] is for
  std::vector<int> indices_;            // scratch of test(), kept for its memory
  std::vector<MPI_Status> statuses_;
  std::vector<Completed> completed_;
};

}  // namespace dcoll::mpi
