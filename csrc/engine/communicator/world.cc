#include "engine/communicator/world.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/number.h"
#include "base/ranks_text.h"
#include "engine/communicator/cores.h"
#include "engine/watch/failure.h"
#include "kernels/reduce.h"
#include "transport/mapped/local.h"
#include "transport/mapped/shm.h"
#include "transport/os/tcp_congestion.h"
#include "transport/presence.h"
#include "transport/router.h"

namespace dcoll {
namespace {

constexpr std::chrono::milliseconds kConnectDeadline{60'000};  // DCOLL_TIMEOUT where that is less
constexpr size_t kMiB = size_t{1} << 20;

void apply_simd(const Settings& settings) {
  if (settings.simd != "auto" && !kernels::set_isa(settings.simd)) {
    throw ArgumentError("DCOLL_SIMD='" + settings.simd + "' is not available on this CPU; in use is " +
                        std::string(kernels::active_isa()) + ". Unset the variable to choose automatically.");
  }
}

MappedOptions mapped_options(const Settings& settings, size_t local_ranks) {
  // Address space, not memory: pages are taken when touched. No rank can use more than the machine has.
  const size_t physical = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
  MappedOptions options = slots_of(settings);
  options.arena_bytes = arena_bytes_of_each(
      settings.arena_mb > 0 ? static_cast<size_t>(settings.arena_mb) * kMiB : physical / kMiB * kMiB, local_ranks);
  return options;
}

// What each rank says, by rank; cut to what has room.
std::vector<std::string> told_texts(Bootstrap& job, const std::string& mine) {
  std::array<char, 400> text{};
  mine.copy(text.data(), text.size() - 1);
  std::vector<std::string> texts;
  for (const auto& told : job.gather(text)) texts.emplace_back(told.data());
  return texts;
}

// What every rank must be configured with alike: it decides the messages they exchange.
void check_same_settings(Bootstrap& job, const Settings& s) {
  const std::vector<std::string> all = told_texts(
      job, "DCOLL_TRANSPORT=" + s.transport + " DCOLL_ALGO=" + s.algo + " DCOLL_CALIBRATE=" + s.calibrate +
               " DCOLL_SLICE_KB=" + std::to_string(s.slice_kb) + " DCOLL_SLOTS=" + std::to_string(s.slots) +
               " DCOLL_ARENA_MB=" + std::to_string(s.arena_mb) + " DCOLL_NODES (hash) " +
               std::to_string(Fingerprint().add(std::span<const int>(s.nodes)).value()) + " DCOLL_BUCKET_MB=" +
               text_of(s.bucket_mb, 10) + " DCOLL_FIRST_BUCKET_MB=" + text_of(s.first_bucket_mb, 10) +
               " DCOLL_COMPRESS_LOCAL=" + std::to_string(s.compress_local) + " DCOLL_GPU_ENGINE=" + s.gpu_engine);
  for (int rank = 1; rank < job.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw ArgumentError("The ranks are configured differently: rank 0 has " + all[0] + ", rank " +
                        std::to_string(rank) + " has " + all[rank] +
                        ". Give every rank the same environment (mpirun -x NAME).");
  }
}

std::array<uint8_t, 16> job_key(Bootstrap& job) {
  std::array<uint8_t, 16> key{};
  if (job.rank() == 0 && getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size())) {
    throw TransportError("getrandom() gave no random key for this job: " + std::string(std::strerror(errno)) + ".");
  }
  job.broadcast(key.data(), key.size(), 0);
  return key;
}

bool are_several(const std::vector<int>& nodes) {
  return std::adjacent_find(nodes.begin(), nodes.end(), std::not_equal_to<>()) != nodes.end();
}

// Of DCOLL_THREAD_AFFINITY's cores, one per local rank, only this rank's.
Settings with_own_core(Settings settings, size_t local_rank, size_t local_size) {
  if (settings.thread_affinity.empty()) return settings;
  if (settings.thread_affinity.size() < local_size) {
    throw ArgumentError("DCOLL_THREAD_AFFINITY names " + std::to_string(settings.thread_affinity.size()) +
                        " cores, but this node has " + std::to_string(local_size) +
                        " ranks. Name one core per rank, in the order of local ranks, or unset the variable.");
  }
  settings.thread_affinity = {settings.thread_affinity[local_rank]};
  return settings;
}

// What takes this machine's monotonic clock to that of rank 0, by the clocks of the day: as exact as those are set.
// Ranks of a machine share one clock.
int64_t clock_shift_ns(Bootstrap& job, const std::vector<int>& machines) {
  if (*std::max_element(machines.begin(), machines.end()) == 0) return 0;
  const auto today = std::chrono::system_clock::now().time_since_epoch();
  const int64_t mine = std::chrono::duration_cast<std::chrono::nanoseconds>(today).count() - now_ns();
  const std::vector<int64_t> by_rank = job.gather(mine);
  const auto first =
      std::find(machines.begin(), machines.end(), machines[static_cast<size_t>(job.rank())]) - machines.begin();
  return by_rank[static_cast<size_t>(first)] - by_rank[0];
}

// Per rank: its node, numbered by lowest rank. Ranks of one machine are told apart by DCOLL_NODES as well.
std::vector<int> split_nodes(const std::vector<int>& machines, const Settings& settings) {
  std::vector<std::pair<int, int>> parts;
  for (size_t rank = 0; rank < machines.size(); ++rank) {
    parts.emplace_back(machines[rank], settings.nodes.empty() ? 0 : settings.nodes[rank % settings.nodes.size()]);
  }
  return numbered(parts);
}

std::vector<int> ranks_like(const std::vector<int>& group_of_rank, int rank) {
  std::vector<int> found;
  for (int other = 0; other < static_cast<int>(group_of_rank.size()); ++other) {
    if (group_of_rank[other] == group_of_rank[rank]) found.push_back(other);
  }
  return found;
}

// Per rank: whether it has a core to itself among the machine's ranks, which may be more than the node's: containers
// share cores, though not memory.
std::vector<bool> own_cores(Bootstrap& job) {
  const std::vector<CoreClaim> of_ranks = job.gather(own_core_claim());
  std::map<uint64_t, std::vector<CoreClaim>> claims;  // of each machine's ranks
  std::vector<std::pair<uint64_t, size_t>> places;    // per rank: where its claim is
  for (const CoreClaim& theirs : of_ranks) {
    std::vector<CoreClaim>& on_machine = claims[theirs.machine];
    places.emplace_back(theirs.machine, on_machine.size());
    on_machine.push_back(theirs);
  }
  std::map<uint64_t, std::vector<bool>> found;
  for (const auto& [machine, on_machine] : claims) found[machine] = own_core(on_machine);
  std::vector<bool> own;
  for (const auto& [machine, at] : places) own.push_back(found[machine][at]);
  return own;
}

std::shared_ptr<const Processes> watch_processes(Bootstrap& job, const StartUp& start, const Log& log,
                                                 const std::vector<ProcessId>& of_ranks) {
  constexpr std::chrono::milliseconds kLifelineLimit{2000};
  const std::vector<int> groups = watching_groups(of_ranks);
  std::unique_ptr<Lifelines> lifelines;
  if (are_several(groups)) {
    lifelines = std::make_unique<Lifelines>();
    const std::vector<LifelineAddress> addresses = job.gather(lifelines->address());
    const std::vector<int> without =
        lifelines->connect(addresses, groups, job.rank(), kLifelineLimit, start.look_around);
    if (!without.empty()) {
      log(LogLevel::kInfo, "no TCP connection to " + ranks_text(without) + " within " +
                               std::to_string(kLifelineLimit.count() / 1000) +
                               " s: a death there is noticed by other ranks, or at the deadline");
    }
  }
  return std::make_shared<Processes>(of_ranks, job.rank(), std::move(lifelines));
}

// What one host allows and another does not: before the transport is made, which all ranks make or none.
void check_congestion(Bootstrap& job, const std::string& wanted) {
  std::string error;
  try {
    const TcpCongestion probe(wanted);
  } catch (const ArgumentError& e) {
    error = e.what();
  }
  const std::vector<std::string> errors = told_texts(job, error);
  for (int rank = 0; rank < job.size(); ++rank) {
    if (!errors[rank].empty()) throw ArgumentError("rank " + std::to_string(rank) + ": " + errors[rank]);
  }
}

// Abstract sockets, by which ranks hand each other their memory, are seen in one network namespace alone.
bool in_same_network(Bootstrap& job, const std::vector<int>& local_ranks) {
  const uint64_t mine = own_network();
  return mine == job.gather(mine)[static_cast<size_t>(local_ranks.front())];
}

// Maps the memory of the node's ranks. Ranks that MPI calls local but that cannot map each other (separate containers,
// a limit on one's address space) all fall back to messages together: what one cannot do is everybody's `cause`. First
// each makes its own region, so that nobody waits for a rank that has none.
Endpoint connect_node(Bootstrap& job, const StartUp& start, const std::vector<int>& nodes,
                      const std::vector<int>& local_ranks, const Settings& settings, const Log& log,
                      std::vector<int>& memory_of_rank) {
  ShmPeers peers{.local_rank = static_cast<int>(std::find(local_ranks.begin(), local_ranks.end(), job.rank()) -
                                                local_ranks.begin()),
                 .local_size = static_cast<int>(local_ranks.size()),
                 .key = job_key(job),
                 .job_ranks = local_ranks};
  // A node of its own key: nodes that DCOLL_NODES made of one machine must not meet at one address.
  for (int byte = 0; byte < 4; ++byte) peers.key[byte] ^= static_cast<uint8_t>(nodes[job.rank()] >> (8 * byte));
  std::vector<std::string> causes(static_cast<size_t>(job.size()));  // by node: why it has no memory in common
  const auto agree = [&](const std::string& error) {
    const std::vector<std::string> errors = told_texts(job, error);
    for (int rank = 0; rank < job.size(); ++rank) {
      std::string& cause = causes[static_cast<size_t>(nodes[rank])];
      if (!errors[rank].empty() && cause.empty()) cause = "rank " + std::to_string(rank) + ": " + errors[rank];
    }
  };
  const std::string& cause = causes[static_cast<size_t>(nodes[job.rank()])];
  std::optional<ShmRegion> region;
  Endpoint endpoint;
  const auto attempt = [&](auto step) -> std::string {
    try {
      step();
    } catch (const Error& e) {
      return e.what();
    } catch (const std::bad_alloc&) {
      return "no memory is left";
    }
    return "";
  };
  if (settings.transport == "mpi") {
    causes.assign(causes.size(), "DCOLL_TRANSPORT=mpi");
  } else {
    const bool same_network = in_same_network(job, local_ranks);  // an error of this call ends the start-up
    agree(attempt([&] {
      if (!same_network) {
        throw TransportError("it runs in a container with another network namespace than rank " +
                             std::to_string(local_ranks.front()));
      }
      region.emplace(peers, mapped_options(settings, local_ranks.size()));
    }));
    const auto limit = std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(start.timeout_s));
    agree(attempt([&] {
      if (cause.empty()) endpoint = region->connect(std::min(kConnectDeadline, limit), start.look_around);
    }));
  }
  for (int rank = 0; rank < job.size(); ++rank) {
    memory_of_rank.push_back(causes[static_cast<size_t>(nodes[rank])].empty() ? nodes[rank] : job.size() + rank);
  }
  if (cause.empty()) return endpoint;
  if (settings.transport != "mpi" && local_ranks.front() == job.rank() && local_ranks.size() > 1) {
    log(LogLevel::kWarning,
        "node " + std::to_string(nodes[job.rank()]) +
            ": its ranks cannot share memory, using messages between them, which is slower. Cause: " + cause);
  }
  return {};
}

// More than one rank; all have met. node: what this rank has for those of its node, and keeps where this fails.
std::shared_ptr<Communicator> connect_ranks(Bootstrap& job, const StartUp& start, const Settings& given,
                                            Endpoint& node) {
  Members members;
  check_same_settings(job, given);
  members.rank = job.rank();
  members.size = job.size();
  const std::vector<int> machines = job.node_of_ranks();
  members.node_of_rank = split_nodes(machines, given);
  const Settings settings = given.on_nodes(are_several(members.node_of_rank));
  const Log log = settings.log_of(members.rank);

  members.timeline =
      std::make_shared<Timeline>(members.rank, members.node_of_rank[members.rank], clock_shift_ns(job, machines), log);
  const std::vector<int> local_ranks = ranks_like(members.node_of_rank, members.rank);
  node = connect_node(job, start, members.node_of_rank, local_ranks, settings, log, members.memory_of_rank);
  const bool mapped = node.transport != nullptr;
  const bool all_local = static_cast<int>(local_ranks.size()) == members.size;
  members.transport_of_rank.assign(members.size, job.medium());
  if (mapped) {
    for (const int rank : local_ranks) members.transport_of_rank[rank] = node.transport->name();
  }
  members.transport_of_rank[members.rank] = "self";
  // Without peers' memory, the window is this rank's own.
  members.window = mapped ? node.window : std::move(connect_local(1, mapped_options(settings, 1)).front().window);
  const std::vector<bool> own_core_of_rank = own_cores(job);
  members.own_core = own_core_of_rank[members.rank];
  members.shared_cores = std::ranges::find(own_core_of_rank, false) != own_core_of_rank.end();
  if (!all_local) {
    members.links = link_constants(job, members.node_of_rank, settings, log);
  }

  members.process_of_rank = job.gather(own_process());

  // A thread that listens calls MPI while the program may be doing so itself.
  members.may_listen = (mapped && all_local) || job.takes_threads();

  const size_t message_bytes = static_cast<size_t>(settings.slice_kb) << 10;
  if (mapped && all_local) {
    members.transport = std::move(node.transport);
  } else {
    members.processes = watch_processes(job, start, log, members.process_of_rank);
    check_congestion(job, settings.tcp_congestion);
    auto remote = job.make_transport(message_bytes, static_cast<int>(settings.slots), settings.tcp_congestion);
    members.transport =
        make_router(members.rank, members.size, std::move(node.transport), local_ranks, std::move(remote));
  }
  log(LogLevel::kInfo, "size " + std::to_string(members.size) + ", node " +
                           std::to_string(members.node_of_rank[members.rank]) + ", " +
                           (mapped ? std::to_string(local_ranks.size()) + " ranks share memory" : "messages only") +
                           (members.own_core ? ", own core" : ", cores shared: waits yield, then sleep"));
  const auto own = std::find(local_ranks.begin(), local_ranks.end(), members.rank) - local_ranks.begin();
  return Communicator::make(std::move(members), with_own_core(settings, static_cast<size_t>(own), local_ranks.size()));
}

StartUp start_up(const Settings& settings, int rank, std::function<void()> look_around) {
  StartUp start;
  start.timeout_s = settings.timeout_s;
  start.look_around = std::move(look_around);
  if (settings.stall_check_disable) return start;
  start.report_s = settings.stall_check_time_s;
  start.report = [log = settings.log_of(rank)](const std::string& text) { log(LogLevel::kWarning, text); };
  return start;
}

}  // namespace

