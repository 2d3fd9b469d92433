// libdcoll_mpi.so: everything of dcoll that needs an MPI library. Loaded by mpi_loader.cc; see mpi.h.
#include <dlfcn.h>

#include <chrono>
#include <climits>
#include <cstdlib>
#include <map>
#include <thread>

#include "base/error.h"
#include "base/fork.h"
#include "transport/mpi.h"
#include "transport/mpi_events.h"
#include "transport/mpi_transport.h"

namespace dcoll {

namespace {

const char* thread_level_name(int level) {
  if (level == MPI_THREAD_SINGLE) return "MPI_THREAD_SINGLE";
  if (level == MPI_THREAD_FUNNELED) return "MPI_THREAD_FUNNELED";
  if (level == MPI_THREAD_SERIALIZED) return "MPI_THREAD_SERIALIZED";
  return "MPI_THREAD_MULTIPLE";
}

// MPI counts in int; the start-up exchanges stay far below.
int int_count(size_t bytes) {
  if (bytes <= static_cast<size_t>(INT_MAX)) return static_cast<int>(bytes);
  throw ArgumentError("an MPI start-up exchange of " + std::to_string(bytes) + " bytes is not possible: up to " +
                      std::to_string(INT_MAX) + " are");
}

constexpr auto kAbortLimit = std::chrono::seconds(3);

// MPI_Testsome has no communicator: MPICH raises its errors on MPI_COMM_SELF (before MPI 4: on the world), whose
// default handler ends the process without a word of ours. A handler the program chose itself stays.
void return_errors_instead_of_aborting(MPI_Comm comm) {
  MPI_Errhandler current = MPI_ERRHANDLER_NULL;
  check_mpi(MPI_Comm_get_errhandler(comm, &current), "MPI_Comm_get_errhandler");
  const bool fatal = current == MPI_ERRORS_ARE_FATAL;
  MPI_Errhandler_free(&current);
  if (fatal) check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

class Backend final : public MpiBackend {
 public:
  Backend();
  Backend(const Backend& whole, const std::vector<int>& ranks);
  ~Backend() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string library_version() const override;
  std::string library_path() const override;
  int thread_level() const override;
  std::string processor_name() const override;
  void broadcast(void* data, size_t bytes, int root) override;
  std::vector<std::byte> all_gather(const void* data, size_t bytes) override;
  std::vector<int> node_of_ranks() override;
  void barrier() override { check_mpi(MPI_Barrier(comm_), "MPI_Barrier"); }
  std::unique_ptr<Transport> make_transport(size_t max_message_bytes, int slots,
                                            const std::string& tcp_congestion) override {
    return make_mpi_transport(comm_, max_message_bytes, slots, tcp_congestion);
  }
  std::unique_ptr<MpiBackend> subset(const std::vector<int>& ranks) override {
    return std::make_unique<Backend>(*this, ranks);
  }
  void finalize() override;
  [[noreturn]] void abort(int exit_code) override;

 private:
  void require_thread_level() const;

  const ForkGuard fork_;
  MPI_Comm comm_ = MPI_COMM_NULL;  // a duplicate of the world that returns its errors
  int rank_ = 0;
  int size_ = 1;
  int thread_level_ = MPI_THREAD_SINGLE;
  bool initialized_here_ = false;
};

Backend::Backend() {
  int finalized = 0;
  check_mpi(MPI_Finalized(&finalized), "MPI_Finalized");
  if (finalized != 0) {
    throw TransportError(
        "MPI was finalized already, and cannot be started twice in a process. Call dcoll.init() before "
        "MPI_Finalize, once per process");
  }
  int initialized = 0;
  check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
  if (initialized != 0) {
    check_mpi(MPI_Query_thread(&thread_level_), "MPI_Query_thread");
  } else {
    const std::vector<int> foreign = epoll_descriptors();
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &thread_level_), "MPI_Init_thread");
    note_mpi_descriptors(foreign);
    initialized_here_ = true;
  }
  require_thread_level();
  return_errors_instead_of_aborting(MPI_COMM_WORLD);
  return_errors_instead_of_aborting(MPI_COMM_SELF);
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup of MPI_COMM_WORLD");
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
}

Backend::Backend(const Backend& whole, const std::vector<int>& ranks) : thread_level_(whole.thread_level_) {
  constexpr int kTag = 7;
  MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(whole.comm_, &all), "MPI_Comm_group");
  const int included = MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some);
  MPI_Group_free(&all);
  check_mpi(included, "MPI_Group_incl");
  const int created = MPI_Comm_create_group(whole.comm_, some, kTag, &comm_);
  MPI_Group_free(&some);
  check_mpi(created, "MPI_Comm_create_group");
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
}

