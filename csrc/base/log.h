// Lines on standard error: "[dcoll warning rank 2 21:05:33.123456] ...". Level and rank travel in the object; nothing
// is global.
#pragma once

#include <string>
#include <string_view>

namespace dcoll {

enum class LogLevel { kTrace, kDebug, kInfo, kNotice, kWarning, kError, kFatal };
LogLevel log_level_from(std::string_view name);  // "trace", "debug", "info", "notice", ...

struct Log {
  LogLevel level = LogLevel::kNotice;
  int rank = 0;
  bool hide_time = false;
  void operator()(LogLevel severity, const std::string& text) const;
};

}  // namespace dcoll
