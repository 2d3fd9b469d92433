#include "engine/links/calibration_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/number.h"
#include "transport/os/fd.h"

namespace dcoll {
namespace {

constexpr const char* kTitle = "dcoll constants 2";
constexpr off_t kMostFileBytes = 64 << 10;

using plan::Constants;
using plan::LinkModel;
using Field = std::pair<std::string, double*>;

// In the order of the file's lines.
std::vector<Field> fields_of(Constants& constants) {
  std::vector<Field> fields;
  const auto add = [&](const char* link, LinkModel& model, size_t parts) {
    for (const plan::LinkPart& part : std::span(plan::kLinkParts).first(parts)) {
      fields.emplace_back(std::string(link) + part.name, &(model.*part.value));
    }
  };
  add("memory.", constants.memory, plan::kLinkParts.size() - 2);  // which has no burst and no transit
  add("network.", constants.network, plan::kLinkParts.size());
  fields.emplace_back("gamma_us_per_byte", &constants.gamma_us_per_byte);
  fields.emplace_back("handshake_us", &constants.handshake_us);
  return fields;
}

// The whole file but its last line, which is the fingerprint of the others.
std::string body(const std::string& key, Constants constants) {
  std::string text = std::string(kTitle) + "\nfor " + key + "\n";
  for (const auto& [name, value] : fields_of(constants)) text += name + " " + text_of(*value, 17) + "\n";
  return text;
}

std::string fingerprint_line(const std::string& text) {
  return "fingerprint " + hex(Fingerprint().add(text).value()) + "\n";
}

// What no machine exceeds, in microseconds and bytes; -1 stands for "not measured".
bool is_plausible(double value) { return value >= -1 && value <= 1e12; }

// Errors of reading are a text that is no good.
std::string contents(const Fd& file, size_t bytes) {
  std::string text(bytes, '\0');
  size_t done = 0;
  while (done < bytes) {
    const ssize_t now = read(file.get(), text.data() + done, bytes - done);
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) break;
    done += static_cast<size_t>(now);
  }
  text.resize(done);
  return text;
}

bool write_all(const Fd& file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t now = write(file.get(), text.data() + done, text.size() - done);
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) return false;
    done += static_cast<size_t>(now);
  }
  return true;
}

// A file that was not there: no link and no file that somebody else has put in its place is followed or written to.
Fd create_new(const std::string& path) {
  constexpr int kNew = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  Fd file(open(path.c_str(), kNew, 0644));
  if (!file && errno == EEXIST && unlink(path.c_str()) == 0) file = Fd(open(path.c_str(), kNew, 0644));
  return file;
}

std::string no_good(const std::string& path, const char* why) {
  return path + " is ignored: " + why + ". It is written anew; remove it if this comes again.";
}

}  // namespace

std::string CalibrationCache::path() const {
  return folder + "/constants-" + hex(Fingerprint().add(key).value()) + ".txt";
}

std::optional<Constants> CalibrationCache::load(std::string& complaint) const {
  if (folder.empty()) return {};
  // O_NONBLOCK: nobody need write to a FIFO of that name.
  const Fd file(open(path().c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file && errno != ELOOP) return {};
  struct stat info{};
  if (!file || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size > kMostFileBytes) {
    complaint = no_good(path(), "it is a link, no regular file, or far too large");
    return {};
  }
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    complaint = no_good(path(), "it belongs to another user");
    return {};
  }
  const std::string text = contents(file, static_cast<size_t>(info.st_size));
  if (text.rfind(std::string(kTitle) + "\n", 0) != 0) {
    complaint = no_good(path(), "it is not a file of this version of dcoll");
    return {};
  }
  if (text.find("\nfor " + key + "\n") == std::string::npos) {
    complaint = no_good(path(), "it is for other machines");
    return {};
  }
  Constants constants;
  bool whole_lines = true;
  for (const auto& [name, value] : fields_of(constants)) {
    const size_t found = text.find("\n" + name + " ");
    whole_lines = whole_lines && found != std::string::npos;
    if (!whole_lines) break;
    const size_t begin = found + name.size() + 2;
    const auto number = number_from(std::string_view(text).substr(begin, text.find('\n', begin) - begin));
    whole_lines = number.has_value() && is_plausible(*number);
    *value = number.value_or(0);
  }
  // The file must be what body() writes of these numbers, to the last byte.
  const std::string expected = body(key, constants);
  if (!whole_lines || text != expected + fingerprint_line(expected)) {
    complaint = no_good(path(), "it is damaged");
    return {};
  }
  return constants;
}

bool CalibrationCache::store(const Constants& constants, std::string& complaint) const {
  if (folder.empty()) return false;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string whole = body(key, constants), draft = path() + "." + std::to_string(getpid());
  const Fd file = create_new(draft);
  if (file && write_all(file, whole + fingerprint_line(whole))) {
    std::filesystem::rename(draft, path(), error);
    if (!error) return true;
  }
  if (file) std::filesystem::remove(draft, error);
  complaint = "measured constants cannot be kept in " + folder +
              ", so every job measures them anew. Set DCOLL_CACHE_DIR to a folder that can be written.";
  return false;
}

std::string cache_folder(const std::string& setting) {
  if (!setting.empty()) return setting;
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/') {
    return std::string(cache) + "/dcoll";
  }
  const char* home = std::getenv("HOME");
  return home != nullptr && *home == '/' ? std::string(home) + "/.cache/dcoll" : "";
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

}  // namespace dcoll
