// Making communicators: from MPI, a key-value store, alone, or as threads; and of some of the ranks, which process sets
// and PyTorch's groups are made of.
#include "engine/communicator/world.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/ranks_text.h"
#include "base/thread.h"
#include "base/thread_safety.h"
#include "bind/bind.h"
#include "engine/communicator/members.h"
#include "engine/communicator/subset.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// How long Python may take to end once all programs' exit handlers have run: with torch it is seconds.
constexpr auto kTeardown = std::chrono::seconds(60);

bool python_ends() {
#if PY_VERSION_HEX < 0x030D0000
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

// Ctrl-C, while the core waits for other ranks without the interpreter's lock.
void look_for_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::unique_ptr<MpiBackend> load(const std::string& plugin_path) {
  const StartUp start = start_up_from_env(look_for_signals);
  const py::gil_scoped_release unlocked;
  return load_mpi(plugin_path, start);
}

// A store that Python knows. The core calls it without the interpreter's lock; what Ctrl-C makes of such a call ends
// the wait as it is, any other exception is the store's failure.
class PythonStore {
 public:
  static KeyValueStore make(py::function set, py::function get) {
    const std::shared_ptr<PythonStore> store(new PythonStore{std::move(set), std::move(get)}, [](PythonStore* last) {
      if (python_ends()) return;
      const py::gil_scoped_acquire locked;
      delete last;
    });
    return {.set = [store](const std::string& key, const std::vector<std::byte>& value) { store->set(key, value); },
            .get = [store](const std::string& key) { return store->get(key); }};
  }

 private:
  PythonStore(py::function set, py::function get) : set_(std::move(set)), get_(std::move(get)) {}

  void set(const std::string& key, const std::vector<std::byte>& value) const {
    const py::gil_scoped_acquire locked;
    try {
      set_(key, py::bytes(reinterpret_cast<const char*>(value.data()), value.size()));
    } catch (const py::error_already_set& error) {
      fail(error);
    }
  }

  std::optional<std::vector<std::byte>> get(const std::string& key) const {
    const py::gil_scoped_acquire locked;
    py::object found;
    try {
      found = get_(key);
    } catch (const py::error_already_set& error) {
      fail(error);
    }
    if (found.is_none()) return std::nullopt;
    if (!py::isinstance<py::bytes>(found)) {
      throw ArgumentError("the store's get() returned a " + std::string(Py_TYPE(found.ptr())->tp_name) +
                          ", but must return bytes, or None where the key is not there yet");
    }
    const std::string_view bytes = found.cast<std::string_view>();
    const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
    return std::vector<std::byte>(data, data + bytes.size());
  }

  [[noreturn]] static void fail(const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw error;
    throw TransportError("the key-value store through which the ranks meet failed: " +
                         error.type().attr("__name__").cast<std::string>() + ": " +
                         py::str(error.value()).cast<std::string>());
  }

  const py::function set_, get_;
};

// Ends the job at a time to be told. A thread of the core's own, so that nothing in the interpreter can keep it from
// running: neither a lock that is held nor Python's own end. It is made by init(), where it can still be said that the
// system gives none.
class Ender {
 public:
  static void make() {
    if (of_process != nullptr) return;
    auto ender = std::make_unique<Ender>();
    try {
      std::thread(&Ender::run, ender.get()).detach();
    } catch (const std::system_error& e) {
      throw Error(no_thread_text(e));
    }
    of_process = ender.release();  // immortal, as its thread
  }

  // The earliest time counts. With a text, for the watchdog of a normal end, Python's own end is waited for.
  static void end_after(const py::object& job, double seconds, int exit_code, std::string text) {
    make();
    job.inc_ref();  // for ever: the thread uses it
    const auto at = Clock::now() + duration_of(seconds);
    const MutexLock lock(of_process->mutex_);
    if (at >= of_process->at_) return;
    of_process->at_ = at;
    of_process->job_ = &job.cast<Bootstrap&>();
    of_process->exit_code_ = exit_code;
    of_process->text_ = std::move(text);
    of_process->limit_ = at - Clock::now();
    of_process->look_at_ = at - of_process->limit_ / 2;
    of_process->told_.notify_one();
  }

  // The ranks of the job, for a normal end: those at work are waited for.
  static void know(const Members& members) {
    if (of_process == nullptr) return;
    const MutexLock lock(of_process->mutex_);
    of_process->rank_ = members.rank;
    of_process->others_.clear();
    for (int rank = 0; rank < members.size; ++rank) {
      if (rank != members.rank) of_process->others_.push_back(rank);
    }
    of_process->work_ = AtWork(members.process_of_rank);
  }

 private:
  void run() {
    const MutexLock lock(mutex_);
    while (job_ == nullptr) told_.wait(mutex_);
    while (Clock::now() < at_ || put_off()) {
      told_.wait_until(mutex_, std::min(at_, look_at_));
      if (Clock::now() < look_at_) continue;
      work_.look();
      look_at_ = Clock::time_point::max();
    }
    if (!text_.empty()) {
      if (python_ends()) std::this_thread::sleep_for(kTeardown);
      const char* why = job_->waits_for_ends() ? " It waited for other ranks, whose programs have not ended." : "";
      std::fprintf(stderr, "%s%s\n", text_.c_str(), why);
    }
    job_->abort(exit_code_);
  }

  // Whether this rank waits for others of its machine that compute, as the watchdog does before shutdown is done.
  bool put_off() DCOLL_REQUIRES(mutex_) {
    if (text_.empty() || !job_->waits_for_ends()) return false;
    const std::vector<int> at_work = work_.among(others_);
    if (at_work.empty()) return false;
    std::fprintf(stderr, "dcoll: rank %d: its program ended; it goes on waiting for %s, still computing\n", rank_,
                 ranks_text(at_work).c_str());
    at_ += limit_;
    look_at_ = at_ - limit_ / 2;
    return true;
  }

  static inline Ender* of_process = nullptr;
  Mutex mutex_;
  Condition told_;
  Clock::time_point at_ DCOLL_GUARDED_BY(mutex_) = Clock::time_point::max();
  Bootstrap* job_ DCOLL_GUARDED_BY(mutex_) = nullptr;
  int exit_code_ DCOLL_GUARDED_BY(mutex_) = 0;
  std::string text_ DCOLL_GUARDED_BY(mutex_);
  Clock::duration limit_ DCOLL_GUARDED_BY(mutex_){};
  Clock::time_point look_at_ DCOLL_GUARDED_BY(mutex_) = Clock::time_point::max();
  int rank_ DCOLL_GUARDED_BY(mutex_) = 0;
  std::vector<int> others_ DCOLL_GUARDED_BY(mutex_);
  AtWork work_ DCOLL_GUARDED_BY(mutex_){{}};
};

std::shared_ptr<Communicator> connect(Bootstrap* job) {
  const Settings settings = Settings::from_env();
  std::shared_ptr<Communicator> comm;
  {
    const py::gil_scoped_release unlocked;
    comm = connect_world(job, settings, look_for_signals);
  }
  show_program_to(*comm);
  Ender::know(comm->members());
  return comm;
}

std::unique_ptr<Bootstrap> open_store(int rank, int size, py::function set, py::function get) {
  KeyValueStore store = PythonStore::make(std::move(set), std::move(get));
  const py::gil_scoped_release unlocked;
  return make_store_bootstrap(rank, size, std::move(store));
}

}  // namespace

