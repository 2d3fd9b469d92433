#include "engine/collective/device_work.h"

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/node/two_shot.h"

namespace dcoll {
namespace {

// Small: each rank reduces everything into its result. Else rank r reduces slice r of all operands, and writes it to
// all results.
class DeviceAllReduce final : public DeviceWork {
 public:
  using DeviceWork::DeviceWork;

  BoardEntry::Post post(bool by_host) override { return DeviceWork::post(out_, by_host); }
  void begin(uint64_t ticket) override {
    bool any_sliced = false;
    for (int rank = 0; rank < f_.size; ++rank) any_sliced |= DeviceWord::of(f_.board->at(rank, ticket).value).sliced;
    slice_ = any_sliced ? std::min(request_.bytes(), kSlice) : request_.bytes();
  }
  void move(uint64_t ticket) override {
    const Span part = is_small() ? Span{0, slice_} : TwoShot::slice(slice_, f_.rank, f_.size);
    std::vector<const void*> from;
    std::vector<void*> to;
    for (int rank = 0; rank < f_.size; ++rank) {
      const BoardEntry::Post post = f_.board->at(rank, ticket);
      from.push_back(place(rank, post.offset_in) + part.begin);
      if (!is_small()) to.push_back(place(rank, post.offset_out) + part.begin);
    }
    if (is_small()) to = {request_.out};
    const double scale = final_scale(request_.op, request_.postscale, f_.size);
    const size_t count = part.size() / dtype_bytes(request_.dtype);
    staging_.put([&](device::Device& device, device::Stream stream) {
      if (count > 0) device.reduce_n_to_n(to, from, count, request_.dtype, request_.op, scale, stream);
    });
  }
  bool next() override {
    if (!in_place_) {
      auto* const to = static_cast<std::byte*>(request_.out) + at_;
      staging_.put([&](device::Device& device, device::Stream stream) {
        device.copy(to, block_, slice_, stream);
        if (at_ + slice_ == request_.bytes()) memory_.left_behind(device_, stream);
      });
    }
    at_ += slice_;
    if (at_ == request_.bytes()) return false;
    slice_ = std::min(request_.bytes() - at_, kSlice);
    if (in_place_) {
      in_ += kSlice;
      out_ += kSlice;
    } else {
      show(at_, slice_);
    }
    return true;
  }
  std::string_view form() const override { return is_small() ? "device, each rank all" : "device, two-shot"; }

 private:
  bool shows_result() const override { return true; }
  std::byte* place(int rank, uint64_t word) { return memory_.place(rank, word, slice_, device_); }

  size_t at_ = 0;
};

// The others (node/pull.h): each rank takes the blocks meant for it out of all operands, or reduces them.
class DevicePull final : public DeviceWork {
 public:
  DevicePull(Fabric& f, Operation& op) : DeviceWork(f, op) {
    if (request_.kind == Kind::kReduceScatter) shares_ = request_.shares(f.size);
  }

  // The rows are told beside: of an all-gather in the post, of an all-to-all in the table of its slot.
  BoardEntry::Post post(bool by_host) override {
    if (request_.kind == Kind::kAllToAll) {
      uint64_t* const table = f_.pull_slots->table(f_.board->window().local_rank(), f_.board->next_ticket());
      std::copy(request_.splits.begin(), request_.splits.end(), table);
    }
    return DeviceWork::post(request_.kind == Kind::kAllGather ? request_.count : 0, by_host);
  }

  void begin(uint64_t ticket) override {
    if (is_ragged(request_.kind)) op_.counts.clear();
    for (int rank = 0; rank < f_.size; ++rank) {
      if (request_.kind != Kind::kBroadcast || rank == request_.root) sources_.push_back(source(rank, ticket));
    }
    to_ = static_cast<std::byte*>(request_.out);
    if (is_ragged(request_.kind)) place_result();
  }
  void move(uint64_t /*ticket*/) override {
    staging_.put([&](device::Device& device, device::Stream stream) {
      if (request_.kind == Kind::kReduceScatter) return reduce(device, stream);
      const size_t ranks = sources_.size();  // this rank's own first, so that no rank is everybody's first
      for (size_t i = 0; i < ranks; ++i) take(sources_[(i + static_cast<size_t>(f_.rank)) % ranks], device, stream);
    });
  }
  bool next() override {
    if (++round_ == rounds_) return false;
    if (!in_place_ && !is_small() && round_ * kSlice < request_.bytes()) {
      show(round_ * kSlice, std::min(kSlice, request_.bytes() - round_ * kSlice));
    }
    return true;
  }
  std::string_view form() const override { return "device, pull"; }

 private:
  // What a rank has for this one, in bytes of its operand.
  struct Source {
    Span block;
    size_t whole = 0;
    bool sliced = false;
    std::byte* at = nullptr;  // of the whole, or of the slice that is shown
    size_t to = 0;            // in the result
  };

  bool gives() const override {
    return request_.bytes() > 0 && (request_.kind != Kind::kBroadcast || f_.rank == request_.root);
  }
  bool shows_result() const override { return false; }

