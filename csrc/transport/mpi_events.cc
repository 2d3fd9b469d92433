#include "transport/mpi_events.h"

#include <dirent.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace dcoll {

namespace {

// Every epoll descriptor of this process. Those of other libraries do no harm: they end a wait early.
std::vector<int> epoll_descriptors() {
  constexpr const char* kFolder = "/proc/self/fd";
  std::vector<int> found;
  const auto close = [](DIR* folder) { closedir(folder); };
  const std::unique_ptr<DIR, decltype(close)> folder(opendir(kFolder), close);
  if (!folder) return found;
  while (const dirent* entry = readdir(folder.get())) {
    char target[64];
    const ssize_t length = readlink((std::string(kFolder) + "/" + entry->d_name).c_str(), target, sizeof target);
    constexpr std::string_view kEpoll = "anon_inode:[eventpoll]";
    if (length > 0 && std::string_view(target, static_cast<size_t>(length)) == kEpoll) {
      found.push_back(std::atoi(entry->d_name));
    }
  }
  return found;
}

}  // namespace

MpiEvents::MpiEvents() {
  const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake < 0) {
    throw TransportError(std::string("eventfd failed: ") + std::strerror(errno) +
                         ". Raise the limit of open files (ulimit -n)");
  }
  descriptors_[count_++] = {wake, POLLIN, 0};
  for (const int descriptor : epoll_descriptors()) {
    if (count_ < kMostDescriptors) descriptors_[count_++] = {descriptor, POLLIN, 0};
  }
}

MpiEvents::~MpiEvents() { close(descriptors_[0].fd); }

bool MpiEvents::wait(std::chrono::microseconds limit) const {
  auto ready = descriptors_;  // poll() writes to it, and several threads may wait
  const timespec timeout{static_cast<time_t>(limit.count() / 1'000'000),
                         static_cast<long>(limit.count() % 1'000'000 * 1000)};
  if (ppoll(ready.data(), count_, &timeout, nullptr) <= 0) return false;
  if (ready[0].revents != 0) {
    uint64_t count = 0;
    // Nothing to read: another thread that was woken has taken it.
    if (read(ready[0].fd, &count, sizeof count) < 0 && errno != EAGAIN) return false;
  }
  for (size_t i = 1; i < count_; ++i) {
    if ((ready[i].revents & POLLIN) != 0) return true;
  }
  return false;
}

// /proc/self/fdinfo/N of an epoll descriptor has a line "tfd: <descriptor> ..." for each it watches (proc(5)).
std::vector<int> MpiEvents::watched() const {
  std::vector<int> found;
  for (size_t i = 1; i < count_; ++i) {
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(descriptors_[i].fd));
    constexpr std::string_view kTarget = "tfd:";
    for (std::string line; std::getline(info, line);) {
      if (line.compare(0, kTarget.size(), kTarget) == 0) found.push_back(std::atoi(line.c_str() + kTarget.size()));
    }
  }
  return found;
}

void MpiEvents::wake() const {
  const uint64_t one = 1;
  // Fails only when it is full of wakes already.
  [[maybe_unused]] const ssize_t written = write(descriptors_[0].fd, &one, sizeof one);
}

}  // namespace dcoll
