// Threads that the system may refuse to give (EAGAIN: a limit of the user or of the container).
#pragma once

#include <exception>
#include <string>

namespace dcoll {

inline constexpr const char* kNoThread = "The system gives this process no further thread";
inline constexpr const char* kMoreThreads = "Raise the limit: ulimit -u, or a container's --pids-limit.";

// Of what std::thread's constructor threw.
inline std::string no_thread_text(const std::exception& error) {
  std::string text(kNoThread);
  return text.append(" (").append(error.what()).append("). ").append(kMoreThreads);
}

}  // namespace dcoll
