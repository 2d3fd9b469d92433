#include "transport/mpi/mailbox.h"

#include <algorithm>
#include <string>
#include <utility>

namespace dcoll::mpi {
namespace {

constexpr int kTag = 11;

}  // namespace

MpiMailbox::~MpiMailbox() {
  static auto* const kept = new std::list<Transfer>;  // what MPI may still read or write
  kept->splice(kept->end(), sends_);
  kept->splice(kept->end(), receives_);
}

void MpiMailbox::send(int to, std::vector<std::byte> bytes) {
  Transfer& sent = sends_.emplace_back();
  sent.peer = to;
  sent.bytes = std::move(bytes);
  const int code =
      MPI_Isend(sent.bytes.data(), static_cast<int>(sent.bytes.size()), MPI_BYTE, to, kTag, comm_, &sent.request);
  if (code != MPI_SUCCESS) {
    sends_.pop_back();
    check_mpi(code, "MPI send to rank " + std::to_string(to) + " during dcoll.init()");
  }
}

// From whomever: MPI tells that in one call.
std::vector<Mailbox::Letter> MpiMailbox::take(const std::vector<int>& /*from*/) {
  for (int there = 1; there != 0;) {
    MPI_Status status;
    check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, kTag, comm_, &there, &status), "MPI_Iprobe");
    if (there == 0) break;
    int bytes = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    Transfer& coming = receives_.emplace_back();
    coming.peer = status.MPI_SOURCE;
    coming.bytes.resize(static_cast<size_t>(bytes));
    check_mpi(MPI_Irecv(coming.bytes.data(), bytes, MPI_BYTE, coming.peer, kTag, comm_, &coming.request), "MPI_Irecv");
  }
  const auto finished = [](Transfer& one) {
    int done = 0;
    check_mpi(MPI_Test(&one.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  };
  std::erase_if(sends_, finished);
  // In the order in which each peer sent them: one that is not done holds up what comes behind it.
  std::vector<Letter> letters;
  std::vector<int> held;
  for (auto one = receives_.begin(); one != receives_.end();) {
    if (std::ranges::find(held, one->peer) != held.end() || !finished(*one)) {
      held.push_back((one++)->peer);
      continue;
    }
    letters.push_back({.from = one->peer, .bytes = std::move(one->bytes)});
    one = receives_.erase(one);
  }
  return letters;
}

}  // namespace dcoll::mpi
