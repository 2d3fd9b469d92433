// When a communicator that may not measure its links asks again whether somebody else has: after one call, and after
// twice as many each time it was in vain. Asking costs a message to every rank, so it must become rare; and it must not
// end, for the constants may be there at any time.
#include "engine/links/link_constants.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "rank_threads.h"
#include "support/check.h"
#include "support/said.h"
#include "transport/mapped/local.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

constexpr int kRanks = 2;
constexpr size_t kCount = 50000;  // more than goes along with a handshake, so that an algorithm is chosen
using World = std::vector<std::shared_ptr<Communicator>>;

// Ranks that reach each other by messages alone. `links` are rank 0's, which alone is asked; others have nothing.
World world_with(const LinkConstants& links) {
  World world;
  for (Endpoint& endpoint : connect_local(kRanks, {.arena_bytes = size_t{16} << 20})) {
    Members members;
    members.rank = static_cast<int>(world.size());
    members.size = kRanks;
    members.node_of_rank = {0, 1};
    members.transport_of_rank.assign(kRanks, "local");
    members.transport = std::move(endpoint.transport);
    members.links = links;
    if (members.rank != 0) members.links.known = members.links.of_the_job = std::make_shared<KnownLinks>();
    members.own_core = false;
    members.shared_cores = true;
    world.push_back(Communicator::make(std::move(members), test_settings().on_nodes(true)));
  }
  return world;
}

LinkConstants links_of_others() {
  LinkConstants links;
  links.use = LinkConstants::Use::kAlwaysMeasure;  // so no cache is looked at
  links.may_measure = false;
  links.log.level = LogLevel::kInfo;
  links.log.hide_time = true;
  return links;
}

// One all-reduce on all ranks, by name where there is one.
void call(World& world, const std::string& name = "") {
  on_threads(kRanks, [&](int rank) {
    Communicator& comm = *world[static_cast<size_t>(rank)];
    std::vector<float> x(kCount, static_cast<float>(rank + 1));
    Request request{.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = kCount, .name = name};
    comm.wait(name.empty() ? *comm.submit(std::move(request)) : *comm.submit_by_name(std::move(request)));
    for (const float value : x) CHECK_EQ(value, 3.0f);
  });
}

void close(World& world) {
  on_threads(kRanks, [&](int rank) { world[static_cast<size_t>(rank)]->close(); });
}

// Unlike those that are built in.
plan::Constants some_constants() {
  plan::Constants constants;
  constants.network.alpha_us = 77;
  constants.handshake_us = 88;
  return constants;
}

}  // namespace

// The constants come between two calls, each time between others: which call is the first to know of them?
TEST(what_is_asked_in_vain_is_asked_again_after_twice_as_many_calls) {
  for (int before = 0; before <= 16; ++before) {
    LinkConstants links = links_of_others();
    links.log.level = LogLevel::kError;
    World world = world_with(links);
    for (int calls = 0; calls < before; ++calls) call(world);
    links.of_the_job->set(some_constants());
    int calls = before, asks = 1;  // the calls in which they are asked for: 1, 2, 4, 8, 16, 32
    while (asks <= before) asks *= 2;
    for (; world[0]->constants().source == "built in"; ++calls) {
      CHECK(calls < asks);
      call(world);
    }
    CHECK_EQ(calls, asks);
    for (const auto& comm : world) {
      CHECK_EQ(comm->constants().source, std::string("the job's"));
      CHECK_EQ(comm->constants().topology.network.alpha_us, 77.0);
      CHECK_EQ(comm->constants().topology.handshake_us, 88.0);
    }
    close(world);
  }
}

// Calls of other kinds, which choose between no algorithms, count as well, so that ranks agree on the number.
TEST(calls_that_need_no_constants_count) {
  const LinkConstants links = links_of_others();
  World world = world_with(links);
  for (int calls = 0; calls < 4; ++calls) call(world);  // the last one asked: not again before the 8th
  for (int calls = 0; calls < 3; ++calls) {
    on_threads(kRanks, [&](int rank) { run(*world[static_cast<size_t>(rank)], {.kind = Kind::kBarrier}); });
  }
  links.of_the_job->set(some_constants());
  const std::string said = said_in([&] { call(world); });
  CHECK_EQ(said, std::string("[dcoll info rank 0] link constants: the job's\n"));
  close(world);
}

// Operations by name are a sequence of their own. They leave measuring to the ordered one, and learn what that learnt.
TEST(operations_by_name_wait_for_what_the_ordered_ones_measure) {
  LinkConstants links = links_of_others();
  links.may_measure = true;
  World world = world_with(links);
  const auto named = [&] { return said_in([&] { call(world, "x"); }); };
  for (int calls = 1; calls <= 5; ++calls) CHECK_EQ(named(), std::string());
  CHECK(!links.known->get().has_value());
  CHECK(said_in([&] { call(world); }).find("link constants: measured in ") != std::string::npos);
  CHECK(links.known->get().has_value());
  for (int calls = 6; calls <= 7; ++calls) CHECK_EQ(named(), std::string());
  CHECK_EQ(named(), std::string("[dcoll info rank 0] link constants: the job's\n"));
  CHECK_EQ(named(), std::string());  // nothing is left to ask for
  close(world);
}

// Each of them would say the same.
TEST(a_cache_that_cannot_be_used_is_said_at_the_first_time_alone) {
  LinkConstants links = links_of_others();
  links.use = LinkConstants::Use::kCacheOrMeasure;
  links.log.level = LogLevel::kWarning;
  const auto folder =
      std::filesystem::temp_directory_path() / ("dcoll-link-constants-test-" + std::to_string(getpid()));
  links.cache = {folder, "two hosts"};
  std::filesystem::create_directories(folder);
  std::ofstream(links.cache.path()) << "something else\n";
  World world = world_with(links);
  const std::string said = said_in([&] {
    for (int calls = 1; calls <= 4; ++calls) call(world);
  });
  CHECK_EQ(times_in(said, "is ignored"), size_t{1});
  std::string complaint;
  CHECK(links.cache.store(some_constants(), complaint));  // a later job has measured
  for (int calls = 5; calls <= 7; ++calls) call(world);
  CHECK_EQ(world[1]->constants().source, std::string("built in"));
  call(world);
  CHECK_EQ(world[0]->constants().source, links.cache.path());
  CHECK_EQ(world[1]->constants().topology.network.alpha_us, 77.0);
  close(world);
  std::filesystem::remove_all(folder);
}

TEST_MAIN
