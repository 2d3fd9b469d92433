#include "base/log.h"

#include <algorithm>
#include <cstdio>
#include <ctime>

#include "base/types.h"

namespace dcoll {
namespace {

constexpr auto kLabels =
    std::to_array<std::string_view>({"trace", "debug", "info", "notice", "warning", "error", "fatal"});
static_assert(static_cast<size_t>(LogLevel::kFatal) + 1 == kLabels.size());

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
  const auto found = std::ranges::find(kLabels, name);
  return found == kLabels.end() ? LogLevel::kFatal : static_cast<LogLevel>(found - kLabels.begin());
}

void Log::operator()(LogLevel severity, const std::string& text) const {
  if (severity < level) return;
  // One write per line, so that lines of several ranks do not mix.
  const std::string line = "[dcoll " + std::string(name_in(kLabels, severity)) + " rank " + std::to_string(rank) +
                           (hide_time ? "" : time_of_day()) + "] " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace dcoll
