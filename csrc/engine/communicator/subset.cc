#include "engine/communicator/subset.h"

#include <algorithm>
#include <optional>
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

constexpr size_t kMostTextBytes = size_t{64} << 10;

std::string cut(const std::string& text) { return text.substr(0, whole_characters(text, kMostTextBytes)); }

// What a member tells the lowest rank among them: this, its ranks (int each), and why it cannot take part.
struct Joining {
  uint64_t offset = 0;
  uint32_t members = 0;
  uint32_t refusal_bytes = 0;
};

// What it is told: this, and the offsets, or what is wrong.
struct Joined {
  uint32_t bytes = 0;
  enum class Outcome : uint32_t { kMade, kRefused, kMismatch } outcome = Outcome::kMade;
};

// Messages of the whole under a tag of their own.
class Talk {
 public:
  Talk(Communicator& whole, const std::function<void()>& look_around) : whole_(whole), look_around_(look_around) {}

  void send(int rank, const void* data, size_t bytes) {
    if (bytes > 0) wait(whole_.submit(message(Kind::kSend, data, bytes, rank, kTag)));
  }
  void receive(int rank, void* data, size_t bytes) {
    if (bytes > 0) wait(whole_.submit(message(Kind::kReceive, data, bytes, rank, kTag)));
  }
  // What `rank` sent came through memory that a stray write may have reached: only what is possible is gone by.
  void expect(bool possible, int rank) {
    if (possible) return;
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
  Joined head;
  std::vector<uint64_t> offsets;
  std::string wrong;
};

// Of the lowest rank: what the others have to say.
void hear(Talk& talk, const Communicator& whole, const std::vector<int>& ranks, size_t member, Joint& joint) {
  const auto name = [&](int rank) { return "rank " + std::to_string(whole.members().job_rank(rank)); };
  const int from = ranks[member];
  Joining joining;
  talk.receive(from, &joining, sizeof joining);
  talk.expect(joining.members <= static_cast<uint64_t>(whole.size()) && joining.refusal_bytes <= kMostTextBytes, from);
  std::vector<int> theirs(joining.members);
  talk.receive(from, theirs.data(), theirs.size() * sizeof(int));
  std::string refusal(joining.refusal_bytes, '\0');
  talk.receive(from, refusal.data(), refusal.size());
  joint.offsets[member] = joining.offset;
  if (joint.head.outcome != Joined::Outcome::kMade) return;
  if (theirs != ranks) {
    joint.head.outcome = Joined::Outcome::kMismatch;
    joint.wrong = name(from) + " makes a group of " + ranks_text(theirs) + " where " + name(whole.rank()) +
                  " makes one of " + ranks_text(ranks) +
                  ". Make the groups that ranks share in the same order on each.";
  } else if (!refusal.empty()) {
    joint.head.outcome = Joined::Outcome::kRefused;
    joint.wrong = name(from) + " cannot be in a group of " + ranks_text(ranks) + ": " + refusal;
  }
}

Joint gather(Talk& talk, const Communicator& whole, const std::vector<int>& ranks, uint64_t offset,
             const std::string& refusal) {
  Joint joint{{}, std::vector<uint64_t>(ranks.size(), offset), refusal};
  if (!refusal.empty()) joint.head.outcome = Joined::Outcome::kRefused;
  for (size_t member = 0; member < ranks.size(); ++member) {
    if (ranks[member] == whole.rank()) continue;
    try {
      hear(talk, whole, ranks, member, joint);
    } catch (const MismatchError& error) {  // it has left, which the others hear from this rank
      joint.head.outcome = Joined::Outcome::kMismatch;
      joint.wrong = error.what();
    }
  }
  joint.wrong = cut(joint.wrong);
  const bool fine = joint.head.outcome == Joined::Outcome::kMade;
  const size_t bytes = fine ? joint.offsets.size() * sizeof(uint64_t) : joint.wrong.size();
  joint.head.bytes = static_cast<uint32_t>(bytes);
  for (const int rank : ranks) {
    if (rank == whole.rank()) continue;
    talk.send(rank, &joint.head, sizeof joint.head);
    talk.send(rank, fine ? static_cast<const void*>(joint.offsets.data()) : joint.wrong.data(), bytes);
  }
  return joint;
}

Joint join(Talk& talk, const std::vector<int>& ranks, uint64_t offset, const std::string& refusal) {
  const int lowest = std::ranges::min(ranks);
  const Joining joining{offset, static_cast<uint32_t>(ranks.size()), static_cast<uint32_t>(refusal.size())};
  talk.send(lowest, &joining, sizeof joining);
  talk.send(lowest, ranks.data(), ranks.size() * sizeof(int));
  talk.send(lowest, refusal.data(), refusal.size());
  Joint joint;
  talk.receive(lowest, &joint.head, sizeof joint.head);
  if (joint.head.outcome == Joined::Outcome::kMade) {
    joint.offsets.resize(ranks.size());
    const size_t bytes = ranks.size() * sizeof(uint64_t);
    talk.expect(joint.head.bytes == bytes, lowest);
    talk.receive(lowest, joint.offsets.data(), bytes);
  } else {
    talk.expect(joint.head.outcome <= Joined::Outcome::kMismatch && joint.head.bytes <= kMostTextBytes, lowest);
    joint.wrong.resize(joint.head.bytes);
    talk.receive(lowest, joint.wrong.data(), joint.head.bytes);
  }
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
  if (joint.head.outcome == Joined::Outcome::kMismatch) throw MismatchError(joint.wrong);
  if (joint.head.outcome == Joined::Outcome::kRefused) throw TransportError(joint.wrong);
  return subset->connect(joint.offsets, job);
}

}  // namespace dcoll
