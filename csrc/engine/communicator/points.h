// The messages between two ranks that a program sends and receives (p2p/point_to_point.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/communicator/progress.h"
#include "engine/communicator/turns.h"

namespace dcoll {

class Points {
 public:
  Points(const Setup& setup, Progress& progress, Turns& turns) : setup_(setup), progress_(progress), turns_(turns) {}

  // A message to or from another rank, or from kAnySource; a tag is a point_key(). The memory is the caller's, and in
  // use until the operation is done. ArgumentError; MismatchError, and nothing is begun: a small message that was sent
  // to this peer before met a receive of another length.
  // A send or a receive: Request::root is the peer, and memory may be on a device, as with Communicator::submit.
  std::shared_ptr<Operation> start(Request request);
  std::shared_ptr<Operation> isend(const void* data, size_t bytes, int peer, uint64_t tag);
  std::shared_ptr<Operation> irecv(void* data, size_t bytes, int peer, uint64_t tag);
  // For a caller that is about to wait: null if it is done, and `source` who sent it.
  std::shared_ptr<Operation> send_or_submit(const void* data, size_t bytes, int peer, uint64_t tag);
  std::shared_ptr<Operation> recv_or_submit(void* data, size_t bytes, int peer, uint64_t tag, int& source);

 private:
  void enter(Kind kind, int peer);
  std::shared_ptr<Operation> submit(Request request);
  void throw_complaint(int peer) DCOLL_REQUIRES(progress_.drive_mutex);
  bool are_free() DCOLL_REQUIRES(progress_.drive_mutex);
  bool recv_briefly(Request& request, int& source, std::shared_ptr<Operation>& rest);

  const Setup& setup_;
  Progress& progress_;
  Turns& turns_;
};

}  // namespace dcoll
