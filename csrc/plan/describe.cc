#include "plan/describe.h"

#include "base/types.h"

namespace dcoll::plan {
namespace {

std::string numbers(uint32_t chunk, uint32_t count) {
  return count == 1 ? std::to_string(chunk) : std::to_string(chunk) + " and " + std::to_string(count - 1) + " more";
}
std::string place(BufferId buffer, uint32_t chunk, uint32_t count) {
  return std::string(buffer_name(buffer)) + "[" + numbers(chunk, count) + "]";
}

}  // namespace

std::string_view step_op_name(StepOp op) {
  static constexpr auto kNames = std::to_array<std::string_view>(
      {"send", "recv", "recv_send", "recv_reduce", "recv_reduce_send", "copy", "reduce"});
  static_assert(static_cast<size_t>(StepOp::kReduce) + 1 == kNames.size());
  return name_in(kNames, op);
}

std::string_view buffer_name(BufferId buffer) {
  static constexpr auto kNames = std::to_array<std::string_view>({"none", "in", "out", "scratch", "work"});
  static_assert(static_cast<size_t>(BufferId::kWork) + 1 == kNames.size());
  return name_in(kNames, buffer);
}

std::string describe(const Step& step) {
  const std::string src = place(step.src, step.src_chunk, step.count), dst = place(step.dst, step.chunk, step.count);
  const std::string from = "message from " + std::to_string(step.peer);
  const std::string onward = "send to " + std::to_string(destination(step));
  const std::string store = step.dst == BufferId::kNone ? "" : dst + " = ";
  const std::string sum = step.message_first ? from + " op " + src : src + " op " + from;
  const std::string done = step.finalize ? ", finalize" : "";
  switch (step.op) {
    case StepOp::kSend:
      return "send " + src + " to " + std::to_string(step.peer);
    case StepOp::kRecv:
      return store + from;
    case StepOp::kRecvSend:
      return (store.empty() ? "chunk " + numbers(step.chunk, step.count) + " = " : store) + from + "; " + onward;
    case StepOp::kRecvReduce:
      return store + sum + done;
    case StepOp::kRecvReduceSend:
      return store + sum + done + "; " + onward;
    case StepOp::kCopy:
      return store + src + done;
    case StepOp::kReduce:
      return store + dst + " op " + src + done;
  }
  return "";  // unreachable: every enumerator is handled above
}

std::string in_words(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, "%.4g %s", value, kUnits[unit]);
  return text;
}

}  // namespace dcoll::plan
