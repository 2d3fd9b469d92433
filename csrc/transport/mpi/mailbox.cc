#include "transport/mpi/mailbox.h"

#include <algorithm>
#include <string>
#include <utility>

#include "transport/mpi/requests.h"

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
  if (code == MPI_SUCCESS) return;
  sends_.pop_back();
  if (is_process_failure(code)) {
    ended_.insert(to);
  } else {
    check_mpi(code, "MPI send to rank " + std::to_string(to) + " during dcoll.init()");
  }
}

bool MpiMailbox::probe(int from, MPI_Status& status) {
  int there = 0;
  const int code = MPI_Iprobe(from, kTag, comm_, &there, &status);
  if (!is_process_failure(code)) {
    check_mpi(code, "MPI_Iprobe");
    return there != 0;
  }
  some_ended_ = true;
  if (from != MPI_ANY_SOURCE) ended_.insert(from);
  return false;
}

void MpiMailbox::receive(const MPI_Status& status) {
  int bytes = 0;
  check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
  Transfer& coming = receives_.emplace_back();
  coming.peer = status.MPI_SOURCE;
  coming.bytes.resize(static_cast<size_t>(bytes));
  check_mpi(MPI_Irecv(coming.bytes.data(), bytes, MPI_BYTE, coming.peer, kTag, comm_, &coming.request), "MPI_Irecv");
}

// Of a rank that has ended too: nothing more will come of it.
bool MpiMailbox::finished(Transfer& transfer) {
  int done = 0;
  const int code = MPI_Test(&transfer.request, &done, MPI_STATUS_IGNORE);
  if (!is_process_failure(code)) {
    check_mpi(code, "MPI_Test");
    return done != 0;
  }
  ended_.insert(transfer.peer);
  transfer.bytes.clear();
  return true;
}

// MPI tells in one call what has come from anybody; when a process has ended, it says that instead, and is asked about
// each of `from`.
std::vector<Mailbox::Letter> MpiMailbox::take(const std::vector<int>& from) {
  const std::vector<int> any{MPI_ANY_SOURCE};
  for (const int rank : some_ended_ ? from : any) {
    for (MPI_Status status; !ended_.contains(rank) && probe(rank, status);) receive(status);
  }
  std::erase_if(sends_, [this](Transfer& one) { return finished(one); });
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
