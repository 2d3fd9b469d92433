#include "engine/communicator/subset.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/ranks_text.h"
#include "engine/core/point.h"
#include "engine/links/link_constants.h"
#include "transport/mapped/local.h"
#include "transport/router.h"

namespace dcoll {
namespace {

void check_ranks(const std::vector<int>& ranks, const Communicator& whole) {
  std::vector<int> sorted = ranks;
  std::ranges::sort(sorted);
  const bool differ = std::ranges::adjacent_find(sorted) == sorted.end();
  if (!differ || sorted.empty() || sorted.front() < 0 || sorted.back() >= whole.size() ||
      !std::ranges::binary_search(sorted, whole.rank())) {
    throw ArgumentError("the ranks of a subset must be different ranks below " + std::to_string(whole.size()) +
                        ", rank " + std::to_string(whole.rank()) + " among them");
  }
}

}  // namespace

Subset::Subset(std::shared_ptr<Communicator> whole, std::vector<int> ranks)
    : whole_(std::move(whole)), ranks_(std::move(ranks)) {
  check_ranks(ranks_, *whole_);
  const Members& all = whole_->members();
  std::vector<int> local_ranks;  // as the window counts
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (all.node_of_rank[ranks_[i]] != all.node()) continue;
    local_.push_back(static_cast<int>(i));
    const auto begin = all.node_of_rank.begin();
    local_ranks.push_back(static_cast<int>(std::count(begin, begin + ranks_[i], all.node())));
  }
  const bool mapped = all.window != nullptr && all.window->local_size() == all.local_size();
  if (mapped) region_ = std::make_unique<SubsetRegion>(all.window, local_ranks, slots_of(whole_->settings()));
}

// All but the transport and the window.
Members Subset::describe() const {
  const Members& all = whole_->members();
  Members members;
  members.size = static_cast<int>(ranks_.size());
  members.node_of_rank.clear();
  members.transport_of_rank.clear();
  members.own_core = all.own_core;
  members.shared_cores = all.shared_cores;
  members.timeline = all.timeline;
  members.diagnosis = all.diagnosis;
  members.driver = all.driver;
  members.may_listen = all.may_listen;
  for (const int rank : ranks_) members.job_ranks.push_back(all.job_rank(rank));
  members.processes = all.processes;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const int rank = ranks_[i];
    if (rank == whole_->rank()) members.rank = static_cast<int>(i);
    members.node_of_rank.push_back(all.node_of_rank[rank]);
    members.transport_of_rank.push_back(all.transport_of_rank[rank]);
    if (!all.memory_of_rank.empty()) members.memory_of_rank.push_back(all.memory_of_rank[rank]);
    if (!all.process_of_rank.empty()) members.process_of_rank.push_back(all.process_of_rank[rank]);
  }
  members.node_of_rank = numbered(members.node_of_rank);
  return members;
}

std::shared_ptr<Communicator> Subset::connect(const std::vector<uint64_t>& offsets, Bootstrap* job) {
  if (offsets.size() != ranks_.size()) {
    throw ArgumentError("a subset of " + std::to_string(ranks_.size()) + " ranks got " +
                        std::to_string(offsets.size()) + " offsets");
  }
  Members members = describe();
  const Settings& settings = whole_->settings();
  Endpoint node;
  if (region_ != nullptr) {
    std::vector<uint64_t> local_offsets;
    std::vector<int> job_ranks;
    for (const int member : local_) {
      local_offsets.push_back(offsets[member]);
      job_ranks.push_back(members.job_ranks[member]);
    }
    node = region_->connect(local_offsets, job_ranks);
  } else {
    Endpoint alone = std::move(connect_local(1, slots_of(settings)).front());
    if (!members.memory_of_rank.empty()) node.window = std::move(alone.window);
    if (ranks_.size() == 1) node.transport = std::move(alone.transport);
  }
  members.window = node.window;
  if (node.transport != nullptr && local_.size() == ranks_.size()) {
    members.transport = std::move(node.transport);
    return Communicator::make(std::move(members), settings);
  }
  if (job == nullptr) {
    throw TransportError("the ranks of this subset do not all share memory, and nothing carries messages between them");
  }
  // The communicators of the job and of its sets are driven by several threads, each under a lock of its own.
  if (!job->takes_threads()) {
    throw TransportError(
        "a process set whose ranks do not all share memory needs MPI_THREAD_MULTIPLE, which this MPI does not offer or "
        "was not asked for. Let dcoll.init() initialise MPI, or use an MPI built with thread support");
  }
  const auto messages = job->subset(members.job_ranks);
  members.links = link_constants(*messages, members.node_of_rank, settings, settings.log_of(whole_->rank()));
  members.links.of_the_job = whole_->as_made().links.of_the_job;
  members.links.known = std::make_shared<KnownLinks>();
  const MappedOptions options = slots_of(settings);
  auto remote = messages->make_transport(options.slot_bytes, options.slots, settings.tcp_congestion);
  members.transport = make_router(members.rank, members.size, std::move(node.transport), local_, std::move(remote));
  return Communicator::make(std::move(members), settings);
}

