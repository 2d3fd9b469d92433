#include "engine/collective/on_device.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "engine/collective/by_nccl.h"
#include "engine/collective/mismatch.h"
#include "engine/collective/run_collective.h"
#include "engine/core/slices.h"

namespace dcoll {
namespace {

class Arrival final : public Pollable {
 public:
  explicit Arrival(Staging& staging) : staging_(staging) {}
  bool poll(bool& /*moved*/) override { return staging_.arrived(); }
  void waiting_for(std::vector<int>& /*ranks*/) const override {}

 private:
  Staging& staging_;
};

// One all-reduce, as this rank does its part.
class DeviceAllReduce {
 public:
  DeviceAllReduce(Fabric& f, Operation& op)
      : f_(f), memory_(*f.device_memory), staging_(*op.staging), request_(op.request), device_(op.request.device) {}

  bool is_small() const { return request_.bytes() <= DeviceMemory::kSmallBytes; }
  bool ready() const { return in_ != Window::kUnmapped; }
  // Brings the operand, or its first slice, to where others read it. False: there is no room for that.
  bool prepare() try {
    const size_t bytes = request_.bytes();
    if (!is_small() && request_.prescale == 1.0) {
      in_ = memory_.word_of(request_.in, bytes);
      out_ = memory_.word_of(request_.out, bytes);
    }
    in_place_ = in_ != Window::kUnmapped && out_ != Window::kUnmapped;
    if (in_place_) {
      staging_.put([](device::Device&, device::Stream) {});  // it is there once the caller's stream has made it
      return true;
    }
    slice_ = is_small() ? bytes : std::min(bytes, DeviceMemory::kSliceBytes);
    block_ = is_small() ? memory_.next_half(device_) : memory_.block(device_, slice_);
    in_ = out_ = memory_.word_of(block_, slice_);
    if (ready()) fill(0, slice_);
    return ready();
  } catch (const device::DeviceError&) {
    return false;
  }
  DeviceWord word(bool host) const {
    return {device_, memory_.num_listed(), ready() && !in_place_ && !is_small(), host};
  }
  BoardEntry::Post post(DeviceWord word) const { return {request_.fingerprint(), in_, out_, word.word()}; }

  // All operands are where the post `ticket` says. A small one: the whole of it.
  void reduce_small(uint64_t ticket) {
    std::vector<const void*> from;
    for (int rank = 0; rank < f_.size; ++rank) from.push_back(place(rank, f_.board->at(rank, ticket).offset_in));
    void* const to = request_.out;
    reduce({&to, 1}, from, request_.count);
  }
  // This rank's part of a slice, for all.
  void reduce_part(uint64_t ticket) {
    const Span part = TwoShot::slice(slice_, f_.rank, f_.size);
    std::vector<const void*> from;
    std::vector<void*> to;
    for (int rank = 0; rank < f_.size; ++rank) {
      const BoardEntry::Post post = f_.board->at(rank, ticket);
      from.push_back(place(rank, post.offset_in) + part.begin);
      to.push_back(place(rank, post.offset_out) + part.begin);
    }
    reduce(to, from, part.size() / dtype_bytes(request_.dtype));
  }

  // The slices of what is not in place everywhere; of what is, all at once.
  void cut(bool all_in_place) { slice_ = all_in_place ? request_.bytes() : std::min(request_.bytes(), kSlice); }
  bool take_out() {
    if (!in_place_) {
      auto* const to = static_cast<std::byte*>(request_.out) + at_;
      staging_.put([&](device::Device& device, device::Stream stream) { device.copy(to, block_, slice_, stream); });
    }
    at_ += slice_;
    if (at_ == request_.bytes()) return false;
    slice_ = std::min(request_.bytes() - at_, kSlice);
    if (in_place_) {
      in_ += kSlice;
      out_ += kSlice;
    } else {
      fill(at_, slice_);
    }
    return true;
  }

