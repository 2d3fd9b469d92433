#include "engine/watch/timeline_json.h"

#include <unistd.h>

#include <array>
#include <cstdio>

#include "engine/core/operation.h"

namespace dcoll {
namespace {

// JSON's escapes; what is no UTF-8, as a name that was cut off in a letter, becomes '?'.
std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const size_t length = byte < 0x80 ? 1 : byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc2 ? 2 : 0;
    bool whole = length > 0 && i + length <= text.size() && byte < 0xf5;
    for (size_t k = 1; whole && k < length; ++k) whole = (static_cast<unsigned char>(text[i + k]) & 0xc0) == 0x80;
    if (!whole) {
      out += '?';
      i += 1;
      continue;
    }
    if (byte == '"' || byte == '\\') {
      out += '\\';
      out += text[i];
    } else if (byte < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", byte);
      out += escape;
    } else {
      out += text.substr(i, length);
    }
    i += length;
  }
  return out + '"';
}

std::string_view phase_name(Phase phase) {
  static constexpr auto kNames = std::to_array<std::string_view>({"queue", "negotiation", "pack", "move"});
  static_assert(static_cast<size_t>(Phase::kMove) + 1 == kNames.size());
  return name_in(kNames, phase);
}

// Microseconds, to the nanosecond.
std::string microseconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%lld.%03d", static_cast<long long>(ns / 1000), static_cast<int>(ns % 1000));
  return text;
}

// What an operation without a name of its own is called; Horovod's names for those count upwards.
std::string track_of(const TimelineRecord& record) {
  std::string track = record.name;
  if (const size_t at = track.find(".noname."); at != std::string::npos) track.resize(at);
  if (track.empty()) track = kind_name(record.kind);
  if (record.communicator > 0) track += " (process set " + std::to_string(record.communicator) + ")";
  return track;
}

}  // namespace

// Never negative: the clock may run behind another node's by more than it has run.
std::string TimelineJson::at(int64_t ns) const { return microseconds(std::max<int64_t>(ns + shift_ns_, 0)); }

std::string TimelineJson::head(int64_t begin_ns) const {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  const std::string process = "\"pid\":" + std::to_string(rank_);
  return "{\"ph\":\"M\",\"name\":\"process_name\"," + process +
         ",\"args\":{\"name\":" + json_string("rank " + std::to_string(rank_) + " (" + host.data() + ")") + "}},\n" +
         "{\"ph\":\"M\",\"name\":\"process_sort_index\"," + process +
         ",\"args\":{\"sort_index\":" + std::to_string(rank_) + "}},\n" +
         "{\"ph\":\"i\",\"s\":\"p\",\"name\":\"timeline begins\"," + process + ",\"tid\":0,\"ts\":" + at(begin_ns) +
         ",\"args\":{\"node\":" + std::to_string(node_) + "}}";
}

void TimelineJson::append_end(std::string& text, int64_t at_ns, uint64_t dropped) {
  text += ",\n{\"ph\":\"i\",\"s\":\"p\",\"name\":\"timeline ends\",\"pid\":" + std::to_string(rank_) +
          ",\"tid\":0,\"ts\":" + at(at_ns) + ",\"args\":{\"dropped\":" + std::to_string(dropped) + "}}";
}

void TimelineJson::append(std::string& text, const TimelineRecord& record) {
  switch (record.what) {
    case TimelineRecord::What::kOperation:
      return append_operation(text, record);
    case TimelineRecord::What::kSpan:
      return append_span(text, record);
    case TimelineRecord::What::kMark:
      return append_mark(text, record);
  }
}

// The lane of a track that is free from `begin_ns` on, and is taken until `end_ns`.
int TimelineJson::lane(std::string& text, const std::string& track, int64_t begin_ns, int64_t end_ns) {
  std::vector<Lane>& lanes = tracks_[track];
  for (Lane& one : lanes) {
    if (one.free_from_ns > begin_ns) continue;
    one.free_from_ns = end_ns;
    return one.id;
  }
  lanes.push_back({next_id_++, end_ns});
  text += ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":" + std::to_string(rank_) +
          ",\"tid\":" + std::to_string(lanes.back().id) + ",\"args\":{\"name\":" + json_string(track) + "}}";
  return lanes.back().id;
}

void TimelineJson::append_operation(std::string& text, const TimelineRecord& record) {
  const Phases& phases = record.phases;
  if (phases.count == 0) return;
  std::string track = track_of(record);
  if (tracks_.size() >= kMostTracks && !tracks_.contains(track)) track = kind_name(record.kind);
  const int id = lane(text, track, phases.begin_ns[0], record.end_ns);
  const std::string where = ",\"pid\":" + std::to_string(rank_) + ",\"tid\":" + std::to_string(id);

  std::string details = "\"bytes\":" + std::to_string(record.bytes);
  if (!is_meeting(record.kind)) details += ",\"dtype\":" + json_string(dtype_name(record.dtype));
  if (reduces(record.kind)) details += ",\"op\":" + json_string(op_name(record.op));
  text += ",\n{\"ph\":\"X\",\"cat\":\"operation\",\"name\":" + json_string(kind_name(record.kind)) + where +
          ",\"ts\":" + at(phases.begin_ns[0]) + ",\"dur\":" + microseconds(record.end_ns - phases.begin_ns[0]) +
          ",\"args\":{\"name\":" + json_string(record.name) + "," + details +
          ",\"communicator\":" + std::to_string(record.communicator) + ",\"number\":" + std::to_string(phases.number) +
          (record.failed ? ",\"failed\":true" : "") + "}}";

  for (int i = 0; i < phases.count; ++i) {
    const int64_t begin = phases.begin_ns[i];
    const int64_t end = i + 1 < phases.count ? phases.begin_ns[i + 1] : record.end_ns;
    const bool moves = phases.phase[i] == Phase::kMove;
    const std::string_view name =
        moves && phases.algorithm[0] != '\0' ? std::string_view(phases.algorithm) : phase_name(phases.phase[i]);
    text += ",\n{\"ph\":\"X\",\"cat\":" + json_string(moves ? "algorithm" : phase_name(phases.phase[i])) +
            ",\"name\":" + json_string(name) + where + ",\"ts\":" + at(begin) +
            ",\"dur\":" + microseconds(end - begin) + (moves ? ",\"args\":{" + details + "}" : "") + "}";
  }
}

void TimelineJson::append_span(std::string& text, const TimelineRecord& record) {
  const int64_t begin = record.phases.begin_ns[0];
  const int id = lane(text, record.track, begin, record.end_ns);
  text += ",\n{\"ph\":\"X\",\"cat\":\"span\",\"name\":" + json_string(record.name) +
          ",\"pid\":" + std::to_string(rank_) + ",\"tid\":" + std::to_string(id) + ",\"ts\":" + at(begin) +
          ",\"dur\":" + microseconds(record.end_ns - begin) + ",\"args\":{\"bytes\":" + std::to_string(record.bytes) +
          "}}";
}

void TimelineJson::append_mark(std::string& text, const TimelineRecord& record) const {
  text += ",\n{\"ph\":\"i\",\"s\":\"p\",\"cat\":\"mark\",\"name\":" + json_string(record.name) +
          ",\"pid\":" + std::to_string(rank_) + ",\"tid\":0,\"ts\":" + at(record.end_ns) + "}";
}

}  // namespace dcoll