namespace {

constexpr size_t kMostTextBytes = size_t{4} << 10;

std::string cut(const std::string& text) { return text.substr(0, whole_characters(text, kMostTextBytes)); }

// What a member tells the lowest rank among them: this, its ranks (int each), and why it cannot take part, if so.
struct Joining {
  uint64_t offset = 0;
  uint64_t members = 0;
};

// What it is told: this, and the offsets, or what is wrong.
enum class Outcome : uint64_t { kMade, kRefused, kMismatch };

using Letter = std::vector<std::byte>;

template <class Head, class... Rest>
Letter letter_of(const Head& head, const Rest&... rest) {
  Letter letter;
  const auto add = [&](std::span<const std::byte> bytes) { letter.insert(letter.end(), bytes.begin(), bytes.end()); };
  add(std::as_bytes(std::span(&head, 1)));
  (add(std::as_bytes(std::span(rest))), ...);
  return letter;
}

// One message of the whole, under a tag of its own, says all that a rank has to say: each is a change of threads where
// ranks share cores.
class Talk {
 public:
  Talk(Communicator& whole, const std::function<void()>& look_around) : whole_(whole), look_around_(look_around) {}

  void send(int rank, const Letter& letter) {
    wait(whole_.submit(message(Kind::kSend, letter.data(), letter.size(), rank, kTag)));
  }
  // Calls read(head, rest) with what `rank` has sent. That came through memory that a stray write may have reached:
  // read returns whether it is possible.
  template <class Head, class Read>
  void receive(int rank, size_t most_bytes, const Read& read) {
    Letter letter(sizeof(Head) + most_bytes);
    const auto operation = whole_.submit(message(Kind::kReceive, letter.data(), letter.size(), rank, kTag));
    wait(operation);
    letter.resize(operation->request.count);
    Head head;
    if (letter.size() >= sizeof head) {
      std::memcpy(&head, letter.data(), sizeof head);
      if (read(head, std::span(letter).subspan(sizeof head))) return;
    }
    const std::string text = "rank " + std::to_string(whole_.members().job_rank(rank)) +
                             " sent, to make a group, what no rank sends: its memory is damaged. Look for "
                             "out-of-bounds writes there, or run all ranks with the same dcoll version";
    whole_.fail(text);
    throw TransportError(text);
  }

 private:
  static constexpr uint64_t kTag = point_key(PointSpace::kGroups, 0);

  void wait(const std::shared_ptr<Operation>& operation) {
    constexpr double kLookAroundSeconds = 0.1;
    try {
      while (!whole_.wait_for(*operation, kLookAroundSeconds)) {
        if (look_around_) look_around_();
      }
    } catch (...) {  // the caller's memory must not be in use any more
      whole_.fail("making a group was interrupted on rank " + std::to_string(whole_.members().job_rank(whole_.rank())));
      throw;
    }
    if (operation->error) std::rethrow_exception(operation->error);
  }

