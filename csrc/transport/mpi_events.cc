#include "transport/mpi_events.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/thread_safety.h"

namespace dcoll {

namespace {

// Duplicates of what note_mpi_descriptors found. MPI is started once in a process, so they are kept to its end.
struct Noted {
  Mutex mutex;
  std::optional<std::vector<Fd>> epolls DCOLL_GUARDED_BY(mutex);
};
Noted& noted_events() {
  static Noted* const all = new Noted;  // never destroyed: threads may wait at the process's end
  return *all;
}

Fd duplicate(int descriptor) { return Fd(fcntl(descriptor, F_DUPFD_CLOEXEC, 3)); }

bool is_ready(int descriptor) {
  pollfd polled{descriptor, POLLIN, 0};
  return poll(&polled, 1, 0) != 0;
}

// The number behind `name` in a line of fdinfo; -1: there is none.
int64_t number_after(std::string_view line, std::string_view name, int base) {
  const size_t found = line.find(name);
  if (found == std::string_view::npos) return -1;
  const size_t digits = line.find_first_not_of(' ', found + name.size());
  int64_t value = -1;
  if (digits != std::string_view::npos) std::from_chars(&line[digits], line.data() + line.size(), value, base);
  return value;
}

}  // namespace

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

void note_mpi_descriptors(const std::vector<int>& before) {
  std::vector<Fd> fresh;
  for (const int descriptor : epoll_descriptors()) {
    if (std::find(before.begin(), before.end(), descriptor) == before.end()) fresh.push_back(duplicate(descriptor));
  }
  Noted& noted = noted_events();
  const MutexLock lock(noted.mutex);
  noted.epolls = std::move(fresh);
}

MpiEvents::MpiEvents() : MpiEvents({}, true) {
  std::vector<int> found;
  {
    Noted& noted = noted_events();
    const MutexLock lock(noted.mutex);
    certain_ = noted.epolls.has_value();
    if (certain_) {
      for (const Fd& epoll : *noted.epolls) found.push_back(epoll.get());
    }
  }
  if (!certain_) found = epoll_descriptors();
  for (const int descriptor : found) {
    if (count_ < kMostDescriptors) epolls_[count_++].descriptor = duplicate(descriptor);
  }
}

MpiEvents::MpiEvents(const std::vector<int>& epolls, bool certainly_of_mpi) : certain_(certainly_of_mpi) {
  for (const int descriptor : epolls) {
    if (count_ < kMostDescriptors) epolls_[count_++].descriptor = duplicate(descriptor);
  }
}

bool MpiEvents::worth_a_look(const Epoll& epoll) const {
  const int in_a_row = epoll.in_a_row.load(std::memory_order_relaxed);
  if (in_a_row < kMostInARow) return true;
  if (in_a_row == INT_MAX || is_ready(epoll.descriptor.get())) return false;
  epoll.in_a_row.store(0, std::memory_order_relaxed);
  return true;
}

Ended MpiEvents::wait(std::chrono::microseconds limit, int bell) const {
  std::array<pollfd, kMostDescriptors + 2> polled;
  size_t count = 0;
  bool deaf = false;
  for (size_t i = 0; i < count_; ++i) {
    const bool looks = worth_a_look(epolls_[i]);
    deaf |= !looks;
    polled[count++] = {looks ? epolls_[i].descriptor.get() : -1, POLLIN, 0};
  }
  deaf_.store(deaf, std::memory_order_relaxed);
  polled[count++] = {wake_.get(), POLLIN, 0};
  if (bell >= 0) polled[count++] = {bell, POLLIN, 0};
  const timespec timeout{static_cast<time_t>(limit.count() / 1'000'000),
                         static_cast<long>(limit.count() % 1'000'000 * 1000)};
  const int ready = ppoll(polled.data(), count, &timeout, nullptr);
  if (ready < 0) return Ended::kWoken;  // by a signal
  bool news = false;
  for (size_t i = 0; i < count_; ++i) {
    std::atomic<int>& in_a_row = epolls_[i].in_a_row;
    if (polled[i].fd < 0) continue;
    if ((polled[i].revents & POLLIN) != 0) {
      news = true;
      in_a_row.fetch_add(1, std::memory_order_relaxed);
    } else {
      in_a_row.store(polled[i].revents == 0 ? 0 : INT_MAX, std::memory_order_relaxed);
    }
  }
  if (ready == 0) return Ended::kTooLong;
  for (size_t i = count_; i < count; ++i) {
    if (polled[i].revents != 0) take_ring(polled[i].fd);
  }
  return news ? Ended::kNews : Ended::kWoken;
}

// /proc/self/fdinfo/N of an epoll descriptor has a line "tfd: <descriptor> ... ino:<inode in hex> ..." for each it
// watches (proc(5)). The number may mean another file by now: one whose inode is not that one.
std::vector<int> MpiEvents::watched() const {
  std::vector<int> found;
  for (size_t i = 0; certain_ && i < count_; ++i) {
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(epolls_[i].descriptor.get()));
    for (std::string line; std::getline(info, line);) {
      const int64_t descriptor = number_after(line, "tfd:", 10), inode = number_after(line, "ino:", 16);
      struct stat now{};
      if (descriptor < 0 || inode < 0 || fstat(static_cast<int>(descriptor), &now) != 0) continue;
      if (now.st_ino == static_cast<ino_t>(inode)) found.push_back(static_cast<int>(descriptor));
    }
  }
  return found;
}

}  // namespace dcoll
