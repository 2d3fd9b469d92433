// Ranks as threads, for the engine's tests: run_ranks(n, body) calls body(communicator) on n threads and rethrows the
// first failure of any of them.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/settings.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/world.h"
#include "support/threads.h"

namespace dcoll::test {

inline Settings test_settings() {
  Settings settings = Settings::from_env();
  settings.arena_mb = 256;
  settings.timeout_s = 30;
  settings.log_level = "error";
  return settings;
}

// Ranks that reach each other by messages alone.
inline Settings without_shared_memory() {
  Settings settings = test_settings();
  settings.transport = "mpi";
  return settings;
}

inline void run_ranks(int n, const Settings& settings, const std::function<void(Communicator&)>& body) {
  auto world = connect_threads(n, settings);
  on_threads(n, [&](int rank) {
    try {
      body(*world[rank]);
      world[rank]->close();
    } catch (const std::exception& e) {
      world[rank]->fail(std::string("test failed: ") + e.what());
      throw;
    }
  });
}

inline void run_ranks(int n, const std::function<void(Communicator&)>& body) { run_ranks(n, test_settings(), body); }

// submit and wait
inline std::shared_ptr<Operation> run(Communicator& comm, Request request) {
  auto operation = comm.submit(std::move(request), Communicator::Start::kByWaiter);
  comm.wait(*operation);
  return operation;
}

// What the call threw of ours; "none".
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

// Two ranks in this one thread, past the first collective, which tells where the slots are.
inline std::vector<std::shared_ptr<Communicator>> two_ranks(const Settings& settings) {
  auto world = connect_threads(2, settings);
  std::thread other([&] { run(*world[1], {.kind = Kind::kBarrier}); });
  run(*world[0], {.kind = Kind::kBarrier});
  other.join();
  return world;
}

}  // namespace dcoll::test
