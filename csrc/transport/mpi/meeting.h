// How ranks meet and tell each other what a communicator is made of, over MPI's messages alone: collectives of MPI wait
// for ever, cannot be given up, and would stand at different places of their order when some ranks try again.
//
// The first of the ranks leads. Each tells it that it is here; when all are, it tells everybody to go on, else who is
// missing. The exchanges that follow go through it as well, so it knows who does not come, and says so. Every message
// has the number of the attempt or of the meeting it belongs to: what is left of one that failed is not taken for the
// next. One thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "transport/mpi/transport.h"
#include "transport/start_up.h"

namespace dcoll::mpi {

class MpiMeeting {
 public:
  // ended: those of this communicator's ranks that are known to be dead.
  MpiMeeting(MPI_Comm comm, std::function<std::vector<int>()> ended);
  ~MpiMeeting();

  // Collective over `ranks`, this one among them. Returns when all are here. Throws TimeoutError, PeerError, or, of
  // other versions, ArgumentError: on all of them alike, but for those that cannot be reached.
  void meet(const StartUp& start, std::vector<int> ranks);
  // Of the ranks that met last, in their order.
  std::vector<std::byte> all_gather(const StartUp& start, const void* data, size_t bytes);
  // This rank takes no part in what follows: the others need not wait for it.
  void leave(const std::string& why) noexcept;

 private:
  enum class Kind : uint32_t { kHere, kWaiting, kGo, kRefused, kGone, kData, kFailed };
  enum class Why : uint64_t { kTimeout, kPeer, kVersion };
  // What every message begins with, the same in all versions, so that those that differ can say so: the leader compares
  // these fixed-size strings before it lets anybody go on to what is not.
  struct Header {
    char version[64] = "";
    Kind kind = Kind::kHere;
    uint32_t unused = 0;
    uint64_t group = 0;   // of ranks, as a hash
    uint64_t number = 0;  // kHere to kGone: the member's attempt; else the meeting
    uint64_t more = 0;    // kGo: the meeting; kRefused: Why
  };
  struct Message {
    int from = 0;
    Header header;
    std::vector<std::byte> body;
    std::string text() const { return {reinterpret_cast<const char*>(body.data()), body.size()}; }
  };
  struct Transfer {
    MPI_Request request = MPI_REQUEST_NULL;
    int peer = 0;
    std::vector<std::byte> bytes;
  };

  bool leads() const { return ranks_.front() == rank_; }
  void send(int to, Kind kind, uint64_t number, uint64_t more = 0, const void* body = nullptr, size_t bytes = 0);
  void send_text(int to, Kind kind, uint64_t number, const std::string& text, Why why = Why::kTimeout) {
    send(to, kind, number, static_cast<uint64_t>(why), text.data(), text.size());
  }
  void poll();
  void take(Message message);
  bool next(Message& message);
  void lead(const StartUp& start);
  void follow(const StartUp& start);
  void refuse_other_versions();
  void refuse(const std::string& text, Why why);
  [[noreturn]] static void raise(const std::string& text, Why why);
  void gather(const StartUp& start, std::vector<std::byte>& all, size_t bytes);
  [[noreturn]] void fail(const std::string& text, Why why);
  std::string dead(const StartWait& wait) const;
  std::vector<int> absent() const;

  const MPI_Comm comm_;
  const std::function<std::vector<int>()> ended_;
  int rank_ = 0;
  std::string version_;
  std::list<Transfer> sends_, receives_;

  std::vector<int> ranks_;  // that meet, or met last
  uint64_t group_ = 0;
  uint64_t attempts_ = 0, meetings_ = 0;  // of this rank
  uint64_t meeting_ = 0;                  // 0: there is none
  // The leader's.
  struct Here {
    uint64_t attempt;
    std::string version;
  };
  std::map<uint64_t, std::map<int, Here>> here_;  // by group and rank
  std::map<int, uint64_t> met_;                   // attempts that this meeting is of
  std::map<int, std::vector<std::byte>> data_;    // of this exchange
  // The others'.
  std::deque<Message> inbox_;
};

}  // namespace dcoll::mpi
