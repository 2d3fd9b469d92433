#include "engine/alarm.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/error.h"

namespace dcoll {

Alarm::Alarm() : timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)) {
  if (timer_ < 0) {
    throw TransportError(std::string("timerfd_create failed: ") + std::strerror(errno) +
                         ". Raise the limit of open files (ulimit -n).");
  }
}

Alarm::~Alarm() { close(timer_); }

void Alarm::set(std::chrono::microseconds delay) {
  const int64_t ns = std::max<int64_t>(1, delay.count() * 1000);  // 0 would disarm it
  const itimerspec when{.it_interval = {}, .it_value = {ns / 1'000'000'000, ns % 1'000'000'000}};
  timerfd_settime(timer_, 0, &when, nullptr);
}

void Alarm::wait() {
  uint64_t expirations = 0;
  while (read(timer_, &expirations, sizeof expirations) < 0 && errno == EINTR) {
  }
}

}  // namespace dcoll
