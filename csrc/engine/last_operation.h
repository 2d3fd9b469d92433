// What a rank did last in a communicator, for reports of stalls.
#pragma once

#include <string>
#include <string_view>

#include "engine/operation.h"

namespace dcoll {

// Noted with every operation, those of less than a microsecond too: hence a few plain stores to memory that no other
// rank looks at, and nothing that allocates once a name as long was seen.
class LastOperation {
 public:
  void note(const ReduceCall& call) { note(Kind::kAllReduce, call, 1, 0, {}); }
  template <typename Call>  // Request or PullCall
  void note(const Call& call) {
    note(call.kind, call, call.row_elems, call.root, call.group);
  }

  bool any() const { return any_; }
  // What describes it.
  const Request& request() const { return last_; }

 private:
  template <typename Call>
  void note(Kind kind, const Call& call, size_t row_elems, int root, std::string_view group) {
    any_ = true;
    last_.kind = kind;
    last_.count = call.count;
    last_.row_elems = row_elems;
    last_.dtype = call.dtype;
    last_.op = call.op;
    last_.root = root;
    if (!last_.name.empty() || !call.name.empty()) replace(last_.name, call.name);
    if (!last_.group.empty() || !group.empty()) replace(last_.group, group);
  }
  static void replace(std::string& text, std::string_view by) noexcept;

  bool any_ = false;
  Request last_;
};

}  // namespace dcoll
