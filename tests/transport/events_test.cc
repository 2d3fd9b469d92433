// What of a process's epoll descriptors is taken for MPI's, and what is believed of it.
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "support/check.h"
#include "transport/mpi_events.h"
#include "transport/os/fd.h"

using namespace dcoll;
using std::chrono::microseconds;

namespace {

// An epoll descriptor that watches an eventfd.
struct Watcher {
  Watcher() : event(eventfd(0, EFD_NONBLOCK)), epoll(epoll_create1(0)) { watch(event.get()); }
  void watch(int descriptor) {
    epoll_event interest{.events = EPOLLIN, .data = {.fd = descriptor}};
    CHECK_EQ(epoll_ctl(epoll.get(), EPOLL_CTL_ADD, descriptor, &interest), 0);
  }
  void speak() { CHECK_EQ(eventfd_write(event.get(), 1), 0); }
  void be_read() {
    eventfd_t value = 0;
    CHECK_EQ(eventfd_read(event.get(), &value), 0);
  }
  Fd event, epoll;
};

bool contains(const std::vector<int>& all, int one) { return std::find(all.begin(), all.end(), one) != all.end(); }

Fd tcp_socket() { return Fd(socket(AF_INET, SOCK_STREAM, 0)); }

}  // namespace

TEST(news_of_mpi_ends_a_wait) {
  Watcher mpi;
  const MpiEvents events({mpi.epoll.get()}, true);
  CHECK(events.wait(microseconds(1000)) == Ended::kTooLong);
  mpi.speak();
  CHECK(events.wait(microseconds(10'000'000)) == Ended::kNews);
  events.wake();
  mpi.be_read();
  CHECK(events.wait(microseconds(10'000'000)) == Ended::kWoken);
}

TEST(a_descriptor_that_is_always_ready_is_left_alone_until_it_is_quiet) {
  Watcher mpi, foreign;
  const MpiEvents events({mpi.epoll.get(), foreign.epoll.get()}, false);
  foreign.speak();
  int news = 0;
  for (int i = 0; i < 3000; ++i) news += events.wait(microseconds(10)) == Ended::kNews;
  CHECK(news <= 1001);
  CHECK(events.deaf());
  mpi.speak();  // the other one is heard all the same
  CHECK(events.wait(microseconds(10'000'000)) == Ended::kNews);
  mpi.be_read();
  foreign.be_read();
  CHECK(events.wait(microseconds(10)) == Ended::kTooLong);
  CHECK(!events.deaf());
  foreign.speak();
  CHECK(events.wait(microseconds(10'000'000)) == Ended::kNews);
}

// A pipe that nobody writes to any more stands for it: POLLHUP, and nothing to read.
TEST(a_descriptor_that_reports_errors_is_never_asked_again) {
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  const Fd broken(ends[0]);
  Watcher mpi;
  const MpiEvents events({broken.get(), mpi.epoll.get()}, true);
  close(ends[1]);
  CHECK(events.wait(microseconds(10'000'000)) == Ended::kWoken);
  CHECK(events.wait(microseconds(1000)) == Ended::kTooLong);
  CHECK(events.deaf());
  mpi.speak();
  CHECK(events.wait(microseconds(10'000'000)) == Ended::kNews);
}

TEST(a_number_that_is_closed_and_used_again_is_not_mistaken) {
  Watcher mpi;
  const int number = mpi.epoll.get();
  const MpiEvents events({number}, true);
  Watcher other;
  other.speak();
  CHECK_EQ(dup2(other.epoll.get(), number), number);
  CHECK(events.wait(microseconds(1000)) == Ended::kTooLong);
}

TEST(only_what_appeared_while_mpi_started_is_its_own) {
  Watcher foreign;
  foreign.speak();
  const std::vector<int> before = epoll_descriptors();
  CHECK(contains(before, foreign.epoll.get()));
  CHECK_EQ(MpiEvents().wait(microseconds(1000)) == Ended::kNews, true);  // not known yet whose it is
  Watcher mpi;
  note_mpi_descriptors(before);
  Watcher later;
  later.speak();
  const MpiEvents events;
  CHECK(events.wait(microseconds(1000)) == Ended::kTooLong);
  mpi.speak();
  CHECK(events.wait(microseconds(10'000'000)) == Ended::kNews);
}

// So their congestion control stays as it is: it is changed of those that watched() returns alone.
TEST(sockets_of_other_libraries_are_not_touched) {
  Watcher epoll;
  const Fd kept = tcp_socket(), reused = tcp_socket(), same_file(dup(reused.get())), foreign = tcp_socket();
  epoll.watch(kept.get());
  epoll.watch(reused.get());
  CHECK(MpiEvents({epoll.epoll.get()}, false).watched().empty());
  const MpiEvents events({epoll.epoll.get()}, true);
  CHECK(contains(events.watched(), kept.get()));
  CHECK(contains(events.watched(), reused.get()));
  CHECK_EQ(dup2(foreign.get(), reused.get()), reused.get());  // the epoll still watches the file that same_file keeps
  CHECK(contains(events.watched(), kept.get()));
  CHECK(!contains(events.watched(), reused.get()));
}

TEST_MAIN
