#include "engine/collective/on_device.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "engine/collective/by_nccl.h"
#include "engine/collective/choose_path.h"
#include "engine/collective/device_work.h"
#include "engine/collective/mismatch.h"
#include "engine/collective/run_collective.h"
#include "engine/core/slices.h"

namespace dcoll {
namespace {

class Arrival final : public Pollable {
 public:
  explicit Arrival(Staging& staging) : staging_(staging) {}
  bool poll(bool& /*moved*/) override { return staging_.arrived(); }

 private:
  Staging& staging_;
};

// What the ranks say in the post `ticket`.
struct Said {
  Said(Fabric& f, uint64_t ticket) : all_ready(f.board->count_mapped(ticket) == f.size) {
    for (int rank = 0; rank < f.size; ++rank) {
      const DeviceWord word = DeviceWord::of(f.board->at(rank, ticket).value);
      devices.push_back(word.device);
      segments.push_back(word.segments);
      by_host = by_host || word.by_host;
      any_large = any_large || word.large;
    }
  }
  std::vector<int> devices;
  std::vector<size_t> segments;
  bool by_host = false, any_large = false, all_ready;
};

// What this rank has against staying on the device, from a step that may fail.
template <typename Step>
void attempt(std::string& why, const Step& step) {
  if (!why.empty()) return;
  try {
    step();
  } catch (const device::DeviceError& e) {
    why = e.what();
  }
}

Task meet(Fabric& f, uint64_t ticket) {
  BoardWait everybody(*f.board, ticket);
  co_await everybody;
}

// Every rank says whether it has something against it. From then on all stay, or none ever does.
Task settle(Fabric& f, Staging& staging, std::string why) {
  const uint64_t ticket = f.board->post({.value = why.empty()});
  co_await meet(f, ticket);
  if (f.board->all_say_yes(ticket)) co_return;
  f.device_memory->off = true;
  staging.lane().note_never_stays();
  if (why.empty()) co_return;
  f.tell(LogLevel::kWarning, "collectives of tensors on devices go through host memory from now on: " + why);
}

// Whether the ranks' devices reach each other's memory.
Task try_devices(Fabric& f, Staging& staging, const std::vector<int>& devices) {
  DeviceMemory& memory = *f.device_memory;
  const int device = devices[static_cast<size_t>(f.rank)];
  std::string why;
  DeviceMemory::Shown own;
  attempt(why, [&] { own = memory.show(device); });
  const uint64_t ticket =
      f.board->post({.offset_in = own.list, .offset_out = own.memory, .value = uint64_t{own.segments}});
  co_await meet(f, ticket);
  std::vector<DeviceMemory::Shown> shown;
  std::vector<size_t> segments;
  for (int rank = 0; rank < f.size; ++rank) {
    const BoardEntry::Post post = f.board->at(rank, ticket);
    shown.push_back({post.offset_in, post.offset_out, post.value});
    segments.push_back(post.value);
  }
  attempt(why, [&] { memory.open_and_write(devices, shown); });
  const uint64_t written = f.board->post({.value = why.empty()});
  co_await meet(f, written);
  if (f.board->all_say_yes(written)) attempt(why, [&] { memory.check(device); });
  co_await settle(f, staging, why);
  if (memory.off) co_return;
  memory.note_opened(devices, segments);
  f.tell_for_all(
      LogLevel::kInfo,
      "collectives of tensors on devices stay there, in memory that the ranks have opened of each other by " +
          std::string(memory.way()));
}

// All ranks are in the same operation: they open what they have not opened yet.
Task reach_each_other(Fabric& f, Staging& staging, const Said& said) {
  DeviceMemory& memory = *f.device_memory;
  if (!memory.knows(said.devices)) {
    co_await try_devices(f, staging, said.devices);
    co_return;
  }
  std::string why;
  attempt(why, [&] { memory.open(said.devices, said.segments); });
  co_await settle(f, staging, why);
  if (!memory.off) memory.note_opened(said.devices, said.segments);
}

// A rank alone: the operand is the result, unless it is scaled.
bool is_scaled_alone(const Request& r) {
  return reduces(r.kind) && (r.prescale != 1.0 || final_scale(r.op, r.postscale, 1) != 1.0);
}

bool stays_alone(const Fabric& f, const Request& r) {
  return f.size == 1 && may_stay_on_device(r.call()) && !is_ragged(r.kind) &&
         (!is_scaled_alone(r) || device::device_of(r.device).has_kernels());
}

// Nobody else takes part, so the host need not wait for the device: events put it behind what the caller's stream has.
void move_alone(Staging& staging, const Request& r) {
  staging.put_behind_caller([&](device::Device& device, device::Stream stream) {
    const double last = final_scale(r.op, r.postscale, 1);
    if (!is_scaled_alone(r)) {
      if (r.in != r.out) device.copy(r.out, r.in, r.bytes(), stream);
      return;
    }
    const size_t count = r.bytes() / dtype_bytes(r.dtype);
    if (count == 0) return;
    const bool twice = r.prescale != 1.0 && last != 1.0;  // rounded in between, as between ranks
    device.scale(r.out, r.in, count, r.dtype, r.prescale != 1.0 ? r.prescale : last, stream);
    if (twice) device.scale(r.out, r.out, count, r.dtype, last, stream);
  });
}

Task through_host(Fabric& f, Operation& operation) {
  Slices slices(operation.request, operation.staging->slice_bytes());
  for (size_t slice = 0; slice < slices.number(); ++slice) {
    Arrival arrival(*operation.staging);
    co_await arrival;
    slices.enter(slice);
    co_await run_collective(f, operation);
    operation.staging->send_back(operation);
  }
  slices.leave();
}

// Everybody is ready, as post `ticket` says.
Task move_on_device(Fabric& f, Operation& op, DeviceWork& work, uint64_t ticket, const Said& said) {
  Arrival arrival(*op.staging);
  op.phases.enter(Phase::kMove);
  op.phases.name_algorithm(work.form());
  work.begin(ticket);
  for (;;) {
    work.move(ticket);
    co_await arrival;
    if (!said.any_large) co_return;  // small blocks are used by turns
    ticket = f.board->post({});
    co_await meet(f, ticket);
    if (!work.next()) co_return;
    co_await arrival;
    ticket = f.board->post(work.post(/*by_host=*/false));
    co_await meet(f, ticket);
  }
}

Task in_opened_memory(Fabric& f, Operation& op) {
  Staging& staging = *op.staging;
  const Request& r = op.request;
  Arrival arrival(staging);
  const int64_t begin_ns = now_ns();
  if (f.slots_posted != 0) co_await learn_slots(f);
  const std::unique_ptr<DeviceWork> work = device_work(f, op);
  bool host = staging.goes_by_host();
  for (;;) {
    op.phases.enter(Phase::kAgree);
    if (!host && !work->ready() && f.device_memory->is_likely(r.device)) {
      std::string why;
      host = !work->prepare(why);
      if (host) tell_of_host(f, why);
      co_await arrival;
    }
    // From the post on: the others may begin before this rank has seen that all have come.
    staging.set_shown(!host && work->ready());
    const uint64_t ticket = f.board->post(work->post(host));
    BoardWait everybody(*f.board, ticket);
    co_await everybody;
    if (!f.board->fingerprints_equal(ticket)) {
      staging.set_shown(false);
      co_await resolve_mismatch(f, op, Within::kDevice);
      co_return;
    }
    const Said said(f, ticket);
    host = host || said.by_host;
    const bool reached = f.device_memory->has_opened(said.devices, said.segments);
    if (!host && !reached) co_await reach_each_other(f, staging, said);
    if (host || f.device_memory->off) {
      staging.set_shown(false);
      co_await by_host(f, op);
      co_return;
    }
    // Another post: those that did not know of the others' memory get ready now, and this one may be overwritten.
    if (!reached || !said.all_ready) continue;
    co_await move_on_device(f, op, *work, ticket, said);
    staging.set_shown(false);
    co_await note_timed(f, r.call(), begin_ns);
    co_return;
  }
}

}  // namespace

bool may_stay_on_device(const Call& call) {
  if (call.device == device::kHost || is_point(call.kind) || is_meeting(call.kind)) return false;
  if (call.encoding && !is_cast(call.encoding)) return false;
  return !(reduces(call.kind) && call.op == ReduceOp::kAdasum) && !call.packed;
}

bool stays_on_device(const Fabric& f, const Call& call) {
  return may_stay_on_device(call) && f.device_memory != nullptr && !f.device_memory->off && !f.by_host &&
         call.algo.or_else(f.algo).takes_direct() && !is_cast_on_device(f, call);
}

void tell_of_host(Fabric& f, const std::string& why) {
  if (std::exchange(f.told_by_host, true)) return;
  f.tell(LogLevel::kWarning,
         "a collective of tensors on devices goes through host memory, and so will each for which this holds: " + why);
}

Task by_host(Fabric& f, Operation& op) {
  if (!op.staging->goes_by_host()) op.staging->go_by_host(op.request);
  return through_host(f, op);
}

Task on_device(Fabric& f, Operation& op) {
  Staging& staging = *op.staging;
  const Request& r = op.request;
  if (!staging.goes_by_host() && stays_alone(f, r)) {
    move_alone(staging, r);
    co_return;
  }
  Arrival arrival(staging);
  co_await arrival;
  if (r.encoding && !r.in_full) f.tell_uncompressed();
  switch (choose_path(f, r.call())) {
    case Path::kNccl:
      co_await by_nccl(f, op);
      break;
    case Path::kOpened:
      co_await in_opened_memory(f, op);
      break;
    default:
      co_await by_host(f, op);
  }
}

Task without_nccl(Fabric& f, Operation& op) {
  return stays_on_device(f, op.request.call()) ? in_opened_memory(f, op) : by_host(f, op);
}

}  // namespace dcoll
