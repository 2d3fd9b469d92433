#include "engine/core/point.h"

namespace dcoll {

std::string describe_point(Kind kind, size_t bytes, int peer, uint64_t key) {
  const std::string who = peer == kAnySource ? "any rank" : "rank " + std::to_string(peer);
  const auto tag = static_cast<int32_t>(static_cast<uint32_t>(key));
  const bool own = static_cast<PointSpace>(key >> 32) != PointSpace::kUser;
  return std::string(kind_name(kind)) + " (" + std::to_string(bytes) + " bytes " +
         (kind == Kind::kSend ? "to " : "from ") + who +
         (own ? ", to make a group)" : ", tag " + std::to_string(tag) + ")");
}

}  // namespace dcoll
