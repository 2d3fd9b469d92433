// How ranks meet and tell each other what a communicator is made of, over messages that somebody else carries (MPI, a
// key-value store). Over MPI too these are messages alone: collectives of MPI wait for ever, cannot be given up, and
// would stand at different places of their order when some ranks try again.
//
// The first of the ranks leads. Each tells it that it is here; when all are, it tells everybody to go on, else who is
// missing. The exchanges that follow go through it as well, so it knows who does not come, and says so. Every message
// has the number of the attempt or of the meeting it belongs to: what is left of one that failed is not taken for the
// next. One thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/start_up.h"

namespace dcoll {

// What carries the messages. In order from each rank to each other one; nothing blocks.
class Mailbox {
 public:
  struct Letter {
    int from = 0;
    std::vector<std::byte> bytes;
  };
  virtual ~Mailbox() = default;
  virtual void send(int to, std::vector<std::byte> bytes) = 0;
  // What has come since. Those of `from` are looked for, which may cost something for each.
  virtual std::vector<Letter> take(const std::vector<int>& from) = 0;
  // Whom the oldest message is for that still needs this rank's help to be delivered.
  virtual std::optional<int> under_way_to() const { return std::nullopt; }
};

class Meeting {
 public:
  // ended: those of the ranks that are known to be dead.
  Meeting(std::unique_ptr<Mailbox> mail, int rank, std::function<std::vector<int>()> ended);

  // Collective over `ranks`, this one among them. Returns when all are here. Throws TimeoutError, PeerError, or, of
  // other versions, ArgumentError: on all of them alike, but for those that cannot be reached.
  void meet(const StartUp& start, std::vector<int> ranks);
  // Of the ranks that met last, in their order.
  std::vector<std::byte> all_gather(const StartUp& start, const void* data, size_t bytes);
  // This rank takes no part in what follows: the others need not wait for it.
  void leave(const std::string& why) noexcept { leave(why, Why::kPeer); }
  // The same on all ranks that met last, another one every time they meet; 0: they have not.
  uint64_t number() const { return meeting_; }

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
    uint64_t more = 0;    // kGo: the meeting; kRefused, kFailed: Why
  };
  struct Message {
    int from = 0;
    Header header;
    std::vector<std::byte> body;
    std::string text() const { return {reinterpret_cast<const char*>(body.data()), body.size()}; }
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
  void leave(const std::string& text, Why why) noexcept;
  std::string dead(const StartWait& wait) const;
  // Between two looks. Where a rank is dead, or the time is up: `give_up`, and an error.
  void go_on(const StartUp& start, StartWait& wait, const std::function<std::string()>& missing,
             const std::function<void(const std::string&, Why)>& give_up) const;
  std::vector<int> absent() const;

  const std::unique_ptr<Mailbox> mail_;
  const std::function<std::vector<int>()> ended_;
  const int rank_;
  std::string version_;
  std::deque<Mailbox::Letter> unread_;

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

}  // namespace dcoll
