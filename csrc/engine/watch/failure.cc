#include "engine/watch/failure.h"

#include <new>

#include "base/error.h"

namespace dcoll {
namespace {

constexpr char kStall = 'S';

}  // namespace

std::string failure_text(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    return "out of memory";
  } catch (const std::exception& e) {
    return e.what();
  }
}

std::string encode_failure(std::exception_ptr error, int rank) {
  const std::string text = "rank " + std::to_string(rank) + ": " + failure_text(error);
  try {
    std::rethrow_exception(error);
  } catch (const StallError& e) {
    return kStall + std::string(e.what());  // the same on every rank: it says of each what it did
  } catch (const TimeoutError&) {
    return "T" + text;
  } catch (const TransportError&) {
    return "X" + text;
  } catch (const std::exception&) {
    return "P" + text;
  }
}

std::exception_ptr decode_failure(const std::string& notice) {
  const std::string text = notice.substr(1);
  switch (notice.front()) {
    case kStall:
      return std::make_exception_ptr(StallError(text));
    case 'T':
      return std::make_exception_ptr(TimeoutError(text));
    case 'X':
      return std::make_exception_ptr(TransportError(text));
    default:  // not an enum: whatever else a peer sends is a peer's failure
      return std::make_exception_ptr(PeerError(text));
  }
}

}  // namespace dcoll
