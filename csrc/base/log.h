// Lines on standard error: "[dcoll warning rank 2] ...". The level and rank travel in the object; nothing is global.
#pragma once

#include <string>
#include <string_view>

namespace dcoll {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
LogLevel log_level_from(std::string_view name);  // "debug", "info", "warning", "error"

struct Log {
  LogLevel level = LogLevel::kWarning;
  int rank = 0;
  void operator()(LogLevel severity, const std::string& text) const;
};

}  // namespace dcoll
