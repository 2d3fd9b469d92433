#include "engine/communicator/subset.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/error.h"
#include "engine/links/link_constants.h"
#include "transport/mapped/local.h"
#include "transport/router.h"

namespace dcoll {
namespace {

MappedOptions options_of(const Settings& settings) {
  MappedOptions options;
  options.slot_bytes = static_cast<size_t>(settings.slice_kb) << 10;
  options.slots = static_cast<int>(settings.slots);
  return options;
}

void check_ranks(const std::vector<int>& ranks, const Communicator& whole) {
  const bool ascending = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
  if (!ascending || ranks.empty() || ranks.front() < 0 || ranks.back() >= whole.size() ||
      !std::binary_search(ranks.begin(), ranks.end(), whole.rank())) {
    throw ArgumentError("the ranks of a subset must be different ranks below " + std::to_string(whole.size()) +
                        ", in ascending order, rank " + std::to_string(whole.rank()) + " among them");
  }
}

}  // namespace

Subset::Subset(std::shared_ptr<Communicator> whole, std::vector<int> ranks)
    : whole_(std::move(whole)), ranks_(std::move(ranks)) {
  check_ranks(ranks_, *whole_);
  const Members& all = whole_->members();
  std::vector<int> local_ranks;  // as the window counts
  for (int rank = 0, local = 0; rank < whole_->size(); ++rank) {
    if (all.node_of_rank[rank] != whole_->node()) continue;
    const auto found = std::lower_bound(ranks_.begin(), ranks_.end(), rank);
    if (found != ranks_.end() && *found == rank) {
      local_.push_back(static_cast<int>(found - ranks_.begin()));
      local_ranks.push_back(local);
    }
    ++local;
  }
  const bool mapped = all.window != nullptr && all.window->local_size() == whole_->local_size();
  if (mapped) region_ = std::make_unique<SubsetRegion>(all.window, local_ranks, options_of(whole_->settings()));
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
  members.may_listen = all.may_listen;
  members.job_ranks = ranks_;
  members.processes = all.processes;
  std::map<int, int> nodes;  // of the whole -> of the subset, numbered by lowest rank
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const int rank = ranks_[i];
    if (rank == whole_->rank()) members.rank = static_cast<int>(i);
    members.node_of_rank.push_back(
        nodes.try_emplace(all.node_of_rank[rank], static_cast<int>(nodes.size())).first->second);
    members.transport_of_rank.push_back(all.transport_of_rank[rank]);
    if (!all.memory_of_rank.empty()) members.memory_of_rank.push_back(all.memory_of_rank[rank]);
  }
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
      job_ranks.push_back(ranks_[member]);
    }
    node = region_->connect(local_offsets, job_ranks);
  } else {
    Endpoint alone = std::move(connect_local(1, options_of(settings)).front());
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
  const auto messages = job->subset(ranks_);
  const Log log{log_level_from(settings.log_level), whole_->rank(), settings.log_hide_time};
  members.links = link_constants(*messages, members.node_of_rank, settings, log);
  members.links.of_the_job = whole_->known_links();
  members.links.known = std::make_shared<KnownLinks>();
  auto remote =
      messages->make_transport(options_of(settings).slot_bytes, options_of(settings).slots, settings.tcp_congestion);
  members.transport =
      node.transport != nullptr && local_.size() > 1
          ? make_router(members.rank, members.size, std::move(node.transport), local_, std::move(remote))
          : std::move(remote);
  return Communicator::make(std::move(members), settings);
}

}  // namespace dcoll
