// How ranks meet over a key-value store (transport/store.h): ranks as threads, the store a map.
#include "transport/store.h"

#include <cstring>
#include <latch>
#include <map>
#include <mutex>

#include "base/error.h"
#include "support/check.h"
#include "support/threads.h"

using namespace dcoll;

namespace {

// What torch's TCPStore is to processes.
class Map {
 public:
  KeyValueStore store() {
    return {.set =
                [this](const std::string& key, const std::vector<std::byte>& value) {
                  const std::lock_guard lock(mutex_);
                  values_[key] = value;
                },
            .get = [this](const std::string& key) -> std::optional<std::vector<std::byte>> {
              const std::lock_guard lock(mutex_);
              const auto found = values_.find(key);
              if (found == values_.end()) return std::nullopt;
              return found->second;
            }};
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<std::byte>> values_;
};

void on_ranks(int n, const std::function<void(Bootstrap&)>& body) {
  Map map;
  test::on_threads(n, [&](int rank) { body(*make_store_bootstrap(rank, n, map.store())); });
}

std::vector<int> gathered(Bootstrap& job, int own) {
  const std::vector<std::byte> all = job.all_gather(&own, sizeof own);
  std::vector<int> values(static_cast<size_t>(job.size()));
  CHECK_EQ(all.size(), values.size() * sizeof own);
  std::memcpy(values.data(), all.data(), all.size());
  return values;
}

struct CountDown {
  ~CountDown() { latch.count_down(); }
  std::latch& latch;
};

}  // namespace

TEST(ranks_exchange) {
  for (const int n : {1, 2, 5}) {
    on_ranks(n, [&](Bootstrap& job) {
      job.meet(StartUp());
      for (int round = 0; round < 3; ++round) {
        const std::vector<int> all = gathered(job, job.rank() * 10 + round);
        for (int rank = 0; rank < n; ++rank) CHECK_EQ(all[static_cast<size_t>(rank)], rank * 10 + round);
      }
      int value = job.rank() + 1;
      job.broadcast(&value, sizeof value, n - 1);
      CHECK_EQ(value, n);
      CHECK_EQ(job.all_gather(nullptr, 0).size(), 0u);
      CHECK(job.node_of_ranks() == std::vector<int>(static_cast<size_t>(n), 0));
    });
  }
}

TEST(some_ranks_exchange_among_themselves) {
  on_ranks(4, [](Bootstrap& job) {
    job.meet(StartUp());
    for (int round = 0; round < 2; ++round) {
      const bool odd = job.rank() % 2 == 1;
      const auto some = job.subset(odd ? std::vector<int>{1, 3} : std::vector<int>{0, 2});
      CHECK_EQ(some->rank(), job.rank() / 2);
      const std::vector<int> expected = odd ? std::vector<int>{1, 3} : std::vector<int>{0, 2};
      CHECK(gathered(*some, job.rank()) == expected);
    }
    job.meet(StartUp());
    CHECK((gathered(job, job.rank()) == std::vector<int>{0, 1, 2, 3}));
  });
}

TEST(ranks_of_other_versions_are_told_by_all) {
  on_ranks(3, [](Bootstrap& job) {
    StartUp start;
    if (job.rank() == 1) start.version = "dcoll 99.1";
    CHECK_THROWS(job.meet(start), ArgumentError, "dcoll 99.1 on rank 1");
    job.meet(StartUp());
  });
}

TEST(who_does_not_come_is_told_and_may_come_later) {
  for (const int missing : {0, 2}) {
    std::latch told(3);
    on_ranks(3, [&, missing](Bootstrap& job) {
      StartUp brief;
      brief.timeout_s = 0.5;
      {
        const CountDown at_the_end{told};
        if (job.rank() != missing) {
          CHECK_THROWS(job.meet(brief), TimeoutError,
                       "rank " + std::to_string(missing) + " has not called dcoll.init() (again)");
        }
      }
      told.wait();
      job.meet(StartUp());
      job.barrier();
    });
  }
}

TEST(who_leaves_the_start_up_keeps_nobody_waiting) {
  on_ranks(3, [](Bootstrap& job) {
    for (const int who : {0, 1}) {
      job.meet(StartUp());
      if (job.rank() == who) {
        job.leave("the test wants it so");
      } else {
        CHECK_THROWS(job.barrier(), PeerError, "the test wants it so");
      }
      CHECK_THROWS(job.barrier(), TransportError, "have not met");
    }
    job.meet(StartUp());
    job.barrier();
  });
}

TEST(what_the_store_throws_ends_the_wait) {
  Map map;
  KeyValueStore store = map.store();
  int calls = 0;
  store.get = [&, get = store.get](const std::string& key) {
    if (++calls > 20) throw TransportError("the store is gone");
    return get(key);
  };
  const auto job = make_store_bootstrap(0, 2, store);
  CHECK_THROWS(job->meet(StartUp()), TransportError, "the store is gone");
}

TEST(a_rank_that_does_not_exist_is_refused) {
  Map map;
  CHECK_THROWS(make_store_bootstrap(2, 2, map.store()), ArgumentError, "rank 2 of 2 ranks does not exist");
  CHECK_THROWS(make_store_bootstrap(-1, 2, map.store()), ArgumentError, "does not exist");
  CHECK_THROWS(make_store_bootstrap(0, 0, map.store()), ArgumentError, "does not exist");
}

// A rank that was stopped for longer than the limit, its peers perhaps with it, waits for them all the same.
TEST(who_did_not_run_has_not_waited) {
  StartUp start;
  start.timeout_s = 1.2;
  StartWait wait(start);
  const auto nobody = [] { return std::string(); };
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  CHECK(wait.goes_on(nobody));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK(!wait.goes_on(nobody));
}

TEST_MAIN
