// The router, over two worlds of threads: one plays the node, the other one the network.
#include "transport/router.h"

#include <array>

#include "base/error.h"
#include "support/check.h"
#include "transport/mapped/local.h"
#include "transport/ranks.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

// Four ranks on two "nodes", dealt out in turns: ranks 0, 2 and 1, 3. Node and local rank are rank % 2 and rank / 2.
constexpr int kRanks = 4;

struct Cluster {
  std::array<std::vector<Endpoint>, 2> nodes{connect_local(2, {1 << 20, 500, 2}), connect_local(2, {1 << 20, 500, 2})};
  std::vector<Endpoint> network = connect_local(kRanks, {1 << 20, 300, 2});
  std::vector<std::unique_ptr<Transport>> routers;
  std::vector<Transport*> local, remote;  // what the routers own

  Cluster() {
    for (int rank = 0; rank < kRanks; ++rank) {
      auto node = static_cast<size_t>(rank % 2);
      auto& mine = nodes[node][static_cast<size_t>(rank / 2)].transport;
      auto& wide = network[static_cast<size_t>(rank)].transport;
      local.push_back(mine.get());
      remote.push_back(wide.get());
      routers.push_back(make_router(rank, kRanks, std::move(mine), {rank % 2, rank % 2 + 2}, std::move(wide)));
    }
  }
};

}  // namespace

TEST(every_peer_is_reached_through_its_medium) {
  Cluster c;
  on_threads(kRanks, [&](int rank) {
    Transport& t = *c.routers[static_cast<size_t>(rank)];
    for (uint64_t k = 0; k < 40; ++k) {
      for (int peer = 0; peer < kRanks; ++peer) {
        send(t, peer, 1, message(k * 4 + static_cast<uint64_t>(rank), 1 + k * 7));
      }
      for (int peer = 0; peer < kRanks; ++peer) {
        CHECK(receive(t, peer, 1, 1 + k * 7) == message(k * 4 + static_cast<uint64_t>(peer), 1 + k * 7));
      }
      t.progress();
    }
    t.check_peers();
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int peer = 0; peer < kRanks; ++peer) {
      const bool same_node = rank % 2 == peer % 2;
      auto& by_router = *c.routers[static_cast<size_t>(rank)];
      CHECK_EQ(by_router.posted(peer, 1), uint64_t{40});
      CHECK_EQ(by_router.sent(peer, 1), uint64_t{40});
      CHECK_EQ(c.remote[static_cast<size_t>(rank)]->posted(peer, 1), uint64_t{same_node ? 0u : 40u});
      if (same_node) CHECK_EQ(c.local[static_cast<size_t>(rank)]->posted(peer / 2, 1), uint64_t{40});
    }
  }
}

TEST(messages_composed_in_place) {
  Cluster c;
  for (const int peer : {1, 2}) {  // remote, local
    std::byte* room = c.routers[0]->acquire_send(peer, 0, 100);
    CHECK(room != nullptr);
    const auto data = message(3, 100);
    std::memcpy(room, data.data(), 100);
    c.routers[0]->commit_send(peer, 0);
    CHECK(receive(*c.routers[static_cast<size_t>(peer)], 0, 0, 100) == data);
  }
}

TEST(properties) {
  Cluster c;
  CHECK_EQ(std::string(c.routers[3]->name()), std::string("router"));
  CHECK_EQ(c.routers[3]->rank(), 3);
  CHECK_EQ(c.routers[3]->size(), kRanks);
  CHECK_EQ(c.routers[3]->max_message_bytes(), size_t{300});  // the least of 500 and 300
  char x = 0;
  CHECK_THROWS(c.routers[0]->post_send(4, 0, &x, 1), ArgumentError, "no way to rank 4");
}

