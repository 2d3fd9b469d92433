#include "transport/mpi/meeting.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/ranks_text.h"
#include "transport/presence.h"

namespace dcoll::mpi {
namespace {

constexpr int kTag = 11;

// How much longer than the leader the others wait for its word.
double patience(const StartUp& start) { return std::min(5.0, start.timeout_s / 4); }

std::string not_here(const std::vector<int>& ranks) {
  const char* has = ranks.size() == 1 ? " has" : " have";
  return ranks_text(ranks) + has + " not called dcoll.init() (again), or" + has + " ended, or hang" +
         (ranks.size() == 1 ? "s" : "");
}

}  // namespace

MpiMeeting::MpiMeeting(MPI_Comm comm, std::function<std::vector<int>()> ended) : comm_(comm), ended_(std::move(ended)) {
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
}

MpiMeeting::~MpiMeeting() {
  static auto* const kept = new std::list<Transfer>;  // what MPI may still read or write
  kept->splice(kept->end(), sends_);
  kept->splice(kept->end(), receives_);
}

void MpiMeeting::meet(const StartUp& start, std::vector<int> ranks) {
  ranks_ = std::move(ranks);
  version_ = start.version.substr(0, sizeof Header::version - 1);
  Fingerprint group;
  for (const int rank : ranks_) group.add(static_cast<uint64_t>(rank));
  group_ = group.value();
  meeting_ = 0;
  met_.clear();
  data_.clear();
  if (ranks_.size() == 1) return;
  try {
    leads() ? lead(start) : follow(start);
  } catch (const Error&) {
    throw;  // the others have been told
  } catch (...) {
    const std::string why = "rank " + std::to_string(rank_) + " was interrupted in dcoll.init().";
    leads() ? refuse(why, Why::kPeer) : send_text(ranks_.front(), Kind::kGone, attempts_, why);
    throw;
  }
}

void MpiMeeting::lead(const StartUp& start) {
  constexpr double kTellEvery = 0.25;
  double told = 0;
  std::vector<int> missing;
  for (StartWait wait(start);;) {
    poll();
    missing = absent();
    if (missing.empty()) break;
    if (wait.seconds() - told >= kTellEvery) {  // that this rank is here too
      told = wait.seconds();
      for (const auto& [rank, one] : here_[group_]) send_text(rank, Kind::kWaiting, one.attempt, not_here(missing));
    }
    std::string text = dead(wait);
    const Why why = text.empty() ? Why::kTimeout : Why::kPeer;
    if (text.empty() && !wait.goes_on([&] { return not_here(missing); })) {
      text = "dcoll.init(): " + not_here(missing) + ", " + within_text(start) + ".";
    }
    if (text.empty()) continue;
    refuse(text, why);
    raise(text, why);
  }
  refuse_other_versions();
  meeting_ = ++meetings_;
  for (const auto& [rank, one] : here_[group_]) {
    met_[rank] = one.attempt;
    send(rank, Kind::kGo, one.attempt, meeting_);
  }
  here_[group_].clear();
}

std::vector<int> MpiMeeting::absent() const {
  std::vector<int> missing;
  const auto here = here_.find(group_);
  for (const int rank : ranks_) {
    if (rank != rank_ && (here == here_.end() || !here->second.contains(rank))) missing.push_back(rank);
  }
  return missing;
}

void MpiMeeting::refuse(const std::string& text, Why why) {
  for (const auto& [rank, one] : here_[group_]) send_text(rank, Kind::kRefused, one.attempt, text, why);
  here_[group_].clear();
  poll();
}

void MpiMeeting::raise(const std::string& text, Why why) {
  switch (why) {
    case Why::kTimeout:
      throw TimeoutError(text);
    case Why::kPeer:
      throw PeerError(text);
    case Why::kVersion:
      break;
  }
  throw ArgumentError(text);
}

void MpiMeeting::refuse_other_versions() {
  std::map<std::string, std::vector<int>> versions{{version_, {rank_}}};
  for (const auto& [rank, one] : here_[group_]) versions[one.version].push_back(rank);
  if (versions.size() == 1) return;
  std::string text = "The ranks run different versions of dcoll:";
  for (auto& [version, ranks] : versions) {
    std::ranges::sort(ranks);
    text += " " + version + " on " + ranks_text(ranks) + ";";
  }
  text.back() = '.';
  text += " Install the same version on every host.";
  refuse(text, Why::kVersion);
  raise(text, Why::kVersion);
}

void MpiMeeting::follow(const StartUp& start) {
  const int leader = ranks_.front();
  send(leader, Kind::kHere, ++attempts_);
  std::string heard = not_here({leader});  // from the leader: who is missing
  for (StartWait wait(start, patience(start));;) {
    poll();
    for (Message message; next(message);) {
      const Header& h = message.header;
      if (h.group != group_ || h.number != attempts_) continue;  // of an earlier attempt
      if (h.kind == Kind::kWaiting) heard = message.text();
      if (h.kind == Kind::kRefused) raise(message.text(), static_cast<Why>(h.more));
      if (h.kind != Kind::kGo) continue;
      meeting_ = h.more;
      return;
    }
    std::string text = dead(wait);
    const Why why = text.empty() ? Why::kTimeout : Why::kPeer;
    if (text.empty() && !wait.goes_on([&] { return heard; })) {
      text = "dcoll.init(): " + heard + ", " + within_text(start) + ".";
    }
    if (text.empty()) continue;
    send(leader, Kind::kGone, attempts_);
    raise(text, why);
  }
}

// What to say of those that are known to have ended; empty: none has, or it is not the time to look.
std::string MpiMeeting::dead(const StartWait& wait) const {
  if (!wait.thorough()) return "";
  std::vector<int> dead;
  for (const int rank : ended_()) {
    if (std::ranges::find(ranks_, rank) != ranks_.end()) dead.push_back(rank);
  }
  if (dead.empty()) return "";
  return "dcoll.init(): " + ended_text(dead);
}

std::vector<std::byte> MpiMeeting::all_gather(const StartUp& start, const void* data, size_t bytes) {
  const size_t n = ranks_.size();
  std::vector<std::byte> all(n * bytes);
  const auto own = static_cast<size_t>(std::ranges::find(ranks_, rank_) - ranks_.begin());
  if (bytes > 0) std::memcpy(all.data() + own * bytes, data, bytes);
  if (n == 1) return all;
  if (meeting_ == 0) throw TransportError("the ranks have not met, or one of them has left the start-up");
  if (leads()) {
    gather(start, all, bytes);
    for (const int rank : ranks_) {
      if (rank != rank_) send(rank, Kind::kData, meeting_, 0, all.data(), all.size());
    }
    const auto unread = [this] { return "rank " + std::to_string(sends_.front().peer) + " does not answer"; };
    for (StartWait wait(start); !sends_.empty() && wait.goes_on(unread);) poll();
    return all;
  }
  const int leader = ranks_.front();
  send(leader, Kind::kData, meeting_, 0, data, bytes);
  const auto silent = [&] { return "rank " + std::to_string(leader) + " does not answer"; };
  for (StartWait wait(start, patience(start));;) {
    poll();
    for (Message message; next(message);) {
      if (message.header.group != group_ || message.header.number != meeting_) continue;
      if (message.header.kind == Kind::kData && message.body.size() == all.size()) return message.body;
      if (message.header.kind != Kind::kFailed) continue;
      meeting_ = 0;
      raise(message.text(), Why::kPeer);
    }
    const std::string text = dead(wait);
    if (!text.empty()) raise(text, Why::kPeer);
    if (!wait.goes_on(silent)) raise("dcoll.init(): " + silent() + ", " + within_text(start) + ".", Why::kTimeout);
  }
}

void MpiMeeting::gather(const StartUp& start, std::vector<std::byte>& all, size_t bytes) {
  std::vector<int> missing;
  const auto silent = [&] { return ranks_text(missing) + (missing.size() == 1 ? " does" : " do") + " not answer"; };
  for (StartWait wait(start);;) {
    poll();
    missing.clear();
    for (const int rank : ranks_) {
      if (rank != rank_ && !data_.contains(rank)) missing.push_back(rank);
    }
    if (missing.empty()) break;
    std::string text = dead(wait);
    if (!text.empty()) fail(text, Why::kPeer);
    if (!wait.goes_on(silent)) fail("dcoll.init(): " + silent() + ", " + within_text(start) + ".", Why::kTimeout);
  }
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i] == rank_) continue;
    const std::vector<std::byte>& theirs = data_[ranks_[i]];
    if (theirs.size() != bytes) {
      fail("dcoll.init(): rank " + std::to_string(ranks_[i]) + " is at another place of it.", Why::kPeer);
    }
    if (bytes > 0) std::memcpy(all.data() + i * bytes, theirs.data(), bytes);
  }
  data_.clear();
}

