#include "engine/watch/last_operation.h"

#include <new>

namespace dcoll {

// Not inline: most calls have no name. Without memory the report does without the name.
void LastOperation::replace(std::string& text, std::string_view by) noexcept {
  try {
    text = by;
  } catch (const std::bad_alloc&) {
    text.clear();
  }
}

}  // namespace dcoll
