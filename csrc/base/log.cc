#include "base/log.h"

#include <cstdio>
#include <ctime>

namespace dcoll {
namespace {

const char* label(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return "trace";
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
    case LogLevel::kFatal:
      return "fatal";
  }
  return "?";
}

// " 21:05:33.123456", of the day and the zone of this machine.
std::string time_of_day() {
  timespec now{};
  std::tm local{};
  if (clock_gettime(CLOCK_REALTIME, &now) != 0 || localtime_r(&now.tv_sec, &local) == nullptr) return "";
  char text[40];
  std::snprintf(text, sizeof text, " %02d:%02d:%02d.%06d", local.tm_hour, local.tm_min, local.tm_sec,
                static_cast<int>(now.tv_nsec / 1000));
  return text;
}

}  // namespace

LogLevel log_level_from(std::string_view name) {
  for (LogLevel level : {LogLevel::kTrace, LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    if (name == label(level)) return level;
  }
  return LogLevel::kFatal;
}

void Log::operator()(LogLevel severity, const std::string& text) const {
  if (severity < level) return;
  // One write per line, so that lines of several ranks do not mix.
  const std::string line = "[dcoll " + std::string(label(severity)) + " rank " + std::to_string(rank) +
                           (hide_time ? "" : time_of_day()) + "] " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace dcoll
