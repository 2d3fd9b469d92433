#include "transport/mpi_events.h"

#include <dirent.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

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
  for (const int descriptor : epoll_descriptors()) {
    if (count_ < kMostDescriptors) descriptors_[count_++] = descriptor;
  }
}

Ended MpiEvents::wait(std::chrono::microseconds limit, int bell) const {
  std::array<pollfd, kMostDescriptors + 2> polled;
  size_t count = 0;
  for (size_t i = 0; i < count_; ++i) polled[count++] = {descriptors_[i], POLLIN, 0};
  polled[count++] = {wake_.get(), POLLIN, 0};
  if (bell >= 0) polled[count++] = {bell, POLLIN, 0};
  const timespec timeout{static_cast<time_t>(limit.count() / 1'000'000),
                         static_cast<long>(limit.count() % 1'000'000 * 1000)};
  const int ready = ppoll(polled.data(), count, &timeout, nullptr);
  if (ready == 0) return Ended::kTooLong;
  if (ready < 0) return Ended::kWoken;  // by a signal
  for (size_t i = count_; i < count; ++i) {
    if (polled[i].revents != 0) take_ring(polled[i].fd);
  }
  const auto has_news = [](const pollfd& descriptor) { return (descriptor.revents & POLLIN) != 0; };
  return std::any_of(polled.begin(), polled.begin() + count_, has_news) ? Ended::kNews : Ended::kWoken;
}

// /proc/self/fdinfo/N of an epoll descriptor has a line "tfd: <descriptor> ..." for each it watches (proc(5)).
std::vector<int> MpiEvents::watched() const {
  std::vector<int> found;
  for (size_t i = 0; i < count_; ++i) {
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(descriptors_[i]));
    constexpr std::string_view kTarget = "tfd:";
    for (std::string line; std::getline(info, line);) {
      if (line.compare(0, kTarget.size(), kTarget) == 0) found.push_back(std::atoi(line.c_str() + kTarget.size()));
    }
  }
  return found;
}

}  // namespace dcoll
