// Settings from the environment: whatever the values, they are taken within their limits or refused with the name of
// the variable. Input: lines NAME=value.
#include "base/settings.h"

#include <cmath>
#include <sstream>
#include <string_view>

#include "base/error.h"
#include "base/horovod_settings.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  for (const auto& known : dcoll::setting_table()) unsetenv(std::string(known.name).c_str());
  for (const auto& known : dcoll::horovod_settings()) unsetenv(std::string(known.variable).c_str());
  std::istringstream lines(std::string(reinterpret_cast<const char*>(data), size));
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    const std::string name = line.substr(0, equals);
    const bool ours = name.rfind("DCOLL_", 0) == 0 || name.rfind("HOROVOD_", 0) == 0;
    if (ours && equals != std::string::npos) setenv(name.c_str(), line.c_str() + equals + 1, 1);
  }
  try {
    const dcoll::Settings s = dcoll::Settings::from_env();
    FUZZ_CHECK(s.timeout_s > 0 && s.timeout_s <= 1e9);
    FUZZ_CHECK(s.spin_us >= -1 && s.spin_us <= 1e9);
    FUZZ_CHECK(s.arena_mb == 0 || (s.arena_mb >= 16 && s.arena_mb <= int64_t{1} << 26));
    FUZZ_CHECK(s.slice_kb >= 0 && s.slice_kb <= 4096 && s.slots >= 1 && s.slots <= 64);
    FUZZ_CHECK(std::isfinite(s.bucket_mb) && s.first_bucket_mb > 0);
    for (const int node : s.nodes) FUZZ_CHECK(node >= 0);
    for (const int core : s.thread_affinity) FUZZ_CHECK(core >= 0);
  } catch (const dcoll::ArgumentError& error) {
    FUZZ_CHECK(std::string_view(error.what()).find("DCOLL_") != std::string_view::npos);
  }
  return 0;
}
