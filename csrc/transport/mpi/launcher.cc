#include "transport/mpi/launcher.h"

#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/thread_safety.h"
#include "transport/mpi/transport.h"

namespace dcoll::mpi {
namespace {

constexpr double kEverySeconds = 1;

// Of pmix_common.h, which wheels of Open MPI leave out. Its layout is part of what PMIx calls its stable ABI.
constexpr uint16_t kString = 3, kProcInfo = 38, kDataArray = 39;
constexpr int kSuccess = 0, kOutOfMemory = -32, kNotFound = -46, kFoundSome = -52;
constexpr uint8_t kUndefined = 0, kUnterminated = 15, kMigrating = 60;

struct Proc {
  char nspace[256];
  uint32_t rank;
};

struct ProcInfo {
  Proc proc;
  char* hostname;
  char* executable;
  int pid;
  int exit_code;
  uint8_t state;
};

struct DataArray {
  uint16_t type;
  size_t size;
  void* items;
};

struct Value {
  uint16_t type;
  union {
    char* text;
    DataArray* array;
    void* widest[3];
  };
};

struct Info {
  char key[512];
  uint32_t flags;
  Value value;
};

struct Published {
  Proc proc;
  char key[512];
  Value value;
};

struct Query {
  char** keys;
  Info* qualifiers;
  size_t qualifier_count;
};

static_assert(sizeof(Info) == 552 && sizeof(ProcInfo) == 296 && sizeof(Published) == 808);

struct Pmix {
  int (*is_initialized)();
  const char* (*version)();
  int (*finalize)(const Info*, size_t);
  int (*query)(Query*, size_t, Info**, size_t*);
  int (*publish)(const Info*, size_t);
  int (*lookup)(Published*, size_t, const Info*, size_t);
  Info* (*create_info)(size_t);
  int (*load_info)(Info*, const char*, const void*, uint16_t);
  void (*free_info)(Info*, size_t);
  Published* (*create_published)(size_t);
  void (*free_published)(Published*, size_t);

  bool can_be_asked() const {
    return is_initialized && version && query && publish && lookup && create_info && load_info && free_info &&
           create_published && free_published &&
           std::string_view(version()).find("Stable ABI: 5.") != std::string_view::npos;
  }
};

// A library of MPI's, so it is there or not.
const Pmix& pmix() {
  static const Pmix found = [] {
    Pmix functions{};
    Dl_info mpi{};
    if (dladdr(reinterpret_cast<const void*>(&MPI_Init), &mpi) == 0 || mpi.dli_fname == nullptr) return functions;
    void* library = dlopen(mpi.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return functions;
    const auto find = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    find(functions.is_initialized, "PMIx_Initialized");
    find(functions.version, "PMIx_Get_version");
    find(functions.finalize, "PMIx_Finalize");
    find(functions.query, "PMIx_Query_info");
    find(functions.publish, "PMIx_Publish");
    find(functions.lookup, "PMIx_Lookup");
    find(functions.create_info, "PMIx_Info_create");
    find(functions.load_info, "PMIx_Info_load");
    find(functions.free_info, "PMIx_Info_free");
    find(functions.create_published, "PMIx_Pdata_create");
    find(functions.free_published, "PMIx_Pdata_free");
    return functions;
  }();
  return found;
}

using InfoPointer = std::unique_ptr<Info, void (*)(Info*)>;

InfoPointer info_of(const char* key, const std::string& text) {
  InfoPointer info(pmix().create_info(1), [](Info* one) { pmix().free_info(one, 1); });
  if (info) pmix().load_info(info.get(), key, text.c_str(), kString);
  return info;
}

// Open MPI's has no state for one that ended well, and on other hosts than mpirun's for one that died: of processes of
// this host the kernel knows.
bool has_ended(const ProcInfo& process, std::string_view here) {
  if (process.state > kUnterminated) return process.state != kMigrating;
  if (process.state != kUndefined || process.pid <= 0 || process.hostname == nullptr) return false;
  return process.hostname == here && kill(process.pid, 0) != 0 && errno == ESRCH;
}

// The host of mpirun hears of every process that ended with an error, other hosts of their own.
std::vector<int> ask_for_ended(const std::string& job, uint32_t own_rank) {
  std::vector<int> ranks;
  char key[] = "pmix.qry.ptable";
  char* keys[] = {key, nullptr};
  const InfoPointer of_job = info_of("pmix.nspace", job);
  Query query{.keys = keys, .qualifiers = of_job.get(), .qualifier_count = 1};
  Info* results = nullptr;
  size_t count = 0;
  if (!of_job || pmix().query(&query, 1, &results, &count) != kSuccess || results == nullptr) return ranks;
  for (const Info* result = results; result != results + count; ++result) {
    if (result->value.type != kDataArray || result->value.array == nullptr) continue;
    const DataArray& array = *result->value.array;
    if (array.type != kProcInfo) continue;
    const std::span processes(static_cast<const ProcInfo*>(array.items), array.size);
    const auto own = std::ranges::find_if(processes, [&](const ProcInfo& one) { return one.proc.rank == own_rank; });
    const bool placed = own != processes.end() && own->hostname != nullptr;
    const std::string_view here = placed ? own->hostname : "?";
    for (const ProcInfo& one : processes) {
      if (has_ended(one, here)) ranks.push_back(static_cast<int>(one.proc.rank));
    }
  }
  pmix().free_info(results, count);
  return ranks;
}

std::string key_of(const std::string& job) { return "dcoll-ended-" + job; }
std::string key_of(const std::string& job, int rank) { return "dcoll-here-" + job + "-" + std::to_string(rank); }

using Entries = std::unique_ptr<Published, std::function<void(Published*)>>;

// What is published under these keys. Where that is not all of them the entries may all be empty.
int look_up(const std::vector<std::string>& keys, Entries& entries) {
  const size_t count = keys.size();
  entries = Entries(pmix().create_published(count), [count](Published* all) { pmix().free_published(all, count); });
  if (!entries) return kOutOfMemory;
  for (size_t i = 0; i < count; ++i) keys[i].copy(entries.get()[i].key, sizeof entries->key - 1);
  return pmix().lookup(entries.get(), count, nullptr, 0);
}

// Those of the ranks in [first, last) that have not said that they are here. Asks for halves where some have.
void add_absent(const std::string& job, int first, int last, std::vector<int>& absent) {
  std::vector<std::string> keys;
  for (int rank = first; rank < last; ++rank) keys.push_back(key_of(job, rank));
  Entries entries;
  const int status = look_up(keys, entries);
  if (status == kSuccess) return;
  if (status != kNotFound && status != kFoundSome)
    throw TransportError("PMIx_Lookup returned " + std::to_string(status));
  if (last - first == 1 || status == kNotFound) {
    for (int rank = first; rank < last; ++rank) absent.push_back(rank);
    return;
  }
  const int middle = first + (last - first) / 2;
  add_absent(job, first, middle, absent);
  add_absent(job, middle, last, absent);
}

// What a host published that knew of some before others did.
std::vector<int> look_up_ended(const std::string& job) {
  std::vector<int> ranks;
  Entries entry;
  if (look_up({key_of(job)}, entry) != kSuccess || entry->value.type != kString) return ranks;
  const std::string_view text = entry->value.text == nullptr ? "" : entry->value.text;
  for (const char *at = text.data(), *end = at + text.size(); at < end;) {
    int rank = 0;
    const auto [stop, error] = std::from_chars(at, end, rank);
    if (error != std::errc()) break;
    ranks.push_back(rank);
    at = stop + 1;
  }
  return ranks;
}

void publish(const std::string& key, const std::string& text) {
  if (const InfoPointer info = info_of(key.c_str(), text)) pmix().publish(info.get(), 1);
}

void publish_ended(const std::string& job, const std::set<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += std::to_string(rank) + " ";
  publish(key_of(job), text);
}

}  // namespace

struct Launcher::Answer {
  std::string job;
  uint32_t rank = 0;
  Mutex mutex;
  std::vector<int> ended DCOLL_GUARDED_BY(mutex);

