#include "engine/communicator/communicator.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/collective/choose_path.h"
#include "engine/collective/on_device.h"

namespace dcoll {

std::shared_ptr<Communicator> Communicator::make(Members members, const Settings& settings) {
  const auto destroy = [](Communicator* communicator) {
    if (!communicator->in_forked_child()) delete communicator;
  };
  return {new Communicator(std::move(members), settings), destroy};
}

Communicator::Communicator(Members members, const Settings& settings) : setup_(std::move(members), settings) {
  watchdog_.begin_listening(setup_.members.diagnosis);
  setup_.members.driver->attach(turns_);
}

Communicator::~Communicator() {
  watchdog_.stop_listening();
  setup_.members.driver->detach(turns_);
}

// ---- Calls ----

namespace {

// For a driver to do, beside the program. Asked before the operation is handed over: from then on it is the driver's,
// which may be at it already.
bool takes_long(const Operation& operation) {
  return operation.staging != nullptr || !operation.request.call().is_small();
}

}  // namespace

std::shared_ptr<Operation> Communicator::submit(Request request, Start start, std::shared_ptr<Memory> keep) {
  check_process();
  if (is_point(request.kind)) return submit_message(std::move(request), std::move(keep));
  auto operation = setup_.operation_of(std::move(request));
  operation->keep = std::move(keep);
  const bool is_long = takes_long(*operation);
  progress_.free_last_name();
  const bool had_work = progress_.submit(operation);
  if (start == Start::kInBackground || (start == Start::kSoon && is_long)) {
    turns_.hand_over(Turns::Wake::kNow);
  } else if (start == Start::kSoon && !had_work) {
    turns_.begin_here();
  }  // what comes behind other operations begins when they end: somebody sees to them already
  return operation;
}

std::shared_ptr<Operation> Communicator::submit_message(Request request, std::shared_ptr<Memory> keep) {
  check_peer(request.kind, request.root, size());
  progress_.make_points();
  progress_.free_last_name();
  if (progress_.drive_mutex.try_lock()) {
    const MutexLock lock(progress_.drive_mutex, std::adopt_lock);
    PointToPoint& points = *progress_.under_way.points;
    if (!progress_.has_failed()) {
      const std::string text = progress_.entered([&] { return points.take_complaint(request.root); });
      if (!text.empty()) {
        throw MismatchError(text + " That was a message before this one, which was not begun: make this call again.");
      }
    }
  }
  const bool is_long = request.kind == Kind::kReceive && request.count > Call::kSmallBytes;
  auto operation = setup_.operation_of(std::move(request));
  operation->keep = std::move(keep);
  progress_.submit(operation);
  if (is_long || operation->staging != nullptr) {
    turns_.hand_over(Turns::Wake::kNow);  // to copy it takes longer than to wake somebody who does
  } else {
    turns_.begin_here();
  }
  return operation;
}

std::shared_ptr<Operation> Communicator::submit_by_name(Request request, std::shared_ptr<Memory> keep) {
  check_process();
  if (request.name.empty()) throw ArgumentError(request.describe() + " needs a name to meet the other ranks by.");
  auto operation = setup_.operation_of(std::move(request));
  operation->by_name = true;
  operation->keep = std::move(keep);
  const bool is_long = takes_long(*operation);
  progress_.make_names();
  progress_.submit_by_name(operation);
  if (is_long) {
    turns_.hand_over(Turns::Wake::kNow);
  } else {
    turns_.begin_here();
  }
  return operation;
}

std::shared_ptr<Operation> Communicator::run_or_submit(const Call& call) {
  check_process();
  std::shared_ptr<Operation> rest;
  if (call.plainly_valid(size()) && on_the_spot_.run(call, rest)) return rest;
  return submit(Request::of(call, size()), Start::kByWaiter);
}

std::shared_ptr<Operation> Communicator::run_or_submit(Request request) {
  if (request.kind == Kind::kAllReduce) return run_or_submit(request.call());
  check_process();
  std::shared_ptr<Operation> operation;
  if (on_the_spot_.run(request, operation)) return operation;
  return submit(std::move(request), Start::kByWaiter);
}

void Communicator::refuse(const std::string& why) {
  submit({.kind = Kind::kBarrier, .refusal = why.empty() ? "no reason was given" : why});
}

void Communicator::note_refused(const std::string& why) {
  if (in_forked_child()) return;
  const MutexLock lock(progress_.drive_mutex);
  progress_.take_inbox();
  const auto waiting =
      std::ranges::count(progress_.under_way.ordered, false, [](const auto& operation) { return operation->started; });
  progress_.fabric.out_of_step.refuse(progress_.under_way.started + static_cast<uint64_t>(waiting) + 1, why);
}

std::vector<std::shared_ptr<Operation>> Communicator::named_in_flight() {
  check_process();
  const MutexLock lock(progress_.drive_mutex);
  return progress_.named_in_flight();
}

std::shared_ptr<Operation> Communicator::submit_join(const std::string& note) {
  check_process();
  progress_.make_names();
  auto operation = std::make_shared<Operation>(Request{.kind = Kind::kJoin});
  operation->note = note;
  progress_.submit_join(operation);
  joins_.fetch_add(1, std::memory_order_relaxed);
  return operation;
}

// ---- Waiting ----

void Communicator::wait(Operation& operation, double timeout_s) {
  if (!wait_for(operation, timeout_s)) throw TimeoutError(unfinished_text(operation, timeout_s));
  if (operation.error) std::rethrow_exception(operation.error);
}

bool Communicator::wait_for(Operation& operation, double timeout_s, Spin spin) {
  progress_.free_last_name();
  if (operation.done.load(std::memory_order_acquire)) return true;
  check_process();
  return turns_.wait_for(operation, timeout_s, spin);
}

bool Communicator::poll(Operation& operation) {
  if (!operation.done.load(std::memory_order_acquire)) {
    if (in_forked_child()) return true;  // and a wait throws at once
    if (!turns_.poll(operation)) return false;
  }
  progress_.free_last_name();
  return true;
}

// ---- What it has ----

Communicator::Constants Communicator::constants() {
  check_process();
  const MutexLock lock(progress_.drive_mutex);
  return {.topology = progress_.fabric.topology,
          .source = progress_.fabric.links.source,
          .codings = progress_.fabric.codings};
}

std::string Communicator::describe_path(const Call& call, bool mapped) {
  check_process();
  const MutexLock lock(progress_.drive_mutex);
  const bool on_device = call.device != device::kHost;
  const Path path = choose_path(progress_.fabric, call);
  const auto or_else = [](Path one) { return std::string(path_text(one)) + "; else "; };
  std::string text;
  if (path == Path::kNccl) text = or_else(path);
  if (stays_on_device(progress_.fabric, call)) text += or_else(Path::kOpened);
  if (on_device) text += "copied to the host and back; there ";
  const Path by_host = path_by_host(progress_.fabric, call);
  text += path_text(by_host);
  if (by_host != Path::kNodeDirect) return text;
  // Of a device's memory the copy in the host's is mapped.
  return text + ", form: " + progress_.fabric.all_reduce->form_of(call.bytes(), mapped || on_device);
}

// ---- Its end ----

void Communicator::fail(const std::string& text) {
  if (in_forked_child()) return;
  {
    const MutexLock lock(progress_.drive_mutex);
    progress_.take_inbox();
    progress_.fail_with(std::make_exception_ptr(PeerError(text)), /*tell_peers=*/true);
    setup_.transport().wake();
  }
  if (progress_.has_work()) turns_.begin_here();
}

std::string Communicator::failure() const { return in_forked_child() ? "" : progress_.failure(); }

namespace {

// Before the farewell, which is not in their order: what every rank has submitted is done in no time, and what some
// rank never submits is not worth waiting for.
void finish_names(Communicator& communicator) {
  constexpr double kPatienceSeconds = 5;
  const auto begin = Clock::now();
  for (const auto& operation : communicator.named_in_flight()) {
    const double left = kPatienceSeconds - seconds_between(begin, Clock::now());
    if (left <= 0 || !communicator.wait_for(*operation, left)) return;
  }
}

}  // namespace

template <typename Meet>
void Communicator::part(Meet&& meet) {
  try {
    meet();
  } catch (const Error& e) {
    log()(LogLevel::kWarning, std::string("at shutdown: ") + e.what());
  } catch (const std::exception&) {  // no memory: the others must not wait for this rank
    const MutexLock driving(progress_.drive_mutex);
    progress_.fail_with(std::current_exception(), /*tell_peers=*/true);
  }
}

void Communicator::close() {
  if (in_forked_child()) return;
  if (progress_.close()) {
    part([this] {
      if (progress_.uses_names()) finish_names(*this);
      say_farewell();
    });
  } else if (const auto leaving = std::exchange(leaving_, nullptr); leaving != nullptr) {
    {
      const MutexLock driving(progress_.drive_mutex);
      leaving->patient = false;
      progress_.only_leaves.store(false);
      leaving->last_moved = Clock::now();
    }
    part([&] {
      try {
        if (!progress_.has_failed()) wait(*leaving);
      } catch (const MismatchError&) {
        say_farewell();
      }
    });
  } else {
    return;
  }
  stop();
}

void Communicator::leave() {
  if (in_forked_child() || !progress_.close()) return;
  part([this] {
    leaving_ = std::make_shared<Operation>(Request{.kind = Kind::kShutdown});
    leaving_->patient = true;
    if (progress_.uses_names()) finish_names(*this);
    watchdog_.stop_listening();  // a communicator of the same ranks may be made anew
    progress_.submit(leaving_, /*is_farewell=*/true);
    turns_.begin_here();
  });
}

bool Communicator::left() {
  if (leaving_ == nullptr || in_forked_child()) return true;
  if (!poll(*leaving_)) return false;
  const MutexLock driving(progress_.drive_mutex);
  return setup_.transport().wind_up();
}

void Communicator::stop() {
  {
    const MutexLock driving(progress_.drive_mutex);
    progress_.abandon_rest();
  }
  if (members().job_ranks.empty() && members().diagnosis != nullptr) members().diagnosis->stop();
  members().driver->detach(turns_);
}

// Waits until all ranks leave. One that leaves early, because of an error of its own, meets the others in whatever they
// called; they are told of the mismatch, which may well bring them here too, so it is tried again.
void Communicator::say_farewell() {
  constexpr int kTries = 3;
  for (int tried = 1; size() > 1 && !progress_.has_failed(); ++tried) {
    const auto farewell = std::make_shared<Operation>(Request{.kind = Kind::kShutdown});
    progress_.submit(farewell, /*is_farewell=*/true);
    try {
      return wait(*farewell);
    } catch (const MismatchError&) {
      if (tried == kTries) throw;
    }
  }
}

}  // namespace dcoll