StartUp start_up_from_env(std::function<void()> look_around) {
  const auto who = LaunchedAs::from_env();
  try {
    return start_up(Settings::from_env(), who ? who->rank : 0, look_around);
  } catch (const ArgumentError&) {  // connect_world's caller says so, when MPI can end the job
    StartUp start;
    start.look_around = look_around;
    return start;
  }
}

std::shared_ptr<Communicator> connect_world(Bootstrap* job, const Settings& given, std::function<void()> look_around) {
  apply_simd(given);
  if (job == nullptr || job->size() == 1) {
    const Settings settings = given.on_nodes(false);
    Endpoint alone = std::move(connect_local(1, mapped_options(settings, 1)).front());
    Members members;
    members.transport = std::move(alone.transport);
    members.window = std::move(alone.window);
    return Communicator::make(std::move(members), with_own_core(settings, 0, 1));
  }
  const StartUp start = start_up(given, job->rank(), std::move(look_around));
  job->meet(start);
  const std::string who = "rank " + std::to_string(job->rank()) + " left dcoll.init(): ";
  Endpoint node;
  try {
    return connect_ranks(*job, start, given, node);
  } catch (const std::exception& error) {
    // Those that have begun without this rank, which is late to fail, will see its memory closed.
    if (node.transport != nullptr) node.transport->post_failure(encode_failure(std::current_exception(), job->rank()));
    job->leave(who + error.what());
    throw;
  } catch (...) {
    job->leave(who + "it was interrupted.");
    throw;
  }
}