// A wait cannot see the network's messages, so it must not last: any number of waits ends with the message found.
TEST(waiting_sees_both_media) {
  Cluster c;
  for (const int sender : {1, 2}) {  // to rank 0: remote, local
    on_threads(3, [&](int rank) {
      Transport& t = *c.routers[static_cast<size_t>(rank)];
      if (rank == 0) {
        CHECK(t.post_recv(sender, 0, nullptr, 5));
        sleep_until(t, [&] { return t.front(sender, 0) != nullptr; });
        t.pop(sender, 0);
      } else if (rank == sender) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        send(t, 0, 0, message(1, 5));
      }
    });
  }
  std::thread waker([&] { c.routers[0]->wake(); });
  c.routers[0]->wait(c.routers[0]->prepare_wait(), kHang);
  waker.join();
}

TEST(where_a_rank_is_alone_on_its_node_the_network_is_all_there_is) {
  for (const bool has_own : {true, false}) {
    Endpoint own = std::move(connect_local(1, {1 << 20, 64, 1})[0]);
    auto network = std::move(connect_local(2, {1 << 20, 64, 1})[0].transport);
    const Transport* const there = network.get();
    const auto made = make_router(0, 2, has_own ? std::move(own.transport) : nullptr, {0}, std::move(network));
    CHECK(made.get() == there);
  }
}

TEST(failure_notices_reach_both_media_once) {
  Cluster c;
  CHECK_EQ(c.routers[1]->poll_failure(), std::string());
  c.routers[0]->post_failure("the cause");
  for (const size_t peer : {1, 2, 3}) CHECK_EQ(c.routers[peer]->poll_failure(), std::string("the cause"));
  CHECK_EQ(c.remote[2]->poll_failure(), std::string("the cause"));  // rank 2 was told twice
  // Rank 2 has seen the first cause locally; what comes from the network later does not replace it.
  Cluster d;
  d.remote[1]->post_failure("through the network");
  CHECK_EQ(d.routers[2]->poll_failure(), std::string("through the network"));
  d.local[0]->post_failure("through the node");
  CHECK_EQ(d.routers[2]->poll_failure(), std::string("through the network"));
}

// Or a rank of the node could see only that this one has gone, and name it for the culprit.
TEST(what_another_node_tells_is_passed_on_inside_the_node) {
  Cluster c;
  c.local[0]->post_failure("the cause");   // to rank 2 of its node
  c.remote[0]->post_failure("the cause");  // to the others, of whom rank 3 looks later than rank 1
  CHECK_EQ(c.routers[1]->poll_failure(), std::string("the cause"));
  CHECK_EQ(c.local[3]->poll_failure(), std::string("the cause"));
}

TEST(peers_of_both_media_are_checked) {
  Cluster c;
  c.routers[1].reset();
  CHECK_THROWS(c.routers[0]->check_peers(), PeerError, "local rank 1");  // as the network numbers it
  Cluster d;
  d.routers[2].reset();
  CHECK_THROWS(d.routers[0]->check_peers(), PeerError, "closed its communicator");
}

TEST(arguments_are_checked) {
  auto make = [](int rank, int size, std::vector<int> local_ranks, int remote_size) {
    auto local = std::move(connect_local(2, {1 << 20, 64, 1})[0].transport);
    auto remote = std::move(connect_local(remote_size, {1 << 20, 64, 1})[0].transport);
    make_router(rank, size, std::move(local), std::move(local_ranks), std::move(remote));
  };
  make(0, 4, {0, 3}, 4);
  CHECK_THROWS(make(4, 4, {0, 3}, 4), ArgumentError, "rank 4 does not exist");
  CHECK_THROWS(make(0, 4, {0, 1, 2}, 4), ArgumentError, "3 local ranks given for a local transport of 2");
  CHECK_THROWS(make(0, 4, {0, 4}, 4), ArgumentError, "got 4");
  CHECK_THROWS(make(0, 4, {0, 0}, 4), ArgumentError, "different ranks");
  CHECK_THROWS(make(0, 4, {3, 0}, 4), ArgumentError, "belongs to rank 3, not to rank 0");
  CHECK_THROWS(make(0, 4, {0, 3}, 3), ArgumentError, "rank 0 of 3, wanted 0 of 4");
}

TEST_MAIN
