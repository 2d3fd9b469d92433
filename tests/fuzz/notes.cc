// What ranks tell each other in words (MPI notices, notes in shared memory): failures, questions and answers about a
// stall. Whatever comes is understood or refused, and what was understood is said and understood again.
#include <string_view>

#include "base/error.h"
#include "engine/watch/failure.h"
#include "engine/watch/stall_report.h"
#include "fuzz.h"
#include "transport/messages.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string note(reinterpret_cast<const char*>(data), size);
  if (!note.empty()) {
    const auto failure = dcoll::decode_failure(note);
    FUZZ_CHECK(dcoll::failure_text(failure) == note.substr(1).c_str());
    FUZZ_CHECK(dcoll::encode_failure(failure, 3).find(note.substr(1).c_str()) != std::string::npos);
  }
  if (const auto question = dcoll::decode_question(note)) {
    const auto again = dcoll::decode_question(dcoll::encode(*question));
    FUZZ_CHECK(again && again->id == question->id && again->operation == question->operation);
    FUZZ_CHECK(again->number == question->number && again->by_name == question->by_name);
  }
  if (const auto answer = dcoll::decode_answer(note)) {
    const auto again = dcoll::decode_answer(dcoll::encode(*answer));
    FUZZ_CHECK(again && again->state == answer->state && again->question == answer->question);
    FUZZ_CHECK(!dcoll::stall_report("allreduce", 60, {{0, *answer}, {2, *answer}}, {1}, "barrier").empty());
    dcoll::Answer stack;
    dcoll::take_stack(stack, note);
  }
  dcoll::HeardNotices heard;
  for (const auto topic : {dcoll::HeardNotices::kStall, dcoll::HeardNotices::kNote, dcoll::HeardNotices::kFailure}) {
    heard.hear(topic, 1, reinterpret_cast<const std::byte*>(data), size);
  }
  FUZZ_CHECK(heard.stalls().at(0).waits_for.size() == size / sizeof(int));
  FUZZ_CHECK(heard.take_notes().at(0).text == note && heard.failure() == note);
  return 0;
}
