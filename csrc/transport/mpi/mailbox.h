// The messages of a meeting (meeting.h) over MPI. Part of the plugin alone.
#pragma once

#include <list>
#include <optional>
#include <set>
#include <vector>

#include "transport/meeting.h"
#include "transport/mpi/transport.h"

namespace dcoll::mpi {

class MpiMailbox final : public Mailbox {
 public:
  explicit MpiMailbox(MPI_Comm comm) : comm_(comm) {}
  ~MpiMailbox() override;

  void send(int to, std::vector<std::byte> bytes) override;
  std::vector<Letter> take(const std::vector<int>& from) override;
  std::optional<int> under_way_to() const override {
    return sends_.empty() ? std::nullopt : std::optional(sends_.front().peer);
  }
  // The ranks whose processes have ended, as far as MPI says so (is_process_failure).
  const std::set<int>& ended() const { return ended_; }

 private:
  struct Transfer {
    MPI_Request request = MPI_REQUEST_NULL;
    int peer = 0;
    std::vector<std::byte> bytes;
  };

  // Whether there is a message; MPI_ANY_SOURCE: from anybody.
  bool probe(int from, MPI_Status& status);
  void receive(const MPI_Status& status);
  bool finished(Transfer& transfer);

  const MPI_Comm comm_;
  bool some_ended_ = false;
  std::set<int> ended_;
  std::list<Transfer> sends_, receives_;
};

}  // namespace dcoll::mpi
