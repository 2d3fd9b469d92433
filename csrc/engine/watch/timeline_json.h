// Records of the timeline as events of the Chrome trace format ("Trace Event Format", JSON array form).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/core/timeline_record.h"

namespace dcoll {

// Decides which track a record goes to, and writes it. Spans of one track never overlap but where one lies in the
// other: operations of one name that were in flight together get a track each.
class TimelineJson {
 public:
  static constexpr const char* kTail = "\n]\n";

  TimelineJson(int rank, int node, int64_t shift_ns) : rank_(rank), node_(node), shift_ns_(shift_ns) {}

  std::string head(int64_t begin_ns) const;  // what the array begins with
  void append(std::string& text, const TimelineRecord& record);
  void append_end(std::string& text, int64_t at_ns, uint64_t dropped);

 private:
  struct Lane {
    int id;
    int64_t free_from_ns;
  };
  int lane(std::string& text, const std::string& track, int64_t begin_ns, int64_t end_ns);
  void append_operation(std::string& text, const TimelineRecord& record);
  void append_span(std::string& text, const TimelineRecord& record);
  void append_mark(std::string& text, const TimelineRecord& record) const;
  std::string at(int64_t ns) const;

  static constexpr size_t kMostTracks = 2000;  // names beyond them share one per kind of operation

  const int rank_;
  const int node_;
  const int64_t shift_ns_;
  std::map<std::string, std::vector<Lane>> tracks_;
  int next_id_ = 1;
};

}  // namespace dcoll
