// What a rank did last in a communicator, for reports of stalls.
#pragma once

#include <new>
#include <string>
#include <string_view>

#include "engine/core/operation.h"

namespace dcoll {

// Noted with every operation, those of less than a microsecond too: hence a few plain stores to memory that no other
// rank looks at, and nothing that allocates once a name as long was seen.
class LastOperation {
 public:
  template <typename Call>  // Call or Request
  void note(const Call& call) {
    any_ = true;
    last_.kind = call.kind;
    last_.count = call.count;
    last_.row_elems = call.row_elems;
    last_.dtype = call.dtype;
    last_.op = call.op;
    last_.root = call.root;
    if (!last_.name.empty() || !call.name.empty()) replace(last_.name, call.name);
    if (!last_.group.empty() || !call.group.empty()) replace(last_.group, call.group);
  }

  bool any() const { return any_; }
  // What describes it.
  const Request& request() const { return last_; }

 private:
  // Not inline: most calls have no name. Without memory the report does without the name.
  [[gnu::noinline]] static void replace(std::string& text, std::string_view by) noexcept {
    try {
      text = by;
    } catch (const std::bad_alloc&) {
      text.clear();
    }
  }

  bool any_ = false;
  Request last_;
};

}  // namespace dcoll
