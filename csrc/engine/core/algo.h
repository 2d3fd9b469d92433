// Which algorithm an all-reduce is asked to take. The text of algo= or DCOLL_ALGO is read once, where it comes in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "plan/algorithms.h"

namespace dcoll {

class Algo {
 public:
  Algo() = default;  // as configured
  // "": as configured. Throws ArgumentError, which lists the names, for what is none of them.
  Algo(std::string_view text);                                     // NOLINT: a name is an algorithm
  Algo(const char* text) : Algo(std::string_view(text)) {}         // NOLINT
  Algo(const std::string& text) : Algo(std::string_view(text)) {}  // NOLINT
  // id() of another rank's; as configured for what cannot be one.
  static Algo of_id(uint8_t id);

  bool as_configured() const { return id_ == 0; }
  Algo or_else(Algo configured) const { return as_configured() ? configured : *this; }
  // The engine chooses.
  bool is_auto() const { return id_ == kAuto; }
  // On two levels: the engine chooses, or was told so.
  bool takes_levels() const { return id_ == kAuto || id_ == kHierarchical; }
  // Where memory is shared: what reads the peers' memory rather than messages.
  bool takes_direct() const { return takes_levels() || (id_ & kDirect) != 0; }
  // Every rank reduces all operands, which it was sent.
  bool is_one_to_all() const { return is_auto() || (id_ & kDirect) != 0; }
  // A schedule by name; null: the cost model chooses.
  const plan::Algorithm* named() const;

  std::string_view name() const;
  // The same on every rank of this version.
  uint8_t id() const { return id_; }
  bool operator==(const Algo&) const = default;

 private:
  static constexpr uint8_t kAuto = 1, kHierarchical = 2, kFirstNamed = 3;
  static constexpr uint8_t kDirect = 0x80;  // beside the number of the schedule of that name
  size_t number() const { return static_cast<size_t>(id_ & ~kDirect) - kFirstNamed; }  // of a schedule
  uint8_t id_ = 0;  // one byte, for it is asked before every call of a few bytes
};

}  // namespace dcoll
