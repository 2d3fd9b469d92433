// What the MPI transport has outstanding: the set that MPI is asked about.
// Part of the plugin (libdcoll_mpi.so) alone.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "transport/messages.h"
#include "transport/mpi/transport.h"

namespace dcoll::mpi {

// Throws what MPI says, with that text.
inline void check_mpi(int code, const Transfer& op) {
  if (code != MPI_SUCCESS) [[unlikely]]
    check_mpi(code, about(op, "MPI"));
}

// Whether `code` says that a process has ended. An MPI with fault tolerance says so where that is switched on
// (OMPI_MCA_mpi_ft_enable=1).
bool is_process_failure(int code);

// The first such error, kept for a while without throwing it: who watches processes (os/processes.h) knows better which
// rank of the job it is.
class ProcessFailure {
 public:
  // Whether `code`, which is not MPI_SUCCESS, is one.
  bool noted(int code, const Transfer& op);
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
    Transfer* operation;
    MPI_Status status;
    int code;  // MPI_SUCCESS, or what this operation failed with
  };

  bool empty() const { return requests_.empty(); }
  size_t size() const { return requests_.size(); }
  void add(MPI_Request request, Transfer& operation) {
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
  std::vector<Transfer*> operations_;  // operations_[i] is what requests_[i] is for
  std::vector<int> indices_;           // scratch of test(), kept for its memory
  std::vector<MPI_Status> statuses_;
  std::vector<Completed> completed_;
};

}  // namespace dcoll::mpi