 private:
  static constexpr size_t kSlice = DeviceMemory::kSliceBytes;

  void fill(size_t begin, size_t bytes) {
    const auto* from = static_cast<const std::byte*>(request_.in) + begin;
    staging_.put([&](device::Device& device, device::Stream stream) {
      if (request_.prescale == 1.0) {
        device.copy(block_, from, bytes, stream);
      } else if (bytes > 0) {
        const size_t count = bytes / dtype_bytes(request_.dtype);
        device.scale(block_, from, count, request_.dtype, request_.prescale, stream);
      }
    });
  }
  std::byte* place(int rank, uint64_t word) { return memory_.place(rank, word, slice_, device_); }
  void reduce(std::span<void* const> to, std::span<const void* const> from, size_t count) {
    const double scale = final_scale(request_.op, request_.postscale, f_.size);
    staging_.put([&](device::Device& device, device::Stream stream) {
      if (count > 0) device.reduce_n_to_n(to, from, count, request_.dtype, request_.op, scale, stream);
    });
  }

  Fabric& f_;
  DeviceMemory& memory_;
  Staging& staging_;
  const Request& request_;
  const int device_;
  bool in_place_ = false;
  std::byte* block_ = nullptr;
  uint64_t in_ = Window::kUnmapped, out_ = Window::kUnmapped;
  size_t slice_ = 0, at_ = 0;
};

// What the ranks say in the post `ticket`.
struct Said {
  Said(Fabric& f, uint64_t ticket) : all_ready(f.board->count_mapped(ticket) == f.size) {
    for (int rank = 0; rank < f.size; ++rank) {
      const DeviceWord word = DeviceWord::of(f.board->at(rank, ticket).value);
      devices.push_back(word.device);
      segments.push_back(word.segments);
      by_host = by_host || word.by_host;
      in_place = in_place && !word.sliced;
    }
  }
  std::vector<int> devices;
  std::vector<size_t> segments;
  bool by_host = false, in_place = true, all_ready;
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

bool all_say_yes(Fabric& f, uint64_t ticket) {
  for (int rank = 0; rank < f.size; ++rank) {
    if (f.board->at(rank, ticket).value != 1) return false;
  }
  return true;
}

// Every rank says whether it has something against it. From then on all stay, or none ever does.
Task settle(Fabric& f, Staging& staging, std::string why) {
  const uint64_t ticket = f.board->post({.value = why.empty() ? 1u : 0u});
  BoardWait everybody(*f.board, ticket);
  co_await everybody;
  if (all_say_yes(f, ticket)) co_return;
  f.device_memory->off = true;
  staging.lane().note_never_stays();
  if (f.log == nullptr || why.empty()) co_return;
  (*f.log)(LogLevel::kWarning, "all-reduces of tensors on devices go through host memory from now on: " + why);
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
  BoardWait everybody_shows(*f.board, ticket);
  co_await everybody_shows;
  std::vector<DeviceMemory::Shown> shown;
  std::vector<size_t> segments;
  for (int rank = 0; rank < f.size; ++rank) {
    const BoardEntry::Post post = f.board->at(rank, ticket);
    shown.push_back({post.offset_in, post.offset_out, post.value});
    segments.push_back(post.value);
  }
  attempt(why, [&] { memory.open_and_write(device, shown); });
  const uint64_t written = f.board->post({.value = why.empty() ? 1u : 0u});
  BoardWait everybody_wrote(*f.board, written);
  co_await everybody_wrote;
  if (all_say_yes(f, written)) attempt(why, [&] { memory.check(device); });
  co_await settle(f, staging, why);
  if (memory.off) co_return;
  memory.note_opened(devices, segments);
  if (f.log == nullptr || f.rank != 0) co_return;
  (*f.log)(LogLevel::kInfo,
           "all-reduces of tensors on devices are computed there, in memory that the ranks have opened of each other");
}

// All ranks are in the same operation: they open what they have not opened yet.
Task reach_each_other(Fabric& f, Staging& staging, const Said& said) {
  DeviceMemory& memory = *f.device_memory;
  if (!memory.knows(said.devices)) {
    co_await try_devices(f, staging, said.devices);
    co_return;
  }
  std::string why;
  attempt(why, [&] { memory.open(said.devices[static_cast<size_t>(f.rank)], said.segments); });
  co_await settle(f, staging, why);
  if (!memory.off) memory.note_opened(said.devices, said.segments);
}

// A rank alone: the operand is the result, unless it is scaled.
bool stays_alone(const Fabric& f, const Request& r) {
  return f.size == 1 && r.prescale == 1.0 && final_scale(r.op, r.postscale, 1) == 1.0;
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
Task reduce_on_device(Fabric& f, Operation& op, DeviceAllReduce& all_reduce, uint64_t ticket, bool in_place) {
  Arrival arrival(*op.staging);
  op.phases.enter(Phase::kMove);
  op.phases.name_algorithm(all_reduce.is_small() ? "device, each rank all" : "device, two-shot");
  if (all_reduce.is_small()) {
    all_reduce.reduce_small(ticket);
    co_await arrival;
    co_return;
  }
  all_reduce.cut(in_place);
  for (;;) {
    all_reduce.reduce_part(ticket);
    co_await arrival;
    BoardWait everybody_reduced(*f.board, f.board->post({}));
    co_await everybody_reduced;
    if (!all_reduce.take_out()) co_return;
    co_await arrival;
    ticket = f.board->post(all_reduce.post(all_reduce.word(false)));
    BoardWait everybody_filled(*f.board, ticket);
    co_await everybody_filled;
  }
}

}  // namespace

bool may_stay_on_device(const Call& call) {
  return call.kind == Kind::kAllReduce && call.op != ReduceOp::kAdasum && !call.encoding && !call.packed &&
         call.device != device::kHost;
}

bool stays_on_device(const Fabric& f, const Call& call) {
  return may_stay_on_device(call) && f.device_memory != nullptr && !f.device_memory->off && !f.by_host &&
         call.algo.or_else(f.algo).takes_direct();
}

Task by_host(Fabric& f, Operation& op) {
  if (!op.staging->goes_by_host()) op.staging->go_by_host(op.request);
  return through_host(f, op);
}

Task on_device(Fabric& f, Operation& op) {
  Staging& staging = *op.staging;
  const Request& r = op.request;
  Arrival arrival(staging);
  co_await arrival;
  if (!staging.goes_by_host() && stays_alone(f, r)) {
    staging.put([&](device::Device& device, device::Stream stream) {
      if (r.in != r.out) device.copy(r.out, r.in, r.bytes(), stream);
    });
    co_return;
  }
  if (goes_by_nccl(f, r.call())) {
    co_await by_nccl(f, op);
    co_return;
  }
  if (!stays_on_device(f, r.call())) {
    co_await by_host(f, op);
    co_return;
  }
  const int64_t begin_ns = now_ns();
  if (f.slots_posted != 0) co_await learn_slots(f);
  DeviceAllReduce all_reduce(f, op);
  bool host = staging.goes_by_host();
  for (;;) {
    op.phases.enter(Phase::kAgree);
    if (!host && !all_reduce.ready() && f.device_memory->is_likely(r.device)) {
      host = !all_reduce.prepare();
      co_await arrival;
    }
    // From the post on: the others may begin before this rank has seen that all have come.
    staging.set_shown(!host && all_reduce.ready());
    const uint64_t ticket = f.board->post(all_reduce.post(all_reduce.word(host)));
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
    co_await reduce_on_device(f, op, all_reduce, ticket, said.in_place);
    staging.set_shown(false);
    co_await note_opened(f, r.call(), begin_ns);
    co_return;
  }
}

}  // namespace dcoll
