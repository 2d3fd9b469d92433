// The report of a stall: what ranks ask each other about an operation that does not go on, what they answer, and the
// one line that is made of it; and who is to blame for it. Who asks whom and when is diagnosis.h.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "transport/transport.h"

namespace dcoll {

// "What do you do while I wait for this?"
struct Question {
  uint64_t id = 0;         // of the asker's questions
  uint64_t set = 0;        // which communicator
  uint64_t operation = 0;  // fingerprint; of one by name that is not ordered yet: kind and name alone
  uint64_t number = 0;     // how many operations had begun there, this one included; 0 while it is not ordered yet
  bool by_name = false;
};

struct Answer {
  enum class State : char {
    kWaits = 'w',      // in this operation as well
    kPassed = 'p',     // has finished it, or joined
    kElsewhere = 'e',  // waits in another operation
    kBusy = 'b',       // in none: in the program
  };
  uint64_t question = 0;
  State state = State::kBusy;
  bool tells = false;       // it has made the report, or makes it
  std::string operation{};  // kElsewhere: which, and how long. Otherwise what it finished last
  // Where the program is, innermost first; then the user's own line. Empty: `silence` says why.
  std::vector<std::string> stack;
  std::string place;
  std::string silence;
};

std::string encode(const Question& question);
std::optional<Question> decode_question(std::string_view note);
std::string encode(const Answer& answer);
std::optional<Answer> decode_answer(std::string_view note);

// A text from the program's thread: its place, then its frames, one per line.
void take_stack(Answer& answer, std::string_view lines);

// All there is to say. `answers`: by rank, this one's included; who is in `silent` did not answer in time. `before`:
// what all ranks took part in before; empty: nothing.
std::string stall_report(const std::string& operation, double seconds, const std::map<int, Answer>& answers,
                         const std::vector<int>& silent, const std::string& before);

// A rank waits for its neighbours, which may themselves only wait for another. Of all ranks that rank `own` or anybody
// else waits for, those that did not say themselves, since `since`, that they wait. When everybody said so (a link
// between two of them is down, not a rank), those this rank waits for. In ascending order, each once.
std::vector<int> culprits(int own, std::vector<int> waits_for, const std::vector<StallNote>& notes,
                          Clock::time_point since);

// At most `most` bytes, in whole characters, ending in "..." where something was cut off.
std::string shortened(const std::string& text, size_t most);

}  // namespace dcoll
