#include "base/log.h"

#include <cstdio>

namespace dcoll {
namespace {

const char* label(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "?";
}

}  // namespace

LogLevel log_level_from(std::string_view name) {
  for (LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning}) {
    if (name == label(level)) return level;
  }
  return LogLevel::kError;
}

void Log::operator()(LogLevel severity, const std::string& text) const {
  if (severity < level) return;
  // One write per line, so that lines of several ranks do not mix.
  const std::string line =
      "[dcoll " + std::string(label(severity)) + " rank " + std::to_string(rank) + "] " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace dcoll
