// Words that a stray write of one rank has damaged, in memory that its peers read: whatever the word and the form of
// the collective, the peers get an error that names that rank. None of them crashes; AddressSanitizer watches.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "engine/board/agreement.h"
#include "engine/buckets/grouped_rows.h"
#include "engine/levels/hierarchy.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

constexpr uint64_t kWild = uint64_t{0x123456789abcd} << 12;  // no offset, no number of rows and no post
constexpr int kCulprit = 1;

struct Form {
  const char* name;
  bool mapped;
  Request request;  // without memory
  size_t bytes_in, bytes_out;
  std::vector<int> nodes{};
};

const std::vector<Form> kForms = {
    {"two-shot", true, {.kind = Kind::kAllReduce, .count = 5000}, 20000, 20000},
    {"two-shot, scaled", true, {.kind = Kind::kAllReduce, .count = 5000, .prescale = 0.5}, 20000, 20000},
    {"two levels", true, {.kind = Kind::kAllReduce, .count = 1 << 18}, 1 << 20, 1 << 20, {0, 0, 1, 1}},
    {"reduce-scatter", true, {.kind = Kind::kReduceScatter, .count = 30000}, 120000, 120000},
    {"broadcast", true, {.kind = Kind::kBroadcast, .count = 120000, .root = kCulprit}, 120000, 120000},
    {"all-gather", true, {.kind = Kind::kAllGather, .count = 30000, .row_elems = 4}, 120000, 0},
    {"all-to-all", true, {.kind = Kind::kAllToAll, .count = 30000, .row_elems = 4}, 120000, 0},
    {"uneven all-to-all",
     true,
     {.kind = Kind::kAllToAll, .count = 1548, .row_elems = 64, .splits = {517, 1031}},
     99072,
     0},
    {"staged", false, {.kind = Kind::kAllReduce, .count = 50000}, 200000, 200000},
    {"inline all-gather", false, {.kind = Kind::kAllGather, .count = 2, .row_elems = 4}, 8, 0},
    {"inline all-to-all", false, {.kind = Kind::kAllToAll, .count = 2, .row_elems = 4, .splits = {1, 1}}, 8, 0},
    {"small all-gather", false, {.kind = Kind::kAllGather, .count = 300, .row_elems = 4}, 1200, 0},
    {"small all-to-all", false, {.kind = Kind::kAllToAll, .count = 300, .row_elems = 4}, 1200, 0},
    {"small uneven all-to-all",
     false,
     {.kind = Kind::kAllToAll, .count = 1548, .row_elems = 1, .splits = {517, 1031}},
     1548,
     0},
};

// The ranks of a form as threads; a rank's program is this thread, and its communicator's own.
struct Job {
  explicit Job(const Form& form) : form(form) {
    Settings settings = test_settings();
    settings.spin_us = 50;  // so that synchronous calls are tried on the spot, however few cores there are
    settings.nodes = form.nodes;
    world = connect_threads(form.nodes.empty() ? 2 : static_cast<int>(form.nodes.size()), settings);
    // Before the first collective: what the first post tells of.
    shared = window(kCulprit).base(kCulprit) + window(kCulprit).board(kCulprit).record[1].post.offset_in;
  }
  ~Job() {
    for (const auto& rank : world) rank->fail("the test is over");
  }

  Window& window(int rank) { return *world[rank]->members().window; }
  BoardEntry& posts() { return window(kCulprit).board(kCulprit); }
  BoardEntry::Record& newest_post() {
    BoardEntry& entry = posts();
    return entry.record[entry.record[1].ticket > entry.record[0].ticket];
  }

  Request request(int rank) {
    Request request = form.request;
    const auto memory = [&](size_t bytes) {
      owners.push_back(form.mapped ? world[rank]->alloc(bytes) : Memory::plain(bytes));
      return owners.back()->data();
    };
    request.in = memory(form.bytes_in);
    if (form.bytes_out > 0) request.out = memory(form.bytes_out);
    if (request.kind == Kind::kAllToAll && request.splits.empty()) request.splits.assign(2, request.count / 2);
    return request;
  }

  // All but rank 0 call it, until the culprit's post is there.
  void begin() {
    const uint64_t before = newest_post().ticket;
    for (int rank = 1; rank < static_cast<int>(world.size()); ++rank) {
      under_way.push_back(world[rank]->submit(request(rank)));
    }
    while (newest_post().ticket == before) world[kCulprit]->poll(*under_way[0]);
  }

  void barrier() {
    std::vector<std::shared_ptr<Operation>> all;
    for (const auto& rank : world) all.push_back(rank->submit({.kind = Kind::kBarrier}));
    for (size_t rank = 0; rank < world.size(); ++rank) world[rank]->wait(*all[rank]);
  }

