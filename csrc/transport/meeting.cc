#include "transport/meeting.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/ranks_text.h"
#include "transport/presence.h"

namespace dcoll {
namespace {

// How much longer than the leader the others wait for its word.
double patience(const StartUp& start) { return std::min(5.0, start.timeout_s / 4); }

std::string not_here(const std::vector<int>& ranks) {
  const char* has = ranks.size() == 1 ? " has" : " have";
  return ranks_text(ranks) + has + " not called dcoll.init() (again), or" + has + " ended, or hang" +
         (ranks.size() == 1 ? "s" : "");
}

}  // namespace

Meeting::Meeting(std::unique_ptr<Mailbox> mail, int rank, std::function<std::vector<int>()> ended)
    : mail_(std::move(mail)), ended_(std::move(ended)), rank_(rank) {}

void Meeting::meet(const StartUp& start, std::vector<int> ranks) {
  ranks_ = std::move(ranks);
  version_ = start.version.substr(0, sizeof Header::version - 1);
  group_ = Fingerprint().add(std::span<const int>(ranks_)).value();
  meeting_ = 0;
  met_.clear();
  data_.clear();
  if (ranks_.size() == 1) return;
  try {
    leads() ? lead(start) : follow(start);
    ended_();  // whoever was seen once is missed when it has ended
  } catch (const Error&) {
    throw;  // the others have been told
  } catch (...) {
    const std::string why = "rank " + std::to_string(rank_) + " was interrupted in dcoll.init().";
    try {
      leads() ? refuse(why, Why::kPeer) : send_text(ranks_.front(), Kind::kGone, attempts_, why);
    } catch (...) {  // then the others wait for this rank in vain, and say so
    }
    throw;
  }
}

void Meeting::lead(const StartUp& start) {
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
    go_on(
        start, wait, [&] { return not_here(missing); },
        [this](const std::string& text, Why why) { refuse(text, why); });
  }
  refuse_other_versions();
  meeting_ = ++meetings_;
  for (const auto& [rank, one] : here_[group_]) {
    met_[rank] = one.attempt;
    send(rank, Kind::kGo, one.attempt, meeting_);
  }
  here_[group_].clear();
}

std::vector<int> Meeting::absent() const {
  std::vector<int> missing;
  const auto here = here_.find(group_);
  for (const int rank : ranks_) {
    if (rank != rank_ && (here == here_.end() || !here->second.contains(rank))) missing.push_back(rank);
  }
  return missing;
}

void Meeting::refuse(const std::string& text, Why why) {
  for (const auto& [rank, one] : here_[group_]) send_text(rank, Kind::kRefused, one.attempt, text, why);
  here_[group_].clear();
  poll();
}

void Meeting::raise(const std::string& text, Why why) {
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

void Meeting::refuse_other_versions() {
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

void Meeting::follow(const StartUp& start) {
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
    go_on(start, wait, [&] { return heard; }, [&](const std::string&, Why) { send(leader, Kind::kGone, attempts_); });
  }
}

// What to say of those that are known to have ended; empty: none has, or it is not the time to look.
std::string Meeting::dead(const StartWait& wait) const {
  if (!wait.thorough()) return "";
  std::vector<int> dead;
  for (const int rank : ended_()) {
    if (std::ranges::find(ranks_, rank) != ranks_.end()) dead.push_back(rank);
  }
  if (dead.empty()) return "";
  return "dcoll.init(): " + ended_text(dead);
}

void Meeting::go_on(const StartUp& start, StartWait& wait, const std::function<std::string()>& missing,
                    const std::function<void(const std::string&, Why)>& give_up) const {
  std::string text = dead(wait);
  const Why why = text.empty() ? Why::kTimeout : Why::kPeer;
  if (text.empty() && wait.goes_on(missing)) return;
  if (text.empty()) text = "dcoll.init(): " + missing() + ", " + within_text(start) + ".";
  give_up(text, why);
  raise(text, why);
}

std::vector<std::byte> Meeting::all_gather(const StartUp& start, const void* data, size_t bytes) {
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
    const auto unread = [this] { return "rank " + std::to_string(*mail_->under_way_to()) + " does not answer"; };
    for (StartWait wait(start); mail_->under_way_to() && wait.goes_on(unread);) poll();
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
      raise(message.text(), static_cast<Why>(message.header.more));
    }
    go_on(start, wait, silent, [](const std::string&, Why) {});
  }
}

void Meeting::gather(const StartUp& start, std::vector<std::byte>& all, size_t bytes) {
  std::vector<int> missing;
  const auto silent = [&] { return ranks_text(missing) + (missing.size() == 1 ? " does" : " do") + " not answer"; };
  for (StartWait wait(start);;) {
    poll();
    missing.clear();
    for (const int rank : ranks_) {
      if (rank != rank_ && !data_.contains(rank)) missing.push_back(rank);
    }
    if (missing.empty()) break;
    go_on(start, wait, silent, [this](const std::string& text, Why why) { leave(text, why); });
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
void Meeting::fail(const std::string& text, Why why) {
  leave(text, why);
  raise(text, why);
}

void Meeting::leave(const std::string& text, Why why) noexcept {
  if (meeting_ == 0 || ranks_.size() == 1) return;
  const uint64_t meeting = std::exchange(meeting_, 0);
  try {
    for (const int rank : ranks_) {
      if (rank != rank_ && (leads() || rank == ranks_.front())) send_text(rank, Kind::kFailed, meeting, text, why);
    }
    poll();
  } catch (...) {  // then the others find out by themselves
  }
}

void Meeting::send(int to, Kind kind, uint64_t number, uint64_t more, const void* body, size_t bytes) {
  Header header{.kind = kind, .group = group_, .number = number, .more = more};
  version_.copy(header.version, sizeof header.version - 1);
  std::vector<std::byte> letter(sizeof header + bytes);
  std::memcpy(letter.data(), &header, sizeof header);
  if (bytes > 0) std::memcpy(letter.data() + sizeof header, body, bytes);
  mail_->send(to, std::move(letter));
}

void Meeting::poll() {
  const std::vector<int> leader{ranks_.front()};
  std::ranges::move(mail_->take(leads() ? ranks_ : leader), std::back_inserter(unread_));
  while (!unread_.empty()) {  // one by one: what a message leads to may end this by an error
    const Mailbox::Letter letter = std::move(unread_.front());
    unread_.pop_front();
    if (letter.bytes.size() < sizeof(Header)) continue;
    Message message{
        .from = letter.from, .header = {}, .body = {letter.bytes.begin() + sizeof(Header), letter.bytes.end()}};
    std::memcpy(static_cast<void*>(&message.header), letter.bytes.data(), sizeof(Header));
    message.header.version[sizeof message.header.version - 1] = '\0';
    take(std::move(message));
  }
}

// What counts for the leader is filed at once, whatever is under way here.
void Meeting::take(Message message) {
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
      if (meeting_ != 0 && h.number == meeting_) fail(message.text(), static_cast<Why>(h.more));
      return;
    case Kind::kWaiting:
    case Kind::kGo:
    case Kind::kRefused:
      break;
  }
  inbox_.push_back(std::move(message));
}

bool Meeting::next(Message& message) {
  if (inbox_.empty()) return false;
  message = std::move(inbox_.front());
  inbox_.pop_front();
  return true;
}

}  // namespace dcoll
