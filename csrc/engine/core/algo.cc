#include "engine/core/algo.h"

#include <vector>

#include "base/error.h"

namespace dcoll {
namespace {

const std::vector<const plan::Algorithm*>& schedules() {
  static const std::vector<const plan::Algorithm*> all = [] {
    std::vector<const plan::Algorithm*> found;
    for (const plan::Algorithm& algorithm : plan::algorithms()) {
      if (algorithm.collective == plan::Collective::kAllReduce) found.push_back(&algorithm);
    }
    return found;
  }();
  return all;
}

}  // namespace

Algo::Algo(std::string_view text) {
  if (text.empty()) return;
  if (text == "auto") {
    id_ = kAuto;
  } else if (text == "hierarchical") {
    id_ = kHierarchical;
  } else {
    for (size_t i = 0; i < schedules().size(); ++i) {
      if (schedules()[i]->name == text) id_ = static_cast<uint8_t>(kFirstNamed + i);
    }
    if (text == "direct") id_ |= kDirect;
  }
  if (id_ != 0) return;
  throw ArgumentError("allreduce: no algorithm '" + std::string(text) + "'; allowed are auto, " +
                      plan::algorithm_names(plan::Collective::kAllReduce) + ", hierarchical.");
}

Algo Algo::of_id(uint8_t id) {
  Algo algo;
  algo.id_ = id;
  if (id < kFirstNamed) return algo;
  return algo.number() < schedules().size() ? Algo(schedules()[algo.number()]->name) : Algo();
}

const plan::Algorithm* Algo::named() const { return id_ < kFirstNamed ? nullptr : schedules()[number()]; }

std::string_view Algo::name() const {
  if (id_ >= kFirstNamed) return named()->name;
  return id_ == kAuto ? "auto" : id_ == kHierarchical ? "hierarchical" : "";
}

}  // namespace dcoll
