// What a collective between nodes lets ride on its handshake (agreement.h): the whole of a small all-reduce, which is
// finished with the handshake then, and the row counts of an all-gather, which need no exchange of their own.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "engine/board/agreement.h"
#include "engine/collective/choose_path.h"
#include "engine/core/operation.h"

namespace dcoll {

class Rider {
 public:
  // `message_bytes`: as long as messages may be, the same on every rank.
  Rider(const Call& call, Path path, int size, size_t message_bytes);

  // Empty where nothing rides.
  std::span<const std::byte> operand() const { return operand_; }
  // All ranks agreed: takes what rode along.
  void arrive(const Dissemination& everybody, Operation& operation) const;

 private:
  const int size_;
  std::span<const std::byte> operand_;
  std::vector<std::byte> scaled_;  // the operand times prescale
  int64_t rows_ = 0;
};

}  // namespace dcoll
