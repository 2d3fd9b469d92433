#include "engine/communicator/members.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/collective/by_nccl.h"
#include "engine/collective/on_device.h"
#include "engine/core/point.h"
#include "engine/core/slices.h"

namespace dcoll {

MappedOptions slots_of(const Settings& settings) {
  MappedOptions options;
  options.slot_bytes = static_cast<size_t>(settings.slice_kb) << 10;
  options.slots = static_cast<int>(settings.slots);
  return options;
}

std::vector<int> Members::all_job_ranks() const {
  std::vector<int> ranks;
  for (int one = 0; one < size; ++one) ranks.push_back(job_rank(one));
  return ranks;
}

int Members::local_rank() const {
  const auto begin = node_of_rank.begin();
  return static_cast<int>(std::count(begin, begin + rank, node()));
}

int Members::local_size() const {
  return static_cast<int>(std::count(node_of_rank.begin(), node_of_rank.end(), node()));
}

int Members::num_nodes() const { return 1 + *std::max_element(node_of_rank.begin(), node_of_rank.end()); }

Setup::Setup(Members given, const Settings& how)
    : members(std::move(given)), settings(how), log(how.log_of(members.job_rank(members.rank))) {
  if (members.timeline == nullptr) members.timeline = std::make_shared<Timeline>(members.rank, members.node(), 0, log);
  number = members.timeline->add_communicator();
  if (members.driver == nullptr) {
    const auto& cores = settings.thread_affinity;
    members.driver = std::make_shared<Driver>(cores.empty() ? -1 : cores.front(), log);
  }
  failure_flag = members.transport->failure_flag();
  lanes = std::make_unique<StagingLanes>([this](size_t bytes) {
    try {
      return alloc(bytes);
    } catch (const Error&) {  // the arena is full: the engine copies once more
      return Memory::uninitialized(bytes);
    }
  });
}

std::shared_ptr<Memory> Setup::alloc(size_t bytes) const {
  check_process();
  const std::shared_ptr<Window>& window = members.window;
  return window != nullptr && window->local_size() > 1 ? Memory::mapped(window, bytes) : Memory::plain(bytes);
}

std::shared_ptr<Operation> Setup::operation_of(Request&& request) const {
  request.validate(members.size);
  request.root_in_job = request.root == kAnySource ? request.root : members.job_rank(request.root);
  auto operation = std::make_shared<Operation>(std::move(request));
  operation->phases.on = timeline().on();
  Request& staged = operation->request;
  if (staged.device != device::kHost) {
    const Window* const window = members.window.get();
    const bool all_share = members.size == 1 || (window != nullptr && window->local_size() == members.size);
    auto lane = lanes->of(staged.device);
    // What certainly does not stay (stays_on_device() has the last word) begins its copy now and not when its turn
    // comes.
    const Call call = staged.call();
    const bool stays = all_share && settings.gpu_engine != "host" && !lane->never_stays() && may_stay_on_device(call);
    const bool by_nccl = may_use_nccl() && !lane->never_by_nccl() && nccl_has(call, members.size);
    const bool may_stay = (stays || by_nccl) && staged.algo.or_else(settings.algo).takes_direct();
    operation->staging =
        std::make_shared<Staging>(std::move(lane), staged, Staging::Ranks{members.rank, members.size, job_rank()},
                                  Slices::bytes(all_share), may_stay);
  }
  return operation;
}

bool Setup::may_use_nccl() const {
  return members.size > 1 && (settings.gpu_engine == "auto" || settings.gpu_engine == "nccl");
}

void Setup::throw_forked() const {
  throw Error("This process was forked from rank " + std::to_string(job_rank()) +
              " after dcoll.init(), and is none of the job's ranks: it can neither take part in collectives nor have "
              "mapped memory. Leave them to the process that called dcoll.init(); a data loader's worker should only "
              "prepare data.");
}

}  // namespace dcoll
