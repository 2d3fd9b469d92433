// Who is in init(), and who has ended, as processes of one machine tell each other before there is MPI.
#include "transport/presence.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

#include "support/check.h"

using namespace dcoll;

namespace {

LaunchedAs as(int rank, const std::string& job) {
  return {.job = job + std::to_string(getpid()), .rank = rank, .size = 3, .local_size = 3};
}

// Rank 1 of the job, in a process of its own, from when it is here until end().
class Other {
 public:
  explicit Other(const LaunchedAs& who) {
    int pipe_ends[2];
    CHECK(pipe(pipe_ends) == 0);
    child_ = fork();
    if (child_ == 0) {
      const Presence presence(who);
      const char here = 1;
      if (write(pipe_ends[1], &here, 1) != 1) _exit(1);
      for (;;) pause();
    }
    char here = 0;
    CHECK(read(pipe_ends[0], &here, 1) == 1);
    close(pipe_ends[0]);
    close(pipe_ends[1]);
  }
  ~Other() { end(); }
  void end() {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    child_ = 0;
  }

 private:
  pid_t child_ = 0;
};

// Rank 0 of a job, which has seen rank 1.
struct Seen {
  explicit Seen(const std::string& job) : who(as(0, job)), one(who), presence(who) {
    one.rank = 1;
    other.emplace(one);
    CHECK(presence.ended().empty());
  }
  LaunchedAs who, one;
  Presence presence;
  std::optional<Other> other;
};

}  // namespace

TEST(who_was_seen_is_missed_when_it_has_ended) {
  Seen job("seen");
  job.other->end();
  CHECK(job.presence.ended() == std::vector<int>{1});
}

TEST(who_begins_later_hears_from_those_that_saw_it) {
  Seen first("later");
  first.other->end();
  LaunchedAs two = first.who;
  two.rank = 2;
  Presence before(two);
  CHECK(before.ended().empty());  // nobody has missed it yet
  CHECK(first.presence.ended() == std::vector<int>{1});
  CHECK(before.ended() == std::vector<int>{1});
  const Other again(first.one);  // as after a restart of that rank
  CHECK(first.presence.ended().empty());
  CHECK(before.ended().empty());
}

TEST(what_one_was_told_the_others_hear) {
  const LaunchedAs zero = as(0, "told"), one = as(1, "told");
  Presence told(zero), hears(one);
  CHECK(hears.ended().empty());
  told.tell({2});
  CHECK(told.ended() == std::vector<int>{2});
  CHECK(hears.ended() == std::vector<int>{2});
}

TEST(the_lowest_that_is_there_speaks) {
  std::optional<Presence> zero(as(0, "speaks"));
  Presence one(as(1, "speaks"));
  CHECK(one.ended().empty());
  CHECK(zero->speaks());
  CHECK(!one.speaks());
  zero.reset();
  CHECK(one.ended() == std::vector<int>{0});
  CHECK(one.speaks());
}

TEST(where_nobody_can_be_looked_for_nobody_has_ended) {
  Seen job("descriptors");
  rlimit before{};
  CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{0, before.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  const std::vector<int> ended = job.presence.ended();
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(ended.empty());
  job.other->end();
  CHECK(job.presence.ended() == std::vector<int>{1});
}

TEST(another_job_has_other_names) {
  const LaunchedAs who = as(0, "this");
  LaunchedAs one = as(1, "that");
  Presence presence(who);
  {
    const Other other(one);
    CHECK(presence.ended().empty());
  }
  CHECK(presence.ended().empty());
}

TEST_MAIN
