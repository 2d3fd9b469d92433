#include "engine/communicator/points.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "engine/core/point.h"

namespace dcoll {

// Before anything of a message.
void Points::enter(Kind kind, int peer) {
  setup_.check_process();
  check_peer(kind, peer, setup_.members.size);
  progress_.make_points();
  progress_.free_last_name();
}

std::shared_ptr<Operation> Points::isend(const void* data, size_t bytes, int peer, uint64_t tag) {
  return start({.kind = Kind::kSend, .in = data, .count = bytes, .dtype = DType::kUInt8, .root = peer, .tag = tag});
}

std::shared_ptr<Operation> Points::irecv(void* data, size_t bytes, int peer, uint64_t tag) {
  return start({.kind = Kind::kReceive, .out = data, .count = bytes, .dtype = DType::kUInt8, .root = peer, .tag = tag});
}

std::shared_ptr<Operation> Points::start(Request request) {
  enter(request.kind, request.root);
  const bool is_long = request.kind == Kind::kReceive && request.count > Call::kSmallBytes;
  auto operation = submit(std::move(request));
  if (is_long || operation->staging != nullptr) {
    turns_.hand_over(Turns::Wake::kNow);  // to copy it takes longer than to wake somebody who does
  } else {
    turns_.begin_here();
  }
  return operation;
}

std::shared_ptr<Operation> Points::submit(Request request) {
  if (progress_.drive_mutex.try_lock()) {
    const MutexLock lock(progress_.drive_mutex, std::adopt_lock);
    throw_complaint(request.root);
  }
  auto operation = setup_.operation_of(std::move(request));
  progress_.submit(operation);
  return operation;
}

// Throws what became of an earlier message.
void Points::throw_complaint(int peer) {
  if (progress_.has_failed()) return;
  PointToPoint& points = *progress_.under_way.points;
  const std::string text = progress_.entered([&] { return points.take_complaint(peer); });
  if (!text.empty()) throw MismatchError(text);
}

// Whether a message may go or come at once, behind those that were submitted before.
bool Points::are_free() {
  turns_.go_first();
  progress_.entered([this] {
    progress_.drive_mutex.is_held();
    progress_.take_inbox();
  });
  return progress_.is_sound() && progress_.under_way.messages.empty();
}

std::shared_ptr<Operation> Points::send_or_submit(const void* data, size_t bytes, int peer, uint64_t tag) {
  enter(Kind::kSend, peer);
  {
    const MutexLock lock(progress_.drive_mutex);
    if (are_free()) {
      throw_complaint(peer);
      PointToPoint& points = *progress_.under_way.points;
      if (progress_.entered([&] { return points.send_now(peer, tag, data, bytes); })) return nullptr;
    }
  }
  return submit({.kind = Kind::kSend, .in = data, .count = bytes, .dtype = DType::kUInt8, .root = peer, .tag = tag});
}

std::shared_ptr<Operation> Points::recv_or_submit(void* data, size_t bytes, int peer, uint64_t tag, int& source) {
  enter(Kind::kReceive, peer);
  Request request{
      .kind = Kind::kReceive, .out = data, .count = bytes, .dtype = DType::kUInt8, .root = peer, .tag = tag};
  // Over MPI a look costs so much that the lock is not held for many of them.
  const bool is_cheap = progress_.as_made().board != nullptr || setup_.members.size == 1;
  std::shared_ptr<Operation> rest;
  if (bytes <= Call::kSmallBytes && turns_.spins() && is_cheap && recv_briefly(request, source, rest)) return rest;
  return submit(std::move(request));
}

// False: nothing was begun. `rest`: what is left of it, null if it is done.
bool Points::recv_briefly(Request& request, int& source, std::shared_ptr<Operation>& rest) {
  PointToPoint::Now now;
  {
    const MutexLock lock(progress_.drive_mutex);
    if (!are_free()) return false;
    throw_complaint(request.root);
    PointToPoint& points = *progress_.under_way.points;
    progress_.entered([&]() {
      points.receive_now(request.root, request.tag, request.out, request.count, now);
      turns_.look_briefly([&](bool& moved) {
        if (!now.done) points.advance(moved);
        return now.done;
      });
    });
    if (!now.done) {
      rest = setup_.operation_of(std::move(request));
      rest->last_moved = Clock::now();
      points.go_on(now, rest);
    }
    progress_.note_busy_points();
  }
  if (now.error) std::rethrow_exception(now.error);
  source = now.source;
  return true;
}

}  // namespace dcoll
