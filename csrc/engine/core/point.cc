#include "engine/core/point.h"

#include "base/error.h"

namespace dcoll {

Request message(Kind kind, const void* memory, size_t bytes, int peer, uint64_t key) {
  Request request{.kind = kind, .count = bytes, .dtype = DType::kUInt8, .root = peer, .tag = key};
  if (kind == Kind::kSend) {
    request.in = memory;
  } else {
    request.out = const_cast<void*>(memory);
  }
  return request;
}

void check_peer(Kind kind, int peer, int size) {
  const int least = kind == Kind::kReceive ? kAnySource : 0;
  if (peer >= least && peer < size) return;
  throw ArgumentError(std::string(kind_name(kind)) + ": rank " + std::to_string(peer) +
                      " does not exist; allowed are " + std::to_string(least) + " to " + std::to_string(size - 1) +
                      (least < 0 ? " (-1: any rank)." : "."));
}

std::string describe_point(Kind kind, size_t bytes, int peer, uint64_t key) {
  const std::string who = peer == kAnySource ? "any rank" : "rank " + std::to_string(peer);
  const auto tag = static_cast<int32_t>(static_cast<uint32_t>(key));
  const bool own = static_cast<PointSpace>(key >> 32) != PointSpace::kUser;
  return std::string(kind_name(kind)) + " (" + std::to_string(bytes) + " bytes " +
         (kind == Kind::kSend ? "to " : "from ") + who +
         (own ? ", to make a group)" : ", tag " + std::to_string(tag) + ")");
}

}  // namespace dcoll
