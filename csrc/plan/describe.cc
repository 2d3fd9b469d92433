#include "plan/describe.h"

namespace dcoll::plan {
namespace {

std::string place(BufferId buffer, uint32_t chunk) {
  return std::string(buffer_name(buffer)) + "[" + std::to_string(chunk) + "]";
}

}  // namespace

std::string_view step_op_name(StepOp op) {
  switch (op) {
    case StepOp::kSend:
      return "send";
    case StepOp::kRecv:
      return "recv";
    case StepOp::kRecvSend:
      return "recv_send";
    case StepOp::kRecvReduce:
      return "recv_reduce";
    case StepOp::kRecvReduceSend:
      return "recv_reduce_send";
    case StepOp::kCopy:
      return "copy";
    case StepOp::kReduce:
      return "reduce";
  }
  return "";  // unreachable: every enumerator is handled above
}

std::string_view buffer_name(BufferId buffer) {
  switch (buffer) {
    case BufferId::kNone:
      return "none";
    case BufferId::kInput:
      return "in";
    case BufferId::kOutput:
      return "out";
    case BufferId::kScratch:
      return "scratch";
  }
  return "";  // unreachable: every enumerator is handled above
}

std::string describe(const Step& step) {
  const std::string src = place(step.src, step.src_chunk), dst = place(step.dst, step.chunk);
  const std::string from = "message from " + std::to_string(step.peer);
  const std::string onward = "send to " + std::to_string(destination(step));
  const std::string store = step.dst == BufferId::kNone ? "" : dst + " = ";
  const std::string done = step.finalize ? ", finalize" : "";
  switch (step.op) {
    case StepOp::kSend:
      return "send " + src + " to " + std::to_string(step.peer);
    case StepOp::kRecv:
      return store + from;
    case StepOp::kRecvSend:
      return (store.empty() ? "chunk " + std::to_string(step.chunk) + " = " : store) + from + "; " + onward;
    case StepOp::kRecvReduce:
      return store + src + " op " + from + done;
    case StepOp::kRecvReduceSend:
      return store + src + " op " + from + done + "; " + onward;
    case StepOp::kCopy:
      return store + src + done;
    case StepOp::kReduce:
      return store + dst + " op " + src + done;
  }
  return "";  // unreachable: every enumerator is handled above
}

}  // namespace dcoll::plan
