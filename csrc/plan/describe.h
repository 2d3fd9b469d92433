// Schedules in words, for messages and for people: "out[3] = in[3] op message from 2, finalize; send to 0".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "plan/schedule.h"

namespace dcoll::plan {

std::string_view step_op_name(StepOp op);       // "recv_reduce_send"
std::string_view buffer_name(BufferId buffer);  // "none", "in", "out", "scratch", "work"
std::string describe(const Step& step);
std::string in_words(uint64_t bytes);  // "16 MiB"

}  // namespace dcoll::plan