  void ask(std::set<int> ranks) DCOLL_EXCLUDES(mutex) {
    if (pmix().is_initialized() == 0) return;
    const std::vector<int> heard = look_up_ended(job), known = ask_for_ended(job, rank);
    ranks.insert(known.begin(), known.end());
    if (heard.empty() && !ranks.empty()) publish_ended(job, ranks);
    ranks.insert(heard.begin(), heard.end());
    const MutexLock lock(mutex);
    ended.assign(ranks.begin(), ranks.end());
  }
};

Launcher::Launcher() {
  const char *job = std::getenv("PMIX_NAMESPACE"), *rank = std::getenv("PMIX_RANK");
  if (job == nullptr || rank == nullptr || !pmix().can_be_asked()) return;
  answer_ = std::make_shared<Answer>();
  answer_->job = job;
  answer_->rank = static_cast<uint32_t>(std::strtoul(rank, nullptr, 10));
}

std::vector<int> Launcher::ended(const std::vector<int>& told) {
  if (!answer_) return {};
  const auto now = Clock::now();
  const auto called = std::exchange(called_, now);
  if (seconds_between(called, now) > kEverySeconds) asked_ = now;  // somebody else waits, or begins to
  if (seconds_between(asked_, now) >= kEverySeconds && (!asking_ || asking_->done())) {
    asked_ = now;
    try {
      asking_.emplace([answer = answer_, told] { answer->ask({told.begin(), told.end()}); });
    } catch (const Error&) {  // no thread: what others tell must do
    }
  }
  const MutexLock lock(answer_->mutex);
  return answer_->ended;
}

void Launcher::say_here() {
  if (!answer_ || said_here_ || (asking_ && !asking_->done())) return;
  const auto now = Clock::now();
  if (waits_since_ == Clock::time_point{}) waits_since_ = now;
  if (seconds_between(waits_since_, now) < kEverySeconds || pmix().is_initialized() == 0) return;
  try {
    asking_.emplace([answer = answer_] { publish(key_of(answer->job, static_cast<int>(answer->rank)), "here"); });
    said_here_ = true;
  } catch (const Error&) {  // no thread: the next time
  }
}

std::optional<std::vector<int>> Launcher::absent(int size) const {
  constexpr int kTries = 200;
  if (!answer_ || !said_here_) return std::nullopt;
  struct Found {
    Mutex mutex;
    std::optional<std::vector<int>> ranks DCOLL_GUARDED_BY(mutex);
  };
  const auto found = std::make_shared<Found>();
  try {
    const Aside asking([answer = answer_, found, size] {
      std::vector<int> ranks;
      add_absent(answer->job, 0, size, ranks);
      const MutexLock lock(found->mutex);
      found->ranks = std::move(ranks);
    });
    for (int i = 0; i < kTries && !asking.done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } catch (const Error&) {  // no thread
  }
  const MutexLock lock(found->mutex);
  return found->ranks;
}

void Launcher::rest() const {
  for (int i = 0; i < 100 && asking_ && !asking_->done(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

void Launcher::say_farewell() const {
  if (pmix().is_initialized && pmix().finalize && pmix().is_initialized() != 0) pmix().finalize(nullptr, 0);
}

}  // namespace dcoll::mpi