// The leader's: tells all.
void MpiMeeting::fail(const std::string& text, Why why) {
  leave(text);
  raise(text, why);
}

void MpiMeeting::leave(const std::string& why) noexcept {
  if (meeting_ == 0 || ranks_.size() == 1) return;
  const uint64_t meeting = std::exchange(meeting_, 0);
  try {
    for (const int rank : ranks_) {
      if (rank != rank_ && (leads() || rank == ranks_.front())) send_text(rank, Kind::kFailed, meeting, why);
    }
    poll();
  } catch (...) {  // then the others find out by themselves
  }
}

void MpiMeeting::send(int to, Kind kind, uint64_t number, uint64_t more, const void* body, size_t bytes) {
  Header header{.kind = kind, .group = group_, .number = number, .more = more};
  version_.copy(header.version, sizeof header.version - 1);
  Transfer& sent = sends_.emplace_back();
  sent.peer = to;
  sent.bytes.resize(sizeof header + bytes);
  std::memcpy(sent.bytes.data(), &header, sizeof header);
  if (bytes > 0) std::memcpy(sent.bytes.data() + sizeof header, body, bytes);
  const int code =
      MPI_Isend(sent.bytes.data(), static_cast<int>(sent.bytes.size()), MPI_BYTE, to, kTag, comm_, &sent.request);
  if (code != MPI_SUCCESS) {
    sends_.pop_back();
    check_mpi(code, "MPI send to rank " + std::to_string(to) + " during dcoll.init()");
  }
}