void bind_world(py::module_& m) {
  py::class_<Bootstrap>(m, "Bootstrap")
      .def_property_readonly("rank", &Bootstrap::rank)
      .def_property_readonly("size", &Bootstrap::size)
      .def_property_readonly("library_version", &Bootstrap::library_version)
      .def("subset", &Bootstrap::subset, py::arg("ranks"), py::call_guard<py::gil_scoped_release>())
      .def("finalize", &Bootstrap::finalize, py::call_guard<py::gil_scoped_release>())
      .def("abort_after", &Ender::end_after, py::arg("seconds"), py::arg("exit_code"), py::arg("text") = "");
  py::class_<MpiBackend, Bootstrap>(m, "Mpi", py::is_final())
      .def_property_readonly("library_path", &MpiBackend::library_path)
      .def_property_readonly("thread_level", &MpiBackend::thread_level);

  m.def("make_ender", &Ender::make);
  m.def("load_mpi", &load, py::arg("plugin_path"));
  m.def("open_store", &open_store, py::arg("rank"), py::arg("size"), py::arg("set"), py::arg("get"));
  m.def("connect_world", &connect, py::arg("job").none(true), py::keep_alive<0, 1>());
  m.def(
      "connect_local",
      [](int n) {
        auto comms = connect_threads(n, Settings::from_env());
        for (const auto& comm : comms) show_program_to(*comm);
        return comms;
      },
      py::arg("n"));
  m.def(
      "make_group",
      [](std::shared_ptr<Communicator> whole, std::vector<int> ranks, Bootstrap* job) {
        return make_group(std::move(whole), std::move(ranks), job, look_for_signals);
      },
      py::arg("whole"), py::arg("ranks"), py::arg("job").none(true), py::call_guard<py::gil_scoped_release>(),
      py::keep_alive<0, 3>());
}

}  // namespace dcoll::bind