namespace {

// Ranks as threads on the nodes that `nodes` gives them: memory in common inside a node, messages between.
std::vector<Endpoint> connect_thread_nodes(const std::vector<int>& nodes, const Settings& settings) {
  const int n = static_cast<int>(nodes.size());
  const MappedOptions options = mapped_options(settings, nodes.size());
  std::vector<Endpoint> all = connect_local(n, options);
  if (settings.transport == "mpi" || !are_several(nodes)) return all;
  std::vector<Endpoint> endpoints(nodes.size());
  for (int rank = 0; rank < n; ++rank) {
    const std::vector<int> local_ranks = ranks_like(nodes, rank);
    if (local_ranks.front() != rank) continue;  // done with its node's first
    std::vector<Endpoint> node = connect_local(static_cast<int>(local_ranks.size()), options);
    for (size_t i = 0; i < local_ranks.size(); ++i) {
      const int member = local_ranks[i];
      endpoints[member].transport =
          make_router(member, n, std::move(node[i].transport), local_ranks, std::move(all[member].transport));
      endpoints[member].window = std::move(node[i].window);
    }
  }
  return endpoints;
}

}  // namespace

std::vector<std::shared_ptr<Communicator>> connect_threads(int n, const Settings& given, const LinkConstants& links) {
  apply_simd(given);
  const std::vector<int> nodes = split_nodes(std::vector<int>(static_cast<size_t>(n), 0), given);
  const Settings settings = given.on_nodes(are_several(nodes));
  std::vector<Endpoint> endpoints = connect_thread_nodes(nodes, settings);
  const std::vector<CoreClaim> claims(static_cast<size_t>(n), own_core_claim());
  const bool spacious = own_core(claims).front();
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (int rank = 0; rank < n; ++rank) {
    Members members;
    members.rank = rank;
    members.size = n;
    members.node_of_rank = nodes;
    if (settings.transport != "mpi") members.memory_of_rank = nodes;
    members.transport_of_rank.assign(n, "local");
    members.transport_of_rank[rank] = "self";
    members.transport = std::move(endpoints[rank].transport);
    if (settings.transport != "mpi") members.window = std::move(endpoints[rank].window);
    members.links = links;
    members.own_core = spacious;
    members.shared_cores = !spacious;
    communicators.push_back(Communicator::make(
        std::move(members), with_own_core(settings, static_cast<size_t>(rank), static_cast<size_t>(n))));
  }
  return communicators;
}

}  // namespace dcoll
