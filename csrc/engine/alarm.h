// Wakes the background thread, at once or in a moment.
//
// In a moment, because most asynchronous operations are waited for soon: a thread woken for nothing takes the core from
// the very thread that is about to wait, twice (two context switches, 30 to 40 us measured). So a submission sets the
// alarm a little ahead, and whoever waits meanwhile does the work itself.
#pragma once

#include <chrono>

namespace dcoll {

class Alarm {
 public:
  Alarm();  // throws TransportError when the system has no timer left
  ~Alarm();
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  // wait() returns `delay` from now. Replaces what was set before. Any thread.
  void set(std::chrono::microseconds delay);
  // Until the time that was set is reached; at once if it passed since the last wait().
  void wait();

 private:
  int timer_;
};

}  // namespace dcoll
