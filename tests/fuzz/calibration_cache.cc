// The file of measured constants: what is not exactly what dcoll writes is refused with a reason, and what is taken is
// plausible. A first byte of '#' stands for a right last line, so that the lines before it are reached.
#include "engine/links/calibration_cache.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/hash.h"
#include "fuzz.h"

namespace {

const std::filesystem::path& folder() {
  static const auto* const made = [] {  // never destroyed: it is needed at exit
    auto* path =
        new std::filesystem::path(std::filesystem::temp_directory_path() / ("dcoll-fuzz-" + std::to_string(getpid())));
    std::filesystem::create_directories(*path);
    std::atexit([] {
      std::error_code ignored;
      std::filesystem::remove_all(folder(), ignored);
    });
    return path;
  }();
  return *made;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const dcoll::CalibrationCache cache{folder().string(), "two hosts"};
  std::string text(reinterpret_cast<const char*>(data), size);
  if (!text.empty() && text[0] == '#') {
    char line[40];
    text.erase(0, 1);
    std::snprintf(line, sizeof line, "fingerprint %016llx\n",
                  static_cast<unsigned long long>(dcoll::Fingerprint().add(text).value()));
    text += line;
  }
  std::ofstream(cache.path(), std::ios::binary | std::ios::trunc) << text;
  std::string complaint;
  const auto constants = cache.load(complaint);
  FUZZ_CHECK(constants.has_value() == complaint.empty());
  if (!constants) return 0;
  FUZZ_CHECK(constants->network.alpha_us >= -1 && constants->network.alpha_us <= 1e12);
  FUZZ_CHECK(cache.store(*constants, complaint));
  FUZZ_CHECK(cache.load(complaint) == constants);
  return 0;
}
