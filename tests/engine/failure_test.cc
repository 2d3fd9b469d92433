// What happens when things go wrong: every rank learns the same, nothing hangs, and what can go on does.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "engine/core/point.h"
#include "faulty_transport.h"
#include "rank_threads.h"
#include "support/check.h"
#include "transport/mapped/local.h"
#include "transport/os/processes.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

const uint64_t kKey = point_key(PointSpace::kUser, 0);

void expect_working(Communicator& comm) {
  float x = 1;
  run(comm, {.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1});
  CHECK_EQ(x, static_cast<float>(comm.size()));
}

}  // namespace

TEST(mismatch_is_reported_everywhere_and_the_job_goes_on) {
  for (int n : {2, 3, 5}) {
    run_ranks(n, [](Communicator& comm) {
      std::vector<float> x(8, 1.0f);
      const size_t count = comm.rank() == 1 ? 7 : 8;
      for (int i = 0; i < 3; ++i) {
        CHECK_THROWS(
            run(comm, {.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = count, .name = "grad"}),
            MismatchError, "rank 1 called allreduce 'grad' (sum of 7 float32)");
        CHECK_THROWS(comm.rank() == 0
                         ? run(comm, {.kind = Kind::kBarrier})
                         : run(comm, {.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = 8}),
                     MismatchError, "rank 0 called barrier");
        expect_working(comm);
      }
      for (const float v : x) CHECK_EQ(v, 1.0f);  // nothing was moved
    });
  }
}

TEST(mismatch_between_nodes) {
  for (int n : {2, 3, 6}) {
    run_ranks(n, without_shared_memory(), [n](Communicator& comm) {
      std::vector<float> x(8, 1.0f);
      const Request mine{
          .kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = comm.rank() == n - 1 ? 7u : 8u};
      for (int i = 0; i < 3; ++i) {
        CHECK_THROWS(run(comm, mine), MismatchError,
                     "rank " + std::to_string(n - 1) + " called allreduce (sum of 7 float32)");
        expect_working(comm);
      }
    });
  }
}

// dtype, op, root, scale, algorithm and name are all compared.
TEST(mismatch_in_every_argument) {
  run_ranks(2, [](Communicator& comm) {
    std::vector<int64_t> x(4, 1);
    const bool odd = comm.rank() == 1;
    const Request base{.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = 4};
    std::vector<Request> requests(5, base);
    if (odd) {
      requests[0].dtype = DType::kInt32;
      requests[1].op = ReduceOp::kMax;
      requests[2].postscale = 2.0;
      requests[3].algo = "ring";
      requests[4].name = "other";
    }
    for (const Request& request : requests) CHECK_THROWS(run(comm, request), MismatchError, "different collectives");
    CHECK_THROWS(run(comm, {.kind = Kind::kBroadcast, .in = x.data(), .out = x.data(), .count = 8, .root = odd}),
                 MismatchError, "from rank 1");
    expect_working(comm);
  });
}

