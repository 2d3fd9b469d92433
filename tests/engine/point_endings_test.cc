// Messages between two ranks that do not come: after failures and deadlines, and from who has left.
#include <barrier>
#include <vector>

#include "base/error.h"
#include "point_messages.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

TEST(a_failure_ends_what_is_under_way) {
  for (const Settings& settings : layouts()) {
    auto world = connect_threads(3, settings);
    std::barrier begun(3);  // of threads: the communicator's own may still be under way elsewhere when one has left it
    on_threads(3, [&](int rank) {
      Communicator& comm = *world[rank];
      Bytes data(200000);
      if (rank == 2) {
        begun.arrive_and_wait();
        comm.fail("rank 2 gave up");
        return;
      }
      const auto received = comm.submit(message(Kind::kReceive, data.data(), 10, 2, key(1)));
      const auto sent = comm.submit(message(Kind::kSend, data.data(), data.size(), 2, key(1)));
      begun.arrive_and_wait();
      CHECK_THROWS(comm.wait(*received), PeerError, "rank 2 gave up");
      CHECK_THROWS(comm.wait(*sent), PeerError, "rank 2 gave up");
      CHECK_THROWS(send(comm, data.data(), 1, 2), PeerError, "rank 2 gave up");
      CHECK_THROWS(recv(comm, data.data(), 1, kAnySource), PeerError, "rank 2 gave up");
    });
  }
}

TEST(a_peer_that_closed_is_named) {
  auto world = connect_threads(2, test_settings());
  world[1] = nullptr;
  int number = 0;
  CHECK_THROWS(recv(*world[0], &number, sizeof number, 1), PeerError, "closed its communicator");
}

TEST(deadlines_name_the_peer_and_the_tag) {
  for (Settings settings : layouts()) {
    settings.timeout_s = 0.3;
    auto world = connect_threads(3, settings);
    int number = 0;
    CHECK_THROWS(recv(*world[0], &number, sizeof number, 2, 77), TimeoutError,
                 "recv (4 bytes from rank 2, tag 77) made no progress for 0 s, waiting for rank 2 of 3");
    CHECK_THROWS(recv(*world[1], &number, sizeof number, 2, 77), TimeoutError, "rank 0: recv (4 bytes from rank 2");
  }
  Settings settings = test_settings();
  settings.timeout_s = 0.3;
  auto alone = connect_threads(1, settings);
  int number = 0;
  CHECK_THROWS(recv(*alone[0], &number, sizeof number, 0, 5), TimeoutError, "tag 5) made no progress");
}

TEST(a_stall_ends_the_job_if_asked) {
  Settings settings = test_settings();
  settings.stall_check_time_s = 0.1;
  settings.stall_shutdown_time_s = 0.2;
  auto world = connect_threads(2, settings);
  Bytes data(100000);
  const auto sent = world[0]->submit(message(Kind::kSend, data.data(), data.size(), 1, key(8)));
  CHECK_THROWS(world[0]->wait(*sent), StallError, "send (100000 bytes to rank 1, tag 8)");
}

TEST(what_is_left_at_the_end_is_given_up) {
  auto world = connect_threads(2, test_settings());
  int number = 0;
  const auto received = world[0]->submit(message(Kind::kReceive, &number, sizeof number, 1, key(1)));
  on_threads(2, [&](int rank) { world[rank]->close(); });
  CHECK_THROWS(world[0]->wait(*received), Error, "was given up: dcoll.shutdown() came before");
  CHECK_EQ(world[0]->failure(), std::string());  // the job has not failed
}

TEST(wrong_ranks_are_refused) {
  auto world = connect_threads(2, test_settings());
  int number = 0;
  CHECK_THROWS(world[0]->submit(message(Kind::kSend, &number, 4, 2, key(0))), ArgumentError,
               "send: rank 2 does not exist; allowed are 0 to 1");
  CHECK_THROWS(world[0]->submit(message(Kind::kSend, &number, 4, -1, key(0))), ArgumentError,
               "send: rank -1 does not exist");
  CHECK_THROWS(world[0]->submit(message(Kind::kReceive, &number, 4, -2, key(0))), ArgumentError,
               "recv: rank -2 does not exist; allowed are -1");
}

TEST(who_leaves_tells_those_that_wait_for_it) {
  for (const Settings& settings : layouts()) {
    Bytes last(100'000), wanted(1 << 20);
    run_ranks(3, settings, [&](Communicator& comm) {
      if (comm.rank() == 1) {
        fill(last.data(), last.size(), 1);
        comm.submit(message(Kind::kSend, last.data(), last.size(), 0, key(2)));
        comm.submit(message(Kind::kReceive, wanted.data(), wanted.size(), 0, key(3)));
        comm.note_refused("the data ran out");
        return;
      }
      const std::string told = "rank 1 called shutdown after a call there was refused (the data ran out)";
      Bytes memory(1 << 20);
      fill(memory.data(), memory.size(), 7);
      if (comm.rank() == 2) {
        CHECK_THROWS(recv(comm, memory.data(), 8, kAnySource), MismatchError, "any rank");
        return;
      }
      CHECK_THROWS(send(comm, memory.data(), memory.size(), 1), MismatchError, told);
      CHECK_THROWS(recv(comm, memory.data(), 8, 1), MismatchError, told);
      CHECK_THROWS(recv(comm, memory.data(), 9, 1), MismatchError, told);
      send(comm, memory.data(), memory.size(), 1, 3);  // which rank 1 has asked for before it left
      CHECK_EQ(recv(comm, memory.data(), last.size(), 1, 2), 1);
      CHECK(holds(memory.data(), last.size(), 1));
    });
  }
}

TEST_MAIN