  const Form form;
  std::vector<std::shared_ptr<Communicator>> world;
  std::vector<std::shared_ptr<Memory>> owners;
  std::vector<std::shared_ptr<Operation>> under_way;
  std::byte* shared;  // what the culprit laid out for its peers
};

void expect_named(const std::string& where, const std::string& error) {
  // The second: an offset may look like an address in private memory, which the kernel is then asked for.
  const bool named = (error.find("rank 1 ") != std::string::npos && error.find("damaged") != std::string::npos) ||
                     error.find("cannot read the memory of rank 1 ") != std::string::npos;
  if (!named) fail(__FILE__, __LINE__, where + " was reported as: " + error);
}

enum class How { kQueued, kNow };

// The culprit posts, `damage` happens, and the rank that comes last gets the error, which the others hear of.
void expect_caught(const Form& form, const std::string& word, const std::function<void(Job&)>& damage) {
  for (const How how : {How::kQueued, How::kNow}) {
    Job job(form);
    job.barrier();
    job.begin();
    damage(job);
    const std::string where = std::string(form.name) + ": " + word;
    expect_named(where, error_of([&] {
                   Request request = job.request(0);
                   Communicator& comm = *job.world[0];
                   if (how == How::kQueued) {
                     run(comm, std::move(request));
                   } else if (const auto operation = comm.run_or_submit(std::move(request))) {
                     comm.wait(*operation);
                   }
                 }));
    // The culprit itself may have finished, with what it knows better. Its next call will not.
    for (size_t i = 0; i < job.under_way.size(); ++i) {
      Communicator& comm = *job.world[i + 1];
      const std::string error = error_of([&] { comm.wait(*job.under_way[i]); });
      if (comm.rank() != kCulprit || error != "none") expect_named(where, error);
      expect_named(where, error_of([&] { run(comm, {.kind = Kind::kBarrier}); }));
    }
  }
}

bool reads_offset_out(const Form& form) { return form.request.kind == Kind::kAllReduce; }

