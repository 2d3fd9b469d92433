// Measuring the constants of the cost model between ranks as threads, and keeping them in a file.
#include "engine/links/calibration.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <locale>
#include <thread>

#include "engine/links/calibration_cache.h"
#include "plan/algorithms.h"
#include "support/check.h"
#include "support/threads.h"
#include "transport/mapped/local.h"

using namespace dcoll;
using dcoll::test::on_threads;

namespace {

constexpr size_t kSlice = 16 << 10;

// Every rank's constants after all have measured together.
std::vector<plan::Constants> measured(int n, uint32_t ranks_per_node) {
  MappedOptions options;
  options.arena_bytes = size_t{16} << 20;
  options.slot_bytes = kSlice;
  std::vector<Endpoint> endpoints = connect_local(n, options);
  const plan::Topology topology = plan::Topology::blocks(static_cast<uint32_t>(n), ranks_per_node);
  const plan::Algorithm* binomial = plan::find_algorithm(plan::Collective::kBroadcast, "binomial");
  std::vector<plan::Constants> results(static_cast<size_t>(n));
  on_threads(n, [&](int rank) {
    Transport& transport = *endpoints[rank].transport;
    const auto broadcast = std::make_shared<const plan::Schedule>(
        binomial->build(static_cast<uint32_t>(n), static_cast<uint32_t>(rank), 0));
    Task task = measure_constants({&transport, &topology, kSlice, broadcast}, results[rank]);
    bool moved = false;
    while (!task.advance(moved)) {
      transport.progress();
      std::this_thread::yield();
    }
  });
  return results;
}

std::filesystem::path folder() {
  return std::filesystem::temp_directory_path() / ("dcoll-calibration-test-" + std::to_string(getpid()));
}

std::string contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST(all_ranks_end_with_the_same_numbers) {
  for (const auto& [n, per_node] : std::vector<std::pair<int, uint32_t>>{{2, 1}, {3, 1}, {4, 2}, {5, 2}}) {
    const std::vector<plan::Constants> all = measured(n, per_node);
    for (const plan::Constants& one : all) CHECK(one == all[0]);
    CHECK(all[0].network.beta_us_per_byte > 0 && all[0].network.alpha_us >= 0 && all[0].network.overhead_us > 0);
    CHECK(all[0].network.transit() >= 0 && all[0].gamma_us_per_byte > 0);
    CHECK(all[0].network != plan::Constants{}.network);
    CHECK((all[0].memory != plan::Constants{}.memory) == (per_node > 1));
  }
}

TEST(what_is_kept_is_read_back_exactly) {
  const CalibrationCache cache{folder(), "two hosts"};
  std::string complaint;
  CHECK(!cache.load(complaint).has_value() && complaint.empty());
  plan::Constants constants;
  constants.network = {1.0 / 3, 0.1, 8e-5 / 7, 0.25, 131072, 1e-300};
  constants.gamma_us_per_byte = 0.7;
  CHECK(cache.store(constants, complaint));
  CHECK(cache.load(complaint) == constants);
  CHECK(complaint.empty());
  CHECK(!CalibrationCache({folder(), "other hosts"}).load(complaint).has_value());
  std::filesystem::remove_all(folder());
}

// As in Germany: 1.234,5. A program may choose that for all its streams, and for what C prints where it is installed.
struct Commas : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(what_is_kept_is_the_same_in_every_locale) {
  const CalibrationCache cache{folder(), "two hosts"};
  std::string complaint;
  plan::Constants constants;
  constants.network = {1234.5, 0.1, 8e-5 / 7, 0.25, 131072, 1e-300};
  CHECK(cache.store(constants, complaint));
  const std::string written = contents(cache.path());
  const std::locale before = std::locale::global(std::locale(std::locale(), new Commas));
  const bool reads = cache.load(complaint) == constants;
  const bool writes = cache.store(constants, complaint);
  std::locale::global(before);
  CHECK(reads && writes);
  CHECK_EQ(contents(cache.path()), written);
  std::filesystem::remove_all(folder());
}

TEST(a_damaged_or_foreign_file_is_ignored_with_a_reason) {
  const CalibrationCache cache{folder(), "two hosts"};
  std::string complaint;
  CHECK(cache.store({}, complaint));
  const std::string good = contents(cache.path());
  auto complaint_about = [&](const std::string& text) {
    std::ofstream(cache.path()) << text;
    std::string why;
    return cache.load(why).has_value() ? std::string("accepted") : why;
  };
  CHECK_EQ(complaint_about(good), std::string("accepted"));
  for (size_t length : {size_t{0}, good.size() / 2, good.size() - 1}) {
    CHECK(complaint_about(good.substr(0, length)).find("is ignored") != std::string::npos);
  }
  std::string changed = good;
  changed[changed.find("fan_in ") + 9] ^= 1;
  CHECK(complaint_about(changed).find("damaged") != std::string::npos);
  CHECK(complaint_about("something else\n").find("not a file of this version") != std::string::npos);
  std::string foreign = good;
  foreign.replace(foreign.find("two hosts"), 9, "six hosts");
  CHECK(complaint_about(foreign).find("for other machines") != std::string::npos);
  std::filesystem::remove_all(folder());
}

TEST(only_a_plausible_regular_file_of_this_user_is_read) {
  const CalibrationCache cache{folder(), "two hosts"};
  const std::filesystem::path path = cache.path(), elsewhere = folder() / "elsewhere";
  std::string complaint;
  plan::Constants wild;
  wild.network.alpha_us = 1e300;
  CHECK(cache.store(wild, complaint));
  CHECK(!cache.load(complaint).has_value() && complaint.find("damaged") != std::string::npos);
  wild.network.alpha_us = -30;
  CHECK(cache.store(wild, complaint));
  CHECK(!cache.load(complaint).has_value());
  CHECK(cache.store({}, complaint));

  std::filesystem::rename(path, elsewhere);
  std::filesystem::create_symlink(elsewhere, path);
  CHECK(!cache.load(complaint).has_value() && complaint.find("no regular file") != std::string::npos);
  std::filesystem::remove(path);
  CHECK_EQ(mkfifo(path.c_str(), 0600), 0);  // which would be waited for
  complaint.clear();
  CHECK(!cache.load(complaint).has_value() && complaint.find("no regular file") != std::string::npos);
  std::filesystem::remove(path);
  if (geteuid() == 0) {
    std::filesystem::rename(elsewhere, path);
    CHECK_EQ(chown(path.c_str(), 12345, 12345), 0);
    CHECK(!cache.load(complaint).has_value() && complaint.find("another user") != std::string::npos);
  }
  std::filesystem::remove_all(folder());
}

// A link that stands where the draft is written must not be followed.
TEST(what_is_kept_is_written_to_a_new_file) {
  const CalibrationCache cache{folder(), "two hosts"};
  const std::filesystem::path precious = folder() / "precious", draft = cache.path() + "." + std::to_string(getpid());
  std::filesystem::create_directories(folder());
  std::ofstream(precious) << "mine";
  std::filesystem::create_symlink(precious, draft);
  std::string complaint;
  CHECK(cache.store({}, complaint));
  CHECK_EQ(contents(precious), std::string("mine"));
  CHECK(cache.load(complaint).has_value());
  std::filesystem::remove_all(folder());
}

TEST(a_folder_that_cannot_be_written_is_said) {
  std::ofstream(folder().string()) << "a file, not a folder";
  std::string complaint;
  CHECK(!CalibrationCache({folder().string(), "x"}).store({}, complaint));
  CHECK(complaint.find("DCOLL_CACHE_DIR") != std::string::npos);
  std::filesystem::remove(folder());
}

TEST_MAIN
