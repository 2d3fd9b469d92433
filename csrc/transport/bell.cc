#include "transport/bell.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace dcoll {

Fd make_bell() {
  Fd bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell) {
    throw TransportError(std::string("eventfd failed: ") + std::strerror(errno) +
                         ". Raise the limit of open files (ulimit -n)");
  }
  return bell;
}

void ring_bell(int descriptor) {
  const uint64_t one = 1;
  // Fails only when it was rung as often as it can count.
  [[maybe_unused]] const ssize_t written = write(descriptor, &one, sizeof one);
}

void take_ring(int descriptor) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(descriptor, &count, sizeof count);
}

}  // namespace dcoll