// Stores that go on until the ranks have noticed: their owner writes those words again and again, these values in
// turns.
class Stomper {
 public:
  explicit Stomper(std::vector<std::atomic<uint64_t>*> words, std::vector<uint64_t> values = {kWild})
      : thread_([this, words = std::move(words), values = std::move(values)] {
          for (size_t i = 0; !stop_; ++i) {
            for (std::atomic<uint64_t>* word : words) word->store(values[i % values.size()], std::memory_order_relaxed);
            if (values.size() == 1) std::this_thread::yield();
          }
        }) {}
  ~Stomper() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace

TEST(offsets_of_operands_and_results) {
  for (const Form& form : kForms) {
    if (!form.mapped) continue;
    // Far outside; just too long; so large that adding to it would overflow.
    for (const uint64_t offset : {kWild, (uint64_t{256} << 20) - 64, Window::kUnmapped - 100}) {
      if (form.request.prescale == 1.0) {
        expect_caught(form, "offset_in", [&](Job& job) { job.newest_post().post.offset_in = offset; });
      }
      if (!reads_offset_out(form)) continue;
      expect_caught(form, "offset_out", [&](Job& job) { job.newest_post().post.offset_out = offset; });
    }
  }
}

TEST(offsets_of_memory_that_is_not_mapped) {
  for (const Form& form : kForms) {
    if (form.name != std::string("staged")) continue;
    expect_caught(form, "both offsets", [](Job& job) {
      job.newest_post().post.offset_in = kWild;
      job.newest_post().post.offset_out = 0;
    });
  }
}

TEST(numbers_of_rows) {
  for (const Form& form : kForms) {
    const bool gather = form.request.kind == Kind::kAllGather, all_to_all = form.request.kind == Kind::kAllToAll;
    // The last ones times the bytes per row are 0 and 8 again.
    for (const uint64_t rows : {kWild, ~uint64_t{0}, uint64_t{1} << 62, (uint64_t{1} << 62) + 2}) {
      if (gather) expect_caught(form, "rows", [&](Job& job) { job.newest_post().post.value = rows; });
      if (all_to_all && form.request.splits != std::vector<size_t>{517, 1031}) {
        expect_caught(form, "rows each", [&](Job& job) { job.newest_post().post.offset_out = rows - (rows + 1 == 0); });
      }
    }
    if (all_to_all) expect_caught(form, "longest", [](Job& job) { job.newest_post().post.value = 0; });
    if (all_to_all) expect_caught(form, "longest", [](Job& job) { job.newest_post().post.value = kWild; });
  }
}

// The table {0, 517, 1548}, of which rank 0 reads the first two.
TEST(tables_of_rows) {
  for (const Form& form : kForms) {
    if (form.request.splits != std::vector<size_t>{517, 1031}) continue;
    for (const auto& [from, to] : {std::pair<uint64_t, uint64_t>{0, kWild}, {518, 517}, {kWild, kWild + 517}}) {
      if (!form.mapped && from == kWild) continue;  // where a block begins is not looked at: it has a cell
      expect_caught(form, "table", [from = from, to = to](Job& job) {
        auto* word = reinterpret_cast<uint64_t*>(job.shared);
        const auto* end = word + (1 << 20) / sizeof *word;
        const uint64_t table[] = {0, 517, 1548};
        word = std::search(word, const_cast<uint64_t*>(end), std::begin(table), std::end(table));
        CHECK(word != end);
        word[0] = from;
        word[1] = to;
      });
    }
  }
}

// The second word of that table changes all the time between values that are all possible. What is copied must be what
// there is room for: each word is read once. Both ranks are this thread, so that the other core is the one who writes.
TEST(tables_that_change_while_they_are_read) {
  for (const Form& form : kForms) {
    if (form.request.splits != std::vector<size_t>{517, 1031}) continue;
    Job job(form);
    job.barrier();
    const std::vector<Request> requests{job.request(0), job.request(1)};
    const auto call = [&] {
      std::vector<std::shared_ptr<Operation>> both;
      for (const int rank : {1, 0}) {
        both.push_back(job.world[rank]->submit(requests[rank], Communicator::Start::kSoon));
      }
      for (bool done[2] = {false, false}; !done[0] || !done[1];) {
        for (const int rank : {0, 1}) done[rank] = job.world[rank]->poll(*both[1 - rank]);
      }
      return both[1];
    };
    std::vector<std::atomic<uint64_t>*> seconds;  // a call writes the one or the other
    auto* word = reinterpret_cast<uint64_t*>(job.shared);
    const auto* end = word + (1 << 20) / sizeof *word;
    const uint64_t table[] = {0, 517, 1548};
    for (int i = 0; i < 2; ++i) call();
    while ((word = std::search(word, const_cast<uint64_t*>(end), std::begin(table), std::end(table))) != end) {
      seconds.push_back(reinterpret_cast<std::atomic<uint64_t>*>(++word));
    }
    CHECK_EQ(seconds.size(), 2u);
    const Stomper stomper(seconds, {517, 0, 1, 516});
    for (int i = 0; i < (kSanitized ? 3000 : 30000); ++i) {
      const auto done = call();
      CHECK(done->counts[0] == 517 && done->counts[1] >= 0 && done->counts[1] <= 517);
      const size_t rows = static_cast<size_t>(done->counts[0] + done->counts[1]);
      CHECK_EQ(done->output->bytes(), rows * (form.bytes_in / form.request.count));
    }
  }
}

// What a group's block says of itself: more rows than it has, fewer, and so many that their bytes are 32 again.
TEST(rows_of_a_group) {
  for (const uint64_t said : {uint64_t{3}, uint64_t{1}, kWild, (uint64_t{1} << 60) + 2, ~uint64_t{0}}) {
    Job job(kForms[0]);
    job.barrier();
    std::thread culprit([&] {
      uint64_t block[5] = {said};  // of one tensor of 2 x 4 float32
      run(*job.world[1], {.kind = Kind::kAllGather,
                          .in = block,
                          .count = sizeof block,
                          .dtype = DType::kUInt8,
                          .group = "1 tensor: rows of 4 float32"});
    });
    const std::vector<float> mine(8);
    GroupedAllGather group(job.world[0], {{.data = mine.data(), .rows = 2, .row_elems = 4}}, "");
    group.run([&](Operation& operation) { job.world[0]->wait(operation); });
    culprit.join();
    CHECK_THROWS(group.rows(), TransportError, "rank 1 sent 40 bytes that are not the rows they are said to be");
  }
}

TEST(posts_that_were_never_made) {
  for (const Form& form : kForms) {
    if (!form.nodes.empty()) continue;
    expect_caught(form, "post", [](Job& job) { job.newest_post().ticket.store(kWild); });
  }
}

// The first post tells where each rank's slots are.
TEST(offsets_of_slots) {
  for (const bool pull : {false, true}) {
    Job job(kForms[0]);
    (pull ? job.posts().record[1].post.offset_in : job.posts().record[1].post.value) = kWild;
    std::string texts[2];
    on_threads(2, [&](int rank) { texts[rank] = error_of([&] { run(*job.world[rank], {.kind = Kind::kBarrier}); }); });
    for (const std::string& text : texts) expect_named("slots", text);
  }
  Job levels(kForms[2]);
  levels.posts().record[1].post.offset_in = kWild;
  std::string texts[4];
  on_threads(4, [&](int rank) { texts[rank] = error_of([&] { run(*levels.world[rank], {.kind = Kind::kBarrier}); }); });
  for (const std::string& text : texts) expect_named("slots on two levels", text);
}

// Damaged while the ranks work, as often as it takes.
TEST(counts_of_pieces) {
  using Count = NodeShared::Count NodeShared::*;
  for (const Count count : {&NodeShared::filled, &NodeShared::reduced, &NodeShared::arrived, &NodeShared::taken}) {
    Form form = kForms[2];
    form.mapped = false;
    form.request.count = 1 << 20;
    form.bytes_in = form.bytes_out = 4 << 20;
    Job job(form);
    job.barrier();
    std::vector<Request> requests;
    for (int rank = 0; rank < 4; ++rank) requests.push_back(job.request(rank));
    const Stomper stomper({&(reinterpret_cast<NodeShared*>(job.shared)->*count).pieces});
    std::string texts[4];
    on_threads(4, [&](int rank) {
      for (int i = 0; i < 1000 && (i == 0 || texts[rank] == "none"); ++i) {
        texts[rank] = error_of([&] { run(*job.world[rank], requests[rank]); });
      }
    });
    for (const std::string& text : texts) expect_named("counts", text);
  }
}

// What the leader of a node tells it: whether the nodes called the same, and of which post that is.
NodeShared& leaders(const std::vector<std::shared_ptr<Communicator>>& world) {
  Window& window = *world[1]->members().window;
  return *reinterpret_cast<NodeShared*>(window.base(0) + window.board(0).record[1].post.offset_in);
}

TEST(verdicts) {
  const std::string text = "rank 0 tells of post ";
  for (const bool later : {false, true}) {
    Job job(kForms[2]);
    job.barrier();
    NodeShared::Verdict& verdict = leaders(job.world).verdict;
    const uint64_t next = job.newest_post().ticket + 1;
    if (!later) verdict.equal = 7;
    verdict.ticket.store(later ? next + 2 : next);
    const auto alone = job.world[1]->submit({.kind = Kind::kBarrier});
    CHECK_THROWS(job.world[1]->wait(*alone), TransportError, text + std::to_string(later ? next + 2 : next));
    CHECK_THROWS(run(*job.world[0], {.kind = Kind::kBarrier}), Error, "damaged");
  }
}

// Of what the leader noted of those that it waits for, only what can be ranks is told.
TEST(ranks_that_a_leader_waits_for) {
  for (const auto& [noted, named] : {std::pair<int32_t, int>{1 << 30, 0}, {-7, 0}, {4, 0}, {3, 3}}) {
    Settings settings = test_settings();
    settings.nodes = {0, 0, 1, 1};
    settings.timeout_s = 0.3;
    const auto world = connect_threads(4, settings);
    on_threads(4, [&](int rank) { run(*world[static_cast<size_t>(rank)], {.kind = Kind::kBarrier}); });
    leaders(world).missing.ranks[0] = noted;
    CHECK_THROWS(run(*world[1], {.kind = Kind::kBarrier}), TimeoutError,
                 "waiting for rank " + std::to_string(named) + " of 4");
  }
}

// More than eight ranks count their arrivals in groups, in memory of each group's first rank.
const Form kInGroups = {"groups", true,  {.kind = Kind::kAllReduce, .count = 5000},
                        20000,    20000, std::vector<int>(9, 0)};

TEST(counts_of_arrivals) {
  using Word = std::atomic<uint64_t>& (*)(ArrivalGroup&);
  const Word words[] = {[](ArrivalGroup& group) -> auto& { return group.arrived[0]; },
                        [](ArrivalGroup& group) -> auto& { return group.groups_arrived[0]; },
                        [](ArrivalGroup& group) -> auto& { return group.released; }};
  for (const Word word : words) {
    Job job(kInGroups);
    job.barrier();
    const auto& groups = job.window(0).groups();
    CHECK(groups.size() > 1);
    const int keeper = groups[0].front();
    word(job.window(0).group(0)) = kWild;
    std::vector<Request> requests;
    for (int rank = 0; rank < 9; ++rank) requests.push_back(job.request(rank));
    std::vector<std::string> texts(9);
    on_threads(9, [&](int rank) {
      const auto own = static_cast<size_t>(rank);
      for (int i = 0; i < 2 && (i == 0 || texts[own] == "none"); ++i) {
        texts[own] = error_of([&] { run(*job.world[own], requests[own]); });
      }
    });
    for (const std::string& text : texts) {
      CHECK(text.find("rank " + std::to_string(keeper) + " ") != std::string::npos);
      CHECK(text.find("damaged") != std::string::npos);
    }
  }
}

TEST(ranks_that_a_group_counts) {
  Job job(kInGroups);
  Board board(job.window(0));
  ArrivalGroup& group = job.window(0).group(0);
  group.outcome[0].mapped = 9;
  CHECK_EQ(board.count_mapped(2), 9);
  group.outcome[0].mapped = 10;
  CHECK_THROWS(board.count_mapped(2), TransportError, "rank 0 counts 10 ranks of 9: its shared memory is damaged");
}

TEST_MAIN
