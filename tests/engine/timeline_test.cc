// The timeline's queue, and starting and stopping while operations run.
#include "engine/watch/timeline.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "engine/rank_threads.h"
#include "support/check.h"
#include "support/threads.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

std::string temporary(const std::string& name) {
  return "/tmp/dcoll-timeline-" + std::to_string(getpid()) + "-" + name;
}

std::string read_and_remove(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  std::remove(path.c_str());
  return text.str();
}

size_t count(const std::string& text, const std::string& what) {
  size_t found = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

TimelineRecord record_of(uint64_t bytes) {
  TimelineRecord record;
  record.bytes = bytes;
  record.name[0] = record.track[0] = '\0';
  return record;
}

}  // namespace

TEST(queue_is_bounded_and_in_order) {
  RecordQueue queue(4);
  TimelineRecord record;
  for (uint64_t round = 0; round < 3; ++round) {
    CHECK(!queue.pop(record));
    for (uint64_t i = 0; i < 4; ++i) CHECK(queue.push(record_of(round * 10 + i)));
    CHECK(!queue.push(record_of(99)));
    for (uint64_t i = 0; i < 4; ++i) {
      CHECK(queue.pop(record));
      CHECK_EQ(record.bytes, round * 10 + i);
    }
  }
}

// Every record that was taken comes out once, the ones of each producer in its order.
TEST(queue_of_many_producers_loses_nothing) {
  constexpr int kProducers = 3;
  constexpr uint64_t kEach = 2000;
  RecordQueue queue(64);
  std::vector<uint64_t> next(kProducers, 0);
  on_threads(kProducers + 1, [&](int thread) {
    if (thread < kProducers) {
      for (uint64_t i = 0; i < kEach;) {
        if (queue.push(record_of(static_cast<uint64_t>(thread) << 32 | i))) {
          ++i;
        } else {
          std::this_thread::yield();
        }
      }
      return;
    }
    for (uint64_t got = 0; got < kProducers * kEach;) {
      TimelineRecord record;
      if (!queue.pop(record)) {
        std::this_thread::yield();
        continue;
      }
      ++got;
      uint64_t& expected = next[record.bytes >> 32];
      CHECK_EQ(record.bytes & 0xffffffff, expected);
      ++expected;
    }
  });
  for (const uint64_t seen : next) CHECK_EQ(seen, kEach);
}

// Collectives of two ranks, synchronous and queued, while one of them starts and stops its timeline all the time.
TEST(started_and_stopped_while_operations_run) {
  const std::string path = temporary("running.json");
  constexpr int kOperations = 300;
  run_ranks(2, test_settings(), [&](Communicator& comm) {
    float value[64] = {1};
    const Call call{.in = value, .out = value, .count = 64, .op = ReduceOp::kMax, .name = "sync"};
    std::atomic<bool> done{false};
    std::thread switcher;
    if (comm.rank() == 0) {
      switcher = std::thread([&] {
        while (!done) {
          comm.timeline().start(path, true);
          std::this_thread::yield();
          comm.timeline().stop();
        }
      });
    }
    for (int i = 0; i < kOperations; ++i) {
      if (auto operation = comm.run_or_submit(call)) comm.wait(*operation);
      auto queued = comm.submit(
          {.kind = Kind::kAllReduce, .in = value, .out = value, .count = 64, .op = ReduceOp::kMax, .name = "queued"});
      comm.wait(*queued);
    }
    done = true;
    if (switcher.joinable()) switcher.join();
    comm.timeline().start(comm.rank() == 0 ? path : "", false);
    if (auto operation = comm.run_or_submit(call)) comm.wait(*operation);
    comm.timeline().stop();
  });
  const std::string text = read_and_remove(path);
  CHECK_EQ(text.substr(0, 2), std::string("[\n"));
  CHECK_EQ(text.substr(text.size() - 3), std::string("\n]\n"));
  CHECK_EQ(count(text, "\"name\":\"sync\",\"bytes\":256"), size_t{1});
  CHECK_EQ(count(text, "\"name\":\"timeline ends\""), size_t{1});
}

TEST(too_many_are_dropped_and_counted) {
  const std::string path = temporary("dropped.json");
  constexpr size_t kSpans = 60'000;
  run_ranks(1, test_settings(), [&](Communicator& comm) {
    comm.timeline().start(path, false);
    for (size_t i = 0; i < kSpans; ++i) comm.timeline().span("track", "span", 1, 2, 0);
    comm.timeline().stop();
  });
  const std::string text = read_and_remove(path);
  const size_t written = count(text, "\"name\":\"span\"");
  const std::string before = "\"dropped\":";
  const size_t at = text.find(before);
  CHECK(at != std::string::npos);
  CHECK_EQ(written + std::stoul(text.substr(at + before.size())), kSpans);
  CHECK(written > 0);
}

TEST_MAIN
