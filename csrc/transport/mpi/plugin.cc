// libdcoll_mpi.so: everything of dcoll that needs an MPI library. Loaded by mpi_loader.cc; see mpi.h.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/ranks_text.h"
#include "transport/mpi.h"
#include "transport/mpi/launcher.h"
#include "transport/mpi/libfabric.h"
#include "transport/mpi/mailbox.h"
#include "transport/mpi/transport.h"
#include "transport/mpi_events.h"
#include "transport/presence.h"

namespace dcoll::mpi {

namespace {

constexpr unsigned kAbortSeconds = 3;

// MPI_Testsome has no communicator: MPICH raises its errors on MPI_COMM_SELF (before MPI 4: on the world), whose
// default handler ends the process without a word of ours. A handler the program chose itself stays.
void return_errors_instead_of_aborting(MPI_Comm comm) {
  MPI_Errhandler current = MPI_ERRHANDLER_NULL;
  check_mpi(MPI_Comm_get_errhandler(comm, &current), "MPI_Comm_get_errhandler");
  const bool fatal = current == MPI_ERRORS_ARE_FATAL;
  MPI_Errhandler_free(&current);
  if (fatal) check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

// Of the process. Never destroyed: a call of MPI's that did not come back may still use it.
struct Process {
  Presence presence{LaunchedAs::from_env()};
  Launcher launcher;
  // What one init() waited for in vain the next one waits for again.
  std::optional<Aside> initializing, duplicating;
  int thread_level = MPI_THREAD_SINGLE;
  bool initialized_here = false;
  MPI_Comm world = MPI_COMM_NULL;  // a duplicate of it that returns its errors
  std::string stuck;               // a call that did not come back and cannot be waited for again
  const ForkGuard fork;

  void initialize(const StartUp& start);
  void wait_for(const Aside& call, const StartUp& start);
  std::string missing();
  std::vector<int> ended();
};

Process* made = nullptr;

Process& process() {
  static Process* one = made = new Process;
  return *one;
}

// An init() that was given up leaves this process inside MPI's start-up, where MPI_Finalize would wait for ever. Open
// MPI's launcher counts its end as a failure, whatever the exit status, unless it was told that the process leaves.
// That is done last, as the start-up may notice.
__attribute__((destructor)) void tell_launcher_of_end() {
  int finalized = 0;
  if (made == nullptr || !made->initialized_here || made->fork.in_child()) return;
  if (MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0) made->launcher.say_farewell();
}

class Backend final : public MpiBackend {
 public:
  explicit Backend(const StartUp& start);
  Backend(Backend& whole, const std::vector<int>& ranks);
  ~Backend() override;

  std::string library_version() const override;
  std::string library_path() const override;
  int thread_level() const override;
  std::string processor_name() const override;
  std::vector<int> node_of_ranks() override;
  std::unique_ptr<Transport> make_transport(size_t max_message_bytes, int slots,
                                            const std::string& tcp_congestion) override;
  std::unique_ptr<Bootstrap> subset(const std::vector<int>& ranks) override {
    return std::make_unique<Backend>(*this, ranks);
  }
  void finalize() override;
  bool waits_for_ends() const override { return waits_for_ends_; }
  [[noreturn]] void abort(int exit_code) override;

 private:
  void wait_for_ends();
  void require_thread_level() const;
  void learn_place();
  std::vector<int> ended() const;
  void aside(const char* what, std::function<void()> call);

  const ForkGuard fork_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int thread_level_ = MPI_THREAD_SINGLE;
  std::vector<int> world_ranks_;
  const MpiMailbox* mail_ = nullptr;  // of the meeting
  std::vector<int> nodes_;            // once they are known
  std::atomic<bool> waits_for_ends_ = false;
};

// MPI_Init_thread waits for all ranks, and nothing ends it. So it runs beside this thread, which can give up.
void Process::initialize(const StartUp& start) {
  int done = 0;
  check_mpi(MPI_Initialized(&done), "MPI_Initialized");
  if (!initializing && done != 0) {
    check_mpi(MPI_Query_thread(&thread_level), "MPI_Query_thread");
    return;
  }
  if (!initializing) {
    leave_out_libfabric();
    initializing.emplace([this] {
      const std::vector<int> foreign = epoll_descriptors();
      check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &thread_level), "MPI_Init_thread");
      note_mpi_descriptors(foreign);
    });
    initialized_here = true;
  }
  wait_for(*initializing, start);
}

void Process::wait_for(const Aside& call, const StartUp& start) {
  StartUp quietly = start;
  quietly.report = [&](const std::string& text) {
    if (presence.speaks() && start.report) start.report(text);
  };
  call.wait(
      quietly, [this] { return missing(); },
      [this] {
        launcher.say_here();
        return ended();
      });
}

// The launcher is asked by one rank of each machine, for its answer takes longer the more ranks ask.
std::string Process::missing() {
  if (presence.on_one_machine() || !presence.speaks()) return presence.missing();
  return presence.missing(launcher.absent(presence.size()));
}

// Of each machine one rank asks the launcher, and tells the others of its machine.
std::vector<int> Process::ended() {
  const std::vector<int> seen = presence.ended();
  if (!presence.speaks()) return seen;
  const std::vector<int> told = launcher.ended(seen);
  if (told.empty()) return seen;
  presence.tell(told);
  return presence.ended();
}

Backend::Backend(const StartUp& start) {
  start_ = start;
  int finalized = 0;
  check_mpi(MPI_Finalized(&finalized), "MPI_Finalized");
  if (finalized != 0) {
    throw TransportError(
        "MPI was finalized already, and cannot be started twice in a process. Call dcoll.init() before "
        "MPI_Finalize, once per process");
  }
  Process& own = process();
  own.initialize(start);
  thread_level_ = own.thread_level;
  require_thread_level();
  return_errors_instead_of_aborting(MPI_COMM_WORLD);
  return_errors_instead_of_aborting(MPI_COMM_SELF);
  if (!own.duplicating) {
    own.duplicating.emplace(
        [&own] { check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &own.world), "MPI_Comm_dup of MPI_COMM_WORLD"); });
  }
  own.wait_for(*own.duplicating, start);
  own.duplicating.reset();
  comm_ = std::exchange(own.world, MPI_COMM_NULL);
  learn_place();
  world_ranks_ = ranks_below(static_cast<size_t>(size_));
}