TEST(failure_reaches_every_rank_with_its_text) {
  for (int n : {2, 4}) {
    auto world = connect_threads(n, test_settings());
    std::vector<std::string> texts(n);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < n; ++rank) {
      threads.emplace_back([&, rank] {
        Communicator& comm = *world[rank];
        float x = 1;
        if (rank == n - 1) {
          comm.fail("RuntimeError: loss is NaN");
        }
        try {
          run(comm, {.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1});
        } catch (const PeerError& e) {
          texts[rank] = e.what();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    for (int rank = 0; rank < n; ++rank) {
      CHECK(texts[rank].find("RuntimeError: loss is NaN") != std::string::npos);
      if (rank != n - 1) CHECK(texts[rank].find("rank " + std::to_string(n - 1) + ": ") != std::string::npos);
      // Later calls fail at once with the first cause.
      float x = 1;
      CHECK_THROWS(world[rank]->submit({.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1}), PeerError,
                   "loss is NaN");
    }
  }
}

// Rank 1 has entered a collective and looks away; rank 0 finishes it and fails. Rank 1 still gets what is complete.
TEST(failure_does_not_overtake_what_is_complete) {
  Settings settings = test_settings();
  settings.spin_us = 100;  // so that run_or_submit enters, however few cores there are
  auto world = connect_threads(2, settings);
  float x = 1, y = 1;
  auto sum = [](float& value) { return Request{.kind = Kind::kAllReduce, .in = &value, .out = &value, .count = 1}; };
  std::thread first([&] { run(*world[0], sum(x)); });  // the first collective also tells where the slots are
  run(*world[1], sum(y));
  first.join();
  const auto entered = world[1]->run_or_submit(sum(y));
  CHECK(entered != nullptr && !entered->done.load());
  run(*world[0], sum(x));
  world[0]->fail("after the collective");
  world[1]->wait(*entered);
  CHECK_EQ(x, 4.0f);
  CHECK_EQ(y, 4.0f);
  CHECK_THROWS(run(*world[1], sum(y)), PeerError, "rank 0: after the collective");
}

TEST(timeout_names_operation_and_ranks) {
  Settings settings = test_settings();
  settings.timeout_s = 0.3;
  auto world = connect_threads(3, settings);
  std::vector<std::string> texts(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {  // rank 2 never comes
    threads.emplace_back([&, rank] {
      float x = 1;
      try {
        run(*world[rank], {.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1, .name = "late"});
      } catch (const TimeoutError& e) {
        texts[rank] = e.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(texts[rank].find("allreduce 'late' (sum of 1 float32)") != std::string::npos);
    CHECK(texts[rank].find("waiting for rank 2 of 3") != std::string::npos);
  }
  float x = 1;
  CHECK_THROWS(run(*world[2], {.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1}), TimeoutError, "late");
}

// They have their tensors back by then, and may have freed them: nothing may be written there, nor taken from there.
TEST(who_comes_after_the_others_have_given_up_does_not_finish_alone) {
  Settings settings = test_settings();
  settings.timeout_s = 0.2;
  for (const bool mapped : {true, false}) {
    const size_t count = mapped ? 1 << 14 : 100;
    auto world = connect_threads(3, settings);
    on_threads(3, [&](int rank) { run(*world[rank], {.kind = Kind::kBarrier}); });  // tells where the slots are
    std::vector<std::shared_ptr<Memory>> tensors;
    for (const auto& comm : world) {
      tensors.push_back(mapped ? comm->alloc(count * sizeof(float)) : Memory::plain(count * sizeof(float)));
    }
    const auto call = [&](int rank) {
      auto* x = reinterpret_cast<float*>(tensors[rank]->data());
      run(*world[rank], {.kind = Kind::kAllReduce, .in = x, .out = x, .count = count, .name = "late"});
    };
    std::vector<std::thread> punctual;
    for (int rank = 0; rank < 2; ++rank) {
      punctual.emplace_back([&, rank] {
        auto* x = reinterpret_cast<float*>(tensors[rank]->data());
        std::fill_n(x, count, 1.0f);
        CHECK_THROWS(call(rank), TimeoutError, "waiting for rank 2 of 3");
        std::fill_n(x, count, 7.0f);
      });
    }
    for (auto& thread : punctual) thread.join();
    CHECK_THROWS(call(2), TimeoutError, "waiting for rank 2 of 3");
    for (int rank = 0; rank < 2; ++rank) {
      const auto* x = reinterpret_cast<const float*>(tensors[rank]->data());
      CHECK_EQ(std::count(x, x + count, 7.0f), static_cast<std::ptrdiff_t>(count));
    }
  }
}

// A wait with a limit gives up waiting, not the operation.
TEST(wait_timeout_lets_the_operation_go_on) {
  run_ranks(2, [](Communicator& comm) {
    float x = 1;
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    auto operation = comm.submit({.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1});
    if (comm.rank() == 0) CHECK_THROWS(comm.wait(*operation, 0.01), TimeoutError, "It goes on");
    comm.wait(*operation);
    CHECK_EQ(x, 2.0f);
  });
}

// It takes its part between two looks of the other's, and has failed by the second.
TEST(what_a_rank_did_before_it_failed_is_completed) {
  for (int round = 0; round < (kSanitized ? 50 : 400); ++round) {
    auto world = connect_threads(2, test_settings());
    on_threads(2, [&](int rank) {
      Communicator& comm = *world[static_cast<size_t>(rank)];
      for (int i = 0; i < 3; ++i) run(comm, {.kind = Kind::kBarrier});
      if (rank == 1) comm.fail("lost");
      comm.close();
    });
  }
}

// However long a wait looks before it sleeps (DCOLL_SPIN_US), it sees limits, deadlines and deaths.
TEST(spinning_delays_nothing) {
  Settings settings = test_settings();
  settings.spin_us = 1e9;
  settings.timeout_s = 0.3;
  for (const char* transport : {"auto", "mpi"}) {
    settings.transport = transport;
    auto world = connect_threads(2, settings);
    auto operation = world[0]->submit({.kind = Kind::kBarrier}, Communicator::Start::kByWaiter);
    CHECK_THROWS(world[0]->wait(*operation, 0.01), TimeoutError, "It goes on");
    CHECK_THROWS(world[0]->wait(*operation), TimeoutError, "waiting for rank 1 of 2");
  }
  settings.timeout_s = 30;
  auto world = connect_threads(2, settings);
  world[1].reset();
  CHECK_THROWS(run(*world[0], {.kind = Kind::kBarrier}), PeerError, "rank 1");
}

TEST(pending_operations_fail_with_the_first_cause) {
  auto world = connect_threads(2, test_settings());
  float x[3] = {1, 1, 1};
  std::vector<std::shared_ptr<Operation>> pending;
  for (float& v : x) pending.push_back(world[0]->submit({.kind = Kind::kAllReduce, .in = &v, .out = &v, .count = 1}));
  world[1]->fail("gone fishing");
  for (auto& operation : pending) CHECK_THROWS(world[0]->wait(*operation), PeerError, "rank 1: gone fishing");
}

TEST(closed_communicator_says_so) {
  auto world = connect_threads(1, test_settings());
  world[0]->close();
  world[0]->close();
  CHECK_THROWS(world[0]->submit({.kind = Kind::kBarrier}), Error, "was closed");
}

// One rank leaves while another still wants something: both learn of it, as a mismatch that names the calls. The early
// one then waits for the other to leave too.
TEST(early_shutdown_is_a_mismatch) {
  auto world = connect_threads(2, test_settings());
  std::thread leaver([&] { world[1]->close(); });
  float x = 1;
  CHECK_THROWS(run(*world[0], {.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1}), MismatchError,
               "rank 1 called shutdown");
  world[0]->close();
  leaver.join();
  for (const auto& comm : world) CHECK_EQ(comm->failure(), std::string());
}

// The process of rank 1 has ended, and rank 2 has closed its memory because of it.
TEST(a_death_is_told_and_not_the_closing_that_it_caused) {
  const pid_t dead = fork();
  if (dead == 0) _exit(0);
  siginfo_t info;
  CHECK_EQ(waitid(P_PID, static_cast<id_t>(dead), &info, WEXITED | WNOWAIT), 0);
  std::vector<Endpoint> endpoints = connect_local(3, {.arena_bytes = size_t{16} << 20});
  std::vector<ProcessId> processes(3, own_process());
  processes[1].pid = dead;
  Members members;
  members.size = 3;
  members.node_of_rank.assign(3, 0);
  members.transport_of_rank.assign(3, "local");
  members.transport = std::move(endpoints[0].transport);
  members.window = std::move(endpoints[0].window);
  members.processes = std::make_shared<Processes>(processes, 0);
  const auto comm = Communicator::make(std::move(members), test_settings());
  endpoints[2] = {};
  CHECK_THROWS(run(*comm, {.kind = Kind::kBarrier}), PeerError, "rank 1 died");
  waitpid(dead, nullptr, 0);
}

// Two receives that fall due one after the other: the word that counts, the last one, is of both.
TEST(whoever_is_waited_for_is_told_of) {
  Fault fault;
  Settings settings = test_settings().on_nodes(false);
  settings.timeout_s = 2;
  const World world = faulty_world(fault, settings);
  std::byte data[2];
  std::vector<std::shared_ptr<Operation>> received;
  for (const int peer : {0, 2}) {
    received.push_back(world[kCulprit]->submit(message(Kind::kReceive, &data[received.size()], 1, peer, kKey)));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  CHECK_THROWS(world[kCulprit]->wait(*received[0]), TimeoutError, "waiting for rank 0 of 3. ");
  CHECK(fault.told.size() <= 2);
  CHECK(fault.told.back() == (std::vector{0, 2}));
}

// Frozen for longer than the timeout, with its peers, a rank that goes on first finds nothing of theirs.
TEST(who_did_not_run_has_not_waited) {
  constexpr int kFrozenMs = 2500;
  Fault fault;
  Settings settings = test_settings().on_nodes(false);
  settings.timeout_s = 2;
  const World world = faulty_world(fault, settings);
  float sums[kRanks] = {1, 1, 1};
  const auto by_name = [&](int rank) {
    float* x = &sums[rank];
    return world[rank]->submit_by_name({.kind = Kind::kAllReduce, .in = x, .out = x, .count = 1, .name = "late"});
  };
  std::byte sent{7}, received{};
  const auto ordered = world[kCulprit]->submit({.kind = Kind::kBarrier}, Communicator::Start::kInBackground);
  const auto named = by_name(kCulprit);
  const auto point = world[kCulprit]->submit(message(Kind::kReceive, &received, 1, 0, kKey));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  fault.frozen_ms = kFrozenMs;
  std::this_thread::sleep_for(std::chrono::milliseconds(kFrozenMs + 200));  // it has looked in vain since
  on_threads(kRanks, [&](int rank) {
    Communicator& comm = *world[rank];
    if (rank == kCulprit) {
      for (const auto& operation : {ordered, named, point}) comm.wait(*operation);
    } else {
      if (rank == 0) comm.wait(*comm.submit(message(Kind::kSend, &sent, 1, kCulprit, kKey)));
      comm.wait(*by_name(rank));
      run(comm, {.kind = Kind::kBarrier});
    }
    CHECK_EQ(sums[rank], 3.0f);
  });
  CHECK(received == sent);
}

TEST_MAIN