Backend::~Backend() {
  if (fork_.in_child()) return;  // whose MPI is its parent's
  int finalized = 0;
  if (comm_ != MPI_COMM_NULL && MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0) MPI_Comm_free(&comm_);
}

// Calls come from the thread that calls a collective and from the progress thread, one at a time.
void Backend::require_thread_level() const {
  if (thread_level_ >= MPI_THREAD_SERIALIZED) return;
  const std::string got = thread_level_name(thread_level_);
  if (initialized_here_) {
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

void Backend::broadcast(void* data, size_t bytes, int root) {
  check_mpi(MPI_Bcast(data, int_count(bytes), MPI_BYTE, root, comm_), "MPI_Bcast from rank " + std::to_string(root));
}

std::vector<std::byte> Backend::all_gather(const void* data, size_t bytes) {
  std::vector<std::byte> all(bytes * static_cast<size_t>(size_));
  static_cast<void>(int_count(all.size()));
  check_mpi(MPI_Allgather(data, int_count(bytes), MPI_BYTE, all.data(), int_count(bytes), MPI_BYTE, comm_),
            "MPI_Allgather");
  return all;
}

// Each node's name is its lowest rank: split by shared memory, then everyone tells everyone who leads them.
std::vector<int> Backend::node_of_ranks() {
  MPI_Comm node = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
  int leader = rank_;
  const int told = MPI_Bcast(&leader, 1, MPI_INT, 0, node);
  MPI_Comm_free(&node);
  check_mpi(told, "MPI_Bcast inside the node");
  std::vector<int> leaders(static_cast<size_t>(size_));
  check_mpi(MPI_Allgather(&leader, 1, MPI_INT, leaders.data(), 1, MPI_INT, comm_), "MPI_Allgather");
  std::map<int, int> numbers;  // leader -> node, in the order of the lowest rank
  for (const int rank : leaders) numbers.try_emplace(rank, 0);
  int next = 0;
  for (auto& [rank, number] : numbers) number = next++;
  std::vector<int> nodes;
  for (const int rank : leaders) nodes.push_back(numbers.at(rank));
  return nodes;
}

void Backend::finalize() {
  int finalized = 0;
  check_mpi(MPI_Finalized(&finalized), "MPI_Finalized");
  if (!initialized_here_ || finalized != 0) return;
  // A receive still posted would let some libraries wait in MPI_Finalize for a message that nobody sends.
  close_mpi_transports();
  check_mpi(MPI_Finalize(), "MPI_Finalize");
}

void Backend::abort(int exit_code) {
  int finalized = 0;
  if (MPI_Finalized(&finalized) == MPI_SUCCESS && finalized != 0) std::_Exit(exit_code);
  // MPI_Abort asks the launcher and may wait for its answer for ever (seen with Open MPI's mpirun --continuous when two
  // ranks abort at once). The process ends all the same.
  std::thread([exit_code] {
    std::this_thread::sleep_for(kAbortLimit);
    std::_Exit(exit_code);
  }).detach();
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);  // MPI_Abort is only a best effort
}

}  // namespace

}  // namespace dcoll

extern "C" __attribute__((visibility("default"))) dcoll::MpiBackend* dcoll_mpi_backend_v1() {
  return new dcoll::Backend();
}