Backend::Backend(Backend& whole, const std::vector<int>& ranks) : thread_level_(whole.thread_level_) {
  start_ = whole.start_;
  constexpr int kTag = 7;
  for (const int rank : ranks) world_ranks_.push_back(whole.world_ranks_.at(static_cast<size_t>(rank)));
  whole.meeting_->meet(start_, ranks);
  MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(whole.comm_, &all), "MPI_Comm_group");
  const int included = MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some);
  MPI_Group_free(&all);
  check_mpi(included, "MPI_Group_incl");
  const auto made = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  whole.aside("MPI_Comm_create_group", [made, some, parent = whole.comm_]() mutable {
    const int created = MPI_Comm_create_group(parent, some, kTag, made.get());
    MPI_Group_free(&some);
    check_mpi(created, "MPI_Comm_create_group");
  });
  comm_ = *made;
  learn_place();
  meet(start_);
}

void Backend::learn_place() {
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  auto mail = std::make_unique<MpiMailbox>(comm_);
  mail_ = mail.get();
  meeting_ = std::make_unique<Meeting>(std::move(mail), rank_, [this] { return ended(); });
}

// Those of this communicator's ranks that are known to be dead.
std::vector<int> Backend::ended() const {
  const std::vector<int> dead = process().ended();
  std::vector<int> ours;
  for (int rank = 0; rank < size_; ++rank) {
    const bool gone = std::ranges::find(dead, world_ranks_[static_cast<size_t>(rank)]) != dead.end();
    if (gone || mail_->ended().contains(rank)) ours.push_back(rank);
  }
  return ours;
}

