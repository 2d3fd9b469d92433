#include "engine/last_operation.h"

namespace dcoll {

// Not inline: most calls have no name.
void LastOperation::replace(std::string& text, std::string_view by) { text = by; }

}  // namespace dcoll