  Source source(int rank, uint64_t ticket) {
    const BoardEntry::Post post = f_.board->at(rank, ticket);
    Source one;
    one.sliced = DeviceWord::of(post.value).sliced;
    tell_blocks(rank, ticket, post.offset_out, one);
    if (one.sliced) rounds_ = std::max(rounds_, (one.whole + kSlice - 1) / kSlice);
    any_sliced_ = any_sliced_ || one.sliced;
    const size_t shown = one.sliced ? std::min(one.whole, kSlice) : one.whole;
    if (shown > 0) one.at = memory_.place(rank, post.offset_in, shown, device_);
    return one;
  }
  // Where the rank's block for this one begins and ends. rows: of a gather.
  void tell_blocks(int rank, uint64_t ticket, uint64_t rows, Source& one) {
    if (request_.kind == Kind::kBroadcast || request_.kind == Kind::kAllGather) {
      one.whole = request_.kind == Kind::kBroadcast ? request_.bytes() : bytes_of(rank, rows);
      one.block = {0, one.whole};
      if (request_.kind == Kind::kAllGather) op_.counts.push_back(static_cast<int64_t>(rows));
      return;
    }
    for (int to = 0; to < f_.size; ++to) {
      size_t bytes = 0;
      if (request_.kind == Kind::kAllToAll) {
        rows = read_once(f_.pull_slots->table(rank, ticket)[to]);
        if (to == f_.rank) op_.counts.push_back(static_cast<int64_t>(rows));
        bytes = bytes_of(rank, rows);
      } else {
        bytes = shares_[static_cast<size_t>(to)] * dtype_bytes(request_.dtype);
      }
      if (to == f_.rank) one.block = {one.whole, one.whole + bytes};
      one.whole += bytes;
    }
  }
  size_t bytes_of(int rank, uint64_t rows) const {
    const std::optional<size_t> bytes = bytes_of_told(rows, request_.row_elems);
    if (!bytes) {
      f_.board->throw_damaged(
          rank, " tells of " + std::to_string(rows) + " rows of " + std::to_string(request_.row_elems) + " bytes");
    }
    return *bytes;
  }
  // Where the caller has no room of just that size it is in memory of the host, which is copied to the device later.
  void place_result() {
    size_t bytes = 0;
    for (Source& one : sources_) {
      one.to = bytes;
      bytes += one.block.size();
    }
    if (request_.out != nullptr && bytes == request_.out_bytes) return;
    try {
      staging_.checked([&] { op_.output = staging_.lane().take(std::max<size_t>(bytes, 1)); });
    } catch (const std::bad_alloc&) {
      throw TransportError("no memory for a result of " + std::to_string(bytes) + " bytes");
    }
    to_ = op_.output->data();
  }

  // What of the block is shown in this round.
  Span shown(const Source& one) const {
    if (!one.sliced) return round_ == 0 ? one.block : Span{};
    const size_t begin = std::max(one.block.begin, round_ * kSlice);
    return {begin, std::max(begin, std::min(one.block.end, (round_ + 1) * kSlice))};
  }
  const std::byte* at(const Source& one, size_t begin) const {
    return one.at + (begin - (one.sliced ? round_ * kSlice : 0));
  }
  void take(const Source& one, device::Device& device, device::Stream stream) const {
    const Span part = shown(one);
    if (part.size() == 0) return;
    std::byte* const to = to_ + one.to + (part.begin - one.block.begin);
    const std::byte* const from = at(one, part.begin);
    if (to != from) device.copy(to, from, part.size(), stream);
  }
  // All have blocks of equal length, and go by slices if one does.
  void reduce(device::Device& device, device::Stream stream) const {
    Source slowest = sources_[0];
    slowest.sliced = any_sliced_;
    const Span part = shown(slowest);
    if (part.size() == 0) return;
    std::vector<const void*> from;
    for (const Source& one : sources_) from.push_back(at(one, part.begin));
    void* const to = to_ + (part.begin - slowest.block.begin);
    device.reduce_n_to_n({&to, 1}, from, part.size() / dtype_bytes(request_.dtype), request_.dtype, request_.op,
                         final_scale(request_.op, request_.postscale, f_.size), stream);
  }

  bool any_sliced_ = false;
  std::vector<size_t> shares_;   // of a reduce-scatter, in elements
  std::vector<Source> sources_;  // of all ranks, of a broadcast of the root alone
  std::byte* to_ = nullptr;      // the result
  size_t round_ = 0, rounds_ = 1;
};

}  // namespace

DeviceWork::DeviceWork(Fabric& f, Operation& op)
    : f_(f),
      memory_(*f.device_memory),
      staging_(*op.staging),
      op_(op),
      request_(op.request),
      device_(op.request.device) {}

bool DeviceWork::prepare(std::string& why) try {
  const size_t bytes = request_.bytes();
  if (!gives()) {
    in_ = out_ = 0;
  } else if (!is_small() && request_.prescale == 1.0) {
    in_ = memory_.word_of(request_.in, bytes, device_);
    out_ = shows_result() ? memory_.word_of(request_.out, bytes, device_) : 0;
  }
  in_place_ = in_ != Window::kUnmapped && out_ != Window::kUnmapped;
  if (in_place_) {
    staging_.put([](device::Device&, device::Stream) {});  // it is there once the caller's stream has made it
    return true;
  }
  slice_ = is_small() ? bytes : std::min(bytes, kSlice);
  block_ = is_small() ? memory_.next_half(device_) : memory_.block(device_, slice_);
  in_ = out_ = memory_.word_of(block_, slice_, device_);
  if (ready()) show(0, slice_);
  if (!ready()) why = "its memory cannot be shown to other processes";
  return ready();
} catch (const device::DeviceError& e) {
  why = e.what();
  return false;
}

BoardEntry::Post DeviceWork::post(uint64_t second, bool by_host) const {
  const bool large = !is_small() && gives(), sliced = ready() && !in_place_ && large;
  const DeviceWord word{device_, memory_.num_listed(), large, sliced, by_host};
  return {request_.fingerprint(), in_, second, word.word()};
}

void DeviceWork::show(size_t begin, size_t bytes) {
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

std::unique_ptr<DeviceWork> device_work(Fabric& f, Operation& op) {
  if (op.request.kind == Kind::kAllReduce) return std::make_unique<DeviceAllReduce>(f, op);
  return std::make_unique<DevicePull>(f, op);
}

}  // namespace dcoll