// A blocking call of MPI's, made when all ranks are known to be there and to have a thread for it: nobody waits in MPI
// for a rank that never comes. Should it not come back nevertheless, what it was called for can never be used again.
void Backend::aside(const char* what, std::function<void()> call) {
  std::string& stuck = process().stuck;
  if (!stuck.empty()) {
    throw TransportError("dcoll.init(): " + stuck +
                         " of an earlier start-up has not come back, so this process cannot join its job again. End "
                         "and restart the job");
  }
  std::promise<void> all_have_a_thread;
  std::optional<Aside> begun;
  try {
    begun.emplace([call = std::move(call), go = all_have_a_thread.get_future().share()] {
      go.get();
      call();
    });
  } catch (const Error& error) {
    const int job_rank = world_ranks_[static_cast<size_t>(rank_)];
    meeting_->leave("rank " + std::to_string(job_rank) + " left dcoll.init(): " + error.what());
    throw;
  }
  meeting_->all_gather(start_, nullptr, 0);
  all_have_a_thread.set_value();
  const Aside& running = *begun;
  const auto missing = [what] { return std::string(what) + " does not return: a rank ended or hangs in it"; };
  struct Guard {
    ~Guard() { stuck = call.done() ? "" : what; }
    const Aside& call;
    std::string& stuck;
    const char* what;
  } const guard{running, stuck, what};
  running.wait(start_, missing, [this] { return ended(); });
}

Backend::~Backend() {
  if (fork_.in_child()) return;  // whose MPI is its parent's
  meeting_.reset();
  int finalized = 0;
  if (comm_ == MPI_COMM_NULL || !process().stuck.empty()) return;
  if (MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0) MPI_Comm_free(&comm_);
}

// Calls come from the thread that calls a collective and from the progress thread, one at a time.
void Backend::require_thread_level() const {
  if (thread_level_ >= MPI_THREAD_SERIALIZED) return;
  const std::string got = thread_level_ == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE" : "MPI_THREAD_FUNNELED";
  if (process().initialized_here) {
    throw TransportError("the MPI library " + library_path() + " offers only " + got +
                         "; dcoll's progress thread needs MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE. Use an MPI "
                         "built with thread support");
  }
  throw TransportError("MPI was initialized with " + got +
                       " before dcoll.init(); its progress thread needs MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE. "
                       "Call dcoll.init() first, or initialize with MPI_Init_thread(MPI_THREAD_MULTIPLE); with mpi4py, "
                       "set mpi4py.rc.thread_level = 'multiple' before `from mpi4py import MPI`");
}

std::string Backend::library_version() const {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  check_mpi(MPI_Get_library_version(text, &length), "MPI_Get_library_version");
  const std::string all(text, static_cast<size_t>(length));
  return all.substr(0, all.find_first_of("\r\n"));
}

std::string Backend::library_path() const {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&MPI_Init), &info) == 0 || info.dli_fname == nullptr) return "unknown";
  char* resolved = realpath(info.dli_fname, nullptr);
  const std::string path = resolved ? resolved : info.dli_fname;
  std::free(resolved);
  return path;
}

// MPI fixes the order of the four constants, not their values.
int Backend::thread_level() const {
  if (thread_level_ == MPI_THREAD_SINGLE) return 0;
  if (thread_level_ == MPI_THREAD_FUNNELED) return 1;
  return thread_level_ == MPI_THREAD_SERIALIZED ? 2 : 3;
}

std::string Backend::processor_name() const {
  char text[MPI_MAX_PROCESSOR_NAME] = "";
  int length = 0;
  check_mpi(MPI_Get_processor_name(text, &length), "MPI_Get_processor_name");
  return std::string(text, static_cast<size_t>(length));
}

