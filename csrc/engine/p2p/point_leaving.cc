// What a rank that leaves tells those that wait for it, and what it ends there.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/ranks_text.h"
#include "engine/p2p/point_to_point.h"

namespace dcoll {
namespace {

constexpr size_t kMostReasonBytes = 500;

}  // namespace

void PointToPoint::ask_to_be_told(int rank) {
  if (rank == ranks_.transport->rank()) return;
  if (Peer& to = peer(rank); !std::exchange(to.asked, true)) tell(to, {.what = What::kWaits}, nullptr, 0);
}

void PointToPoint::leave(const std::string& why) {
  if (leaves_) return;
  leaves_ = why.substr(0, whole_characters(why, std::min(kMostReasonBytes, most_eager_)));
  meet(kAnySource);
  for (Peer* known : known_) {
    if (known->asks) tell_of_leaving(*known);
  }
}

// Behind all that this rank has sent there. What it receives already goes on.
void PointToPoint::tell_of_leaving(Peer& to) {
  for (auto& [key, bin] : bins_) {
    std::erase_if(bin.arrived, [&](const Arrived& one) {
      if (one.source != to.rank || one.head.what != What::kOffer) return false;
      const PointMessage answer{.what = What::kLeaves, .id = one.head.id, .key = one.head.key, .bytes = one.head.bytes};
      tell(to, answer, leaves_->data(), leaves_->size());
      return true;
    });
  }
  tell(to, {.what = What::kLeaves}, leaves_->data(), leaves_->size());
}

void PointToPoint::take_leaving(Peer& from, std::string why) {
  if (!from.left) ++left_;
  from.left = std::move(why);
  for (auto& [key, bin] : bins_) {
    for (auto receive = bin.posted.begin(); receive != bin.posted.end();) {
      const auto now = receive++;
      if (left_waiting_by(now->peer) == nullptr) continue;
      finish(bin.posted, now, error_of_leaving(now->operation->request, name(from.rank), *from.left));
    }
  }
}

// Of those that a receive from `rank` waits for, the last, if all have left; else null.
const PointToPoint::Peer* PointToPoint::left_waiting_by(int rank) const {
  if (left_ == 0) return nullptr;
  const Peer* last = nullptr;
  for (const Peer* known : known_) {
    if (known->rank == ranks_.transport->rank() || (rank != kAnySource && rank != known->rank)) continue;
    if (!known->left) return nullptr;
    last = known;
  }
  return last;
}

std::exception_ptr error_of_leaving(const Request& request, const std::string& rank, const std::string& why) {
  const std::string reason =
      why.empty() ? " (or the program there ended)" : " after a call there was refused (" + why + ")";
  return std::make_exception_ptr(MismatchError(request.describe() + ": " + rank + " called shutdown" + reason +
                                               ", and " + (request.kind == Kind::kSend ? "receives" : "sends") +
                                               " nothing any more. Other messages are not affected."));
}

}  // namespace dcoll
