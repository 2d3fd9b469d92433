// Waiting for the other processes while a job begins: with a deadline, a report of who is missing, and Ctrl-C.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"

namespace dcoll {

struct StartUp {
  double timeout_s = 300;                            // DCOLL_TIMEOUT
  double report_s = 60;                              // DCOLL_STALL_CHECK_TIME
  std::function<void()> look_around{};               // ten times a second; what it throws ends the wait (Ctrl-C)
  std::function<void(const std::string&)> report{};  // after report_s: what is waited for
  std::string version =
      "dcoll " DCOLL_VERSION ", start-up 1";  // the ranks', compared; raise the number with the exchanges
};

// One wait. patience_s: on top of the limit, so that those speak first that see who is missing.
class StartWait {
 public:
  explicit StartWait(const StartUp& start, double patience_s = 0);
  // Call between two looks. Naps, longer and longer; false once the time is up. `missing`: "rank 2 has not ...".
  bool goes_on(const std::function<std::string()>& missing);
  // Whether this is one of the looks, some ten a second, that may cost more.
  bool thorough() const { return thorough_; }
  // Waited so far. While the process was stopped it has not (kMostBetweenLooks).
  double seconds() const { return waited_s_; }

 private:
  const StartUp& start_;
  const double limit_s_;
  Clock::time_point called_ = Clock::now();
  double waited_s_ = 0, looked_s_ = 0;
  bool thorough_ = false;
  bool reported_ = false;
};

// "within 300 s (DCOLL_TIMEOUT)".
std::string within_text(const StartUp& start);

// Runs a call of MPI's that may never come back, on a thread of its own. When it is not done before the deadline the
// thread is left alone, so `call` owns what it uses. Throws Error where there is no thread to be had.
class Aside {
 public:
  explicit Aside(std::function<void()> call);
  bool done() const;
  // Throws what the call threw; TimeoutError; PeerError where ranks have `ended`, as is asked ten times a second.
  void wait(const StartUp& start, const std::function<std::string()>& missing,
            const std::function<std::vector<int>()>& ended) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace dcoll