// Each node's name is its lowest rank: split by shared memory, then everyone tells everyone who leads them.
std::vector<int> Backend::node_of_ranks() {
  if (!nodes_.empty()) return nodes_;
  const auto leader = std::make_shared<int>(rank_);
  aside("MPI_Comm_split_type", [leader, comm = comm_, rank = rank_] {
    MPI_Comm node = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
    MPI_Group all = MPI_GROUP_NULL, local = MPI_GROUP_NULL;
    check_mpi(MPI_Comm_group(comm, &all), "MPI_Comm_group");
    check_mpi(MPI_Comm_group(node, &local), "MPI_Comm_group");
    const int first = 0;
    check_mpi(MPI_Group_translate_ranks(local, 1, &first, all, leader.get()), "MPI_Group_translate_ranks");
    MPI_Group_free(&all);
    MPI_Group_free(&local);
    MPI_Comm_free(&node);
  });
  return nodes_ = numbered(gather(static_cast<uint64_t>(*leader)));
}

std::unique_ptr<Transport> Backend::make_transport(size_t max_message_bytes, int slots,
                                                   const std::string& tcp_congestion) {
  const auto made = std::make_shared<std::unique_ptr<Transport>>();
  aside("MPI_Comm_dup",
        [=, comm = comm_] { *made = make_mpi_transport(comm, max_message_bytes, slots, tcp_congestion); });
  return std::move(*made);
}

// MPI_Finalize waits for all ranks and may use a whole processor for that. Here they wait asleep, so that the ones at
// work have the processors, and are seen to be the ones (bind/world.cc).
void Backend::wait_for_ends() {
  constexpr std::chrono::microseconds kShortNap{50}, kLongNap{100000};
  waits_for_ends_ = true;
  try {
    MPI_Request all = MPI_REQUEST_NULL;
    check_mpi(MPI_Ibarrier(comm_, &all), "MPI_Ibarrier");
    int done = 0;
    for (auto nap = kShortNap; ended().empty(); nap = std::min(2 * nap, kLongNap)) {
      check_mpi(MPI_Test(&all, &done, MPI_STATUS_IGNORE), "MPI_Test");
      if (done != 0) break;
      std::this_thread::sleep_for(nap);
    }
  } catch (const TransportError&) {  // a rank is dead: MPI_Finalize knows best what to do then
  }
  waits_for_ends_ = false;
}

void Backend::finalize() {
  int finalized = 0;
  check_mpi(MPI_Finalized(&finalized), "MPI_Finalized");
  const Process& own = process();
  if (!own.initialized_here || finalized != 0 || !own.stuck.empty()) return;
  // A receive still posted would let some libraries wait in MPI_Finalize for a message that nobody sends.
  close_mpi_transports();
  wait_for_ends();
  own.launcher.rest();
  check_mpi(MPI_Finalize(), "MPI_Finalize");
}

void Backend::abort(int exit_code) {
  int finalized = 0;
  if (MPI_Finalized(&finalized) == MPI_SUCCESS && finalized != 0) std::_Exit(exit_code);
  // MPI_Abort asks the launcher and may wait for its answer for ever (seen with Open MPI's mpirun --continuous when two
  // ranks abort at once). The process ends all the same.
  static volatile std::sig_atomic_t status = 1;
  status = exit_code;
  std::signal(SIGALRM, [](int) { std::_Exit(status); });  // rather than a thread, which the system may not give
  sigset_t alarms;
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarms, nullptr);
  alarm(kAbortSeconds);
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);  // MPI_Abort is only a best effort
}

}  // namespace

}  // namespace dcoll::mpi

extern "C" __attribute__((visibility("default"))) dcoll::MpiBackend* dcoll_mpi_backend_v3(const dcoll::StartUp& start) {
  return new dcoll::mpi::Backend(start);
}
