// Measured constants kept between jobs: one small text file per kind of job (who sits where, MPI library, CPU, version,
// slices), in DCOLL_CACHE_DIR, else $XDG_CACHE_HOME/dcoll, else ~/.cache/dcoll. Written whole under another name and
// renamed, so that a reader sees an old file or a new one, never half of one.
#pragma once

#include <optional>
#include <string>

#include "plan/topology.h"

namespace dcoll {

struct CalibrationCache {
  std::string folder;  // empty: nothing is kept
  std::string key;     // what the numbers depend on, in words; empty: nothing is measured

  std::string path() const;
  // Nothing where there is no file; where there is one that is not ours for this key, `complaint` says so.
  std::optional<plan::Constants> load(std::string& complaint) const;
  // False with a complaint where it cannot be written; the job goes on without.
  bool store(const plan::Constants& constants, std::string& complaint) const;
};

// DCOLL_CACHE_DIR as set, or where caches belong; empty when there is no home.
std::string cache_folder(const std::string& setting);
// "AMD EPYC 9R14", from /proc/cpuinfo
std::string cpu_model();

}  // namespace dcoll