  Communicator& whole_;
  const std::function<void()>& look_around_;
};

struct Joint {
  Outcome outcome = Outcome::kMade;
  std::vector<uint64_t> offsets{};
  std::string wrong{};
};

std::string string_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Of the lowest rank: what the others have to say.
void hear(Talk& talk, const Communicator& whole, const std::vector<int>& ranks, size_t member, Joint& joint) {
  const auto name = [&](int rank) { return "rank " + std::to_string(whole.members().job_rank(rank)); };
  const int from = ranks[member];
  const size_t most = static_cast<size_t>(whole.size()) * sizeof(int) + kMostTextBytes;
  std::vector<int> theirs;
  std::string refusal;
  talk.receive<Joining>(from, most, [&](const Joining& joining, std::span<const std::byte> rest) {
    if (joining.members > rest.size() / sizeof(int)) return false;
    joint.offsets[member] = joining.offset;
    theirs.resize(joining.members);
    const size_t bytes = theirs.size() * sizeof(int);
    if (bytes > 0) std::memcpy(theirs.data(), rest.data(), bytes);
    refusal = string_of(rest.subspan(bytes));
    return true;
  });
  if (joint.outcome != Outcome::kMade) return;
  if (theirs != ranks) {
    joint.outcome = Outcome::kMismatch;
    joint.wrong = name(from) + " makes a group of " + ranks_text(theirs) + " where " + name(whole.rank()) +
                  " makes one of " + ranks_text(ranks) +
                  ". Make the groups that ranks share in the same order on each.";
  } else if (!refusal.empty()) {
    joint.outcome = Outcome::kRefused;
    joint.wrong = name(from) + " cannot be in a group of " + ranks_text(ranks) + ": " + refusal;
  }
}

Joint gather(Talk& talk, const Communicator& whole, const std::vector<int>& ranks, uint64_t offset,
             const std::string& refusal) {
  Joint joint{.offsets = std::vector<uint64_t>(ranks.size(), offset), .wrong = refusal};
  if (!refusal.empty()) joint.outcome = Outcome::kRefused;
  for (size_t member = 0; member < ranks.size(); ++member) {
    if (ranks[member] == whole.rank()) continue;
    try {
      hear(talk, whole, ranks, member, joint);
    } catch (const MismatchError& error) {  // it has left, which the others hear from this rank
      joint.outcome = Outcome::kMismatch;
      joint.wrong = error.what();
    }
  }
  joint.wrong = cut(joint.wrong);
  const bool fine = joint.outcome == Outcome::kMade;
  const Letter letter = fine ? letter_of(joint.outcome, joint.offsets) : letter_of(joint.outcome, joint.wrong);
  for (const int rank : ranks) {
    if (rank != whole.rank()) talk.send(rank, letter);
  }
  return joint;
}

Joint join(Talk& talk, const std::vector<int>& ranks, uint64_t offset, const std::string& refusal) {
  const int lowest = std::ranges::min(ranks);
  talk.send(lowest, letter_of(Joining{offset, ranks.size()}, ranks, refusal));
  Joint joint;
  const size_t bytes = ranks.size() * sizeof(uint64_t);
  talk.receive<Outcome>(lowest, bytes + kMostTextBytes, [&](Outcome outcome, std::span<const std::byte> rest) {
    joint.outcome = outcome;
    if (outcome != Outcome::kMade) {
      joint.wrong = string_of(rest);
      return outcome <= Outcome::kMismatch;
    }
    if (rest.size() != bytes) return false;
    joint.offsets.resize(ranks.size());
    std::memcpy(joint.offsets.data(), rest.data(), bytes);
    return true;
  });
  return joint;
}

}  // namespace

std::shared_ptr<Communicator> make_group(std::shared_ptr<Communicator> whole, std::vector<int> ranks, Bootstrap* job,
                                         const std::function<void()>& look_around) {
  check_ranks(ranks, *whole);
  std::optional<Subset> subset;
  std::string refusal;
  try {
    subset.emplace(whole, ranks);
  } catch (const TransportError& error) {  // no room; the others must not wait
    refusal = cut(error.what());
  }
  const uint64_t offset = subset ? subset->offset() : kUnmappedOffset;
  Talk talk(*whole, look_around);
  const bool lowest = std::ranges::min(ranks) == whole->rank();
  const Joint joint = lowest ? gather(talk, *whole, ranks, offset, refusal) : join(talk, ranks, offset, refusal);
  if (joint.outcome == Outcome::kMismatch) throw MismatchError(joint.wrong);
  if (joint.outcome == Outcome::kRefused) throw TransportError(joint.wrong);
  return subset->connect(joint.offsets, job);
}

}  // namespace dcoll