void MpiMeeting::poll() {
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
  std::vector<int> held;
  for (auto one = receives_.begin(); one != receives_.end();) {
    if (std::ranges::find(held, one->peer) != held.end() || !finished(*one)) {
      held.push_back((one++)->peer);
      continue;
    }
    if (one->bytes.size() >= sizeof(Header)) {
      Message message{.from = one->peer, .header = {}, .body = {one->bytes.begin() + sizeof(Header), one->bytes.end()}};
      std::memcpy(static_cast<void*>(&message.header), one->bytes.data(), sizeof(Header));
      message.header.version[sizeof message.header.version - 1] = '\0';
      take(std::move(message));
    }
    one = receives_.erase(one);
  }
}

// What counts for the leader is filed at once, whatever is under way here.
void MpiMeeting::take(Message message) {
  const Header& h = message.header;
  switch (h.kind) {
    case Kind::kHere:
      here_[h.group][message.from] = {h.number, h.version};
      return;
    case Kind::kGone:
      here_[h.group].erase(message.from);
      // It gave up while it was told to go on.
      if (meeting_ != 0 && h.group == group_ && met_.contains(message.from) && met_[message.from] == h.number) {
        fail("dcoll.init(): rank " + std::to_string(message.from) + " gave up. " + message.text(), Why::kPeer);
      }
      return;
    case Kind::kData:
      if (!leads()) break;
      if (h.number == meeting_) data_[message.from] = std::move(message.body);
      return;
    case Kind::kFailed:
      if (!leads()) break;
      if (meeting_ != 0 && h.number == meeting_) fail(message.text(), Why::kPeer);
      return;
    case Kind::kWaiting:
    case Kind::kGo:
    case Kind::kRefused:
      break;
  }
  inbox_.push_back(std::move(message));
}

bool MpiMeeting::next(Message& message) {
  if (inbox_.empty()) return false;
  message = std::move(inbox_.front());
  inbox_.pop_front();
  return true;
}

}  // namespace dcoll::mpi
